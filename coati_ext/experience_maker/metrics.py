"""What a user should know of a rollout, as sums that no split over ranks or collections changes."""

import math
from collections.abc import Mapping, Sequence

import torch

from coati_ext.experience_maker.rollout import Group
from coati_ext.models.advantages import zero_variance
from coati_ext.models.reward_score import REASONS
from coati_ext.utils.metric_sums import Max, Mean, Metric


def rollout_metrics(groups: Sequence[Group], *, num_kept: int) -> dict[str, Metric]:
    """Means over completions, groups or what is named; every name is there in every rollout that has a completion.

    reward, reward_square (for the standard deviation), reward_parts/*, accuracy, unscored, reasons/*, format,
    zero_variance and group_reward_std (of groups), kept (share of the groups drawn that were trained on), length/mean,
    length/max, length/ended (of completions that ended by themselves), length/truncated.
    """
    rows = [completion for group in groups for completion in group]
    scored = [row for row in rows if row.score.score is not None]
    judged = [row.score.accuracy for row in scored if row.score.accuracy is not None]
    rewards_PG = torch.tensor([[row.reward for row in group] for group in groups], dtype=torch.float64)
    metrics: dict[str, Metric] = {
        "reward": _mean([row.reward for row in scored]),
        "reward_square": _mean([row.reward**2 for row in scored]),
        "accuracy": _mean(judged),
        "unscored": _mean([row.score.score is None for row in rows]),
        "format": _mean([r.score.reason in ("correct", "wrong") for r in scored if r.score.reason != "unjudged"]),
        "zero_variance": _mean(zero_variance(rewards_PG).tolist()),
        "group_reward_std": _mean([std for std in map(_std, rewards_PG.tolist()) if std is not None]),
        "kept": Mean(torch.tensor(float(num_kept), dtype=torch.float64), torch.tensor(len(groups))),
        "length/mean": _mean([len(row.ids) for row in rows]),
        "length/max": Max(torch.tensor(float(max(len(row.ids) for row in rows)), dtype=torch.float64)),
        "length/ended": _mean([len(row.ids) for row in rows if not row.truncated]),
        "length/truncated": _mean([row.truncated for row in rows]),
    }
    metrics |= {f"reasons/{reason}": _mean([row.score.reason == reason for row in rows]) for reason in REASONS}
    parts = dict.fromkeys(name for row in scored for name in row.score.parts)
    metrics |= {
        f"reward_parts/{name}": _mean([row.score.parts[name] for row in scored if name in row.score.parts])
        for name in parts
    }
    return metrics


def finished_metrics(reduced: Mapping[str, float]) -> dict[str, float]:
    """The reduced metrics, with the standard deviation of the reward in place of its square."""
    reduced = dict(reduced)
    square = reduced.pop("reward_square", None)
    if square is not None:
        reduced["reward_std"] = math.sqrt(max(0.0, square - reduced["reward"] ** 2))
    return reduced


def _mean(values: Sequence[float]) -> Mean:
    return Mean(torch.tensor(float(sum(values)), dtype=torch.float64), torch.tensor(len(values)))


def _std(rewards: Sequence[float]) -> float | None:
    finite = [reward for reward in rewards if math.isfinite(reward)]
    return float(torch.tensor(finite, dtype=torch.float64).std()) if len(finite) > 1 else None
