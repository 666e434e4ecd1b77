"""How well the policy does on held-out prompts: greedily, and by pass@k."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from coati_ext.experience_maker.rollout import Group, Rollout
from coati_ext.models.generation import Sampling
from coati_ext.utils.metric_sums import Mean, MetricSums


class Evaluation:
    """Callable; every rank takes its share of the prompts, and all get the same numbers.

    Args:
        rollout: of its own, whose seed is the same in every evaluation: what changes is the policy.
        prompts: items of `RawPromptDataset`, all of which are evaluated; there may be fewer than ranks.
        sampling: its temperature is for pass@k.
        num_samples: k; 0: greedy only.
        dp_rank, dp_size: this rank's share.
    """

    def __init__(
        self,
        rollout: Rollout,
        prompts: Dataset,
        sampling: Sampling,
        num_samples: int = 0,
        *,
        dp_rank: int = 0,
        dp_size: int = 1,
    ) -> None:
        self.rollout, self.sampling, self.num_samples = rollout, sampling, num_samples
        indices = range(dp_rank, len(prompts), dp_size)
        self._prompts: list[dict[str, Any]] = [{**prompts[index], "number": index} for index in indices]
        self.num_prompts = len(prompts)

    def __call__(self, group: dist.ProcessGroup | None) -> dict[str, float]:
        """eval/accuracy (where the rewards judge answers), eval/reward, eval/length and eval/truncated of the most
        probable completion, and eval/unscored, the share that the first two leave out; eval/pass@k, the share of
        prompts that one of k completions solves, and eval/mean@k.

        Args:
            group: of the data-parallel ranks.
        """
        sums = MetricSums()
        greedy = self.rollout(self._prompts, replace(self.sampling, temperature=0.0), 1)
        rows = [completion for one in greedy for completion in one]
        scored = [row for row in rows if row.score.score is not None]
        sums.add(
            {
                "eval/accuracy": _mean([r.score.accuracy for r in scored if r.score.accuracy is not None]),
                "eval/reward": _mean([row.reward for row in scored]),
                "eval/length": _mean([len(row.ids) for row in rows]),
                "eval/truncated": _mean([row.truncated for row in rows]),
                "eval/unscored": _mean([row.score.score is None for row in rows]),
            }
        )
        if self.num_samples:
            groups = self.rollout(self._prompts, self.sampling, self.num_samples)
            judged = [accuracies for accuracies in map(_accuracies, groups) if accuracies]
            sums.add(
                {
                    f"eval/pass@{self.num_samples}": _mean([max(accuracies) for accuracies in judged]),
                    f"eval/mean@{self.num_samples}": _mean([sum(one) / len(one) for one in judged]),
                }
            )
        return sums.reduce(group)


def _accuracies(group: Group) -> list[float]:
    return [c.score.accuracy for c in group if c.score.accuracy is not None]


def _mean(values: list[float]) -> Mean:
    return Mean(torch.tensor(float(sum(values)), dtype=torch.float64), torch.tensor(len(values)))
