"""Draw the completions of prompts and have them graded."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import PreTrainedTokenizerBase

from coati_ext.experience_maker.scoring import RewardModels, score_completions
from coati_ext.models.generation import Completions, Sampling, generate
from coati_ext.models.reward_score import Score
from coati_ext.utils.collective import errors_everywhere, rank_and_size


@dataclass(kw_only=True)
class Completion:
    """One answer to a prompt."""

    prompt: dict[str, Any]
    """An item of `RawPromptDataset`."""
    ids: list[int]
    log_probs: list[float]
    """Of the distribution that each token was drawn from."""
    truncated: bool
    text: str
    """Of all tokens: what stands between a reward's tags may be special ones."""
    score: Score

    @property
    def reward(self) -> float:
        """NaN where the completion cannot be graded."""
        return float("nan") if self.score.score is None else self.score.score

    def state(self) -> dict[str, Any]:
        """What there is to show of it, as JSON: without the prompt's tokens and the log-probabilities."""
        prompt = {name: value for name, value in self.prompt.items() if name != "input_ids"}
        return {**vars(self), "prompt": prompt, "log_probs": [], "score": vars(self.score)}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "Completion":
        return cls(**{**state, "score": Score(**state["score"])})


Group = list[Completion]


class Rollout:
    """Callable: prompts -> a group of completions for each.

    Args:
        actor: the policy, or a wrapper around it.
        reward_model: as `score_completions` takes it.
        inference_batch_size: most completions at a time.
        group: the ranks that must call the model together (expert parallelism).
        copies: the ranks that have the same prompts (tensor parallelism); all take what the first of them drew and
            graded, since a grader's deadline is not met alike.

    Attributes:
        seconds: spent on "generate" and "reward", added up.
        num_tokens: drawn.
    """

    def __init__(
        self,
        actor: nn.Module,
        reward_model: RewardModels,
        tokenizer: PreTrainedTokenizerBase,
        *,
        inference_batch_size: int | None = None,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
        copies: dist.ProcessGroup | None = None,
    ) -> None:
        self.actor, self.reward_model, self.tokenizer = actor, reward_model, tokenizer
        self.inference_batch_size, self.seed, self.group = inference_batch_size, seed, group
        self.copies = copies
        self.seconds = {"generate": 0.0, "reward": 0.0}
        self.num_tokens = 0

    def __call__(self, prompts: Sequence[dict[str, Any]], sampling: Sampling, num_samples: int) -> list[Group]:
        """All ranks of the groups call it, also one without prompts.

        Args:
            prompts: of `PromptLoader.next`.

        Raises:
            ValueError, RuntimeError: of the generation or of a reward, on all ranks.
        """
        start = time.perf_counter()
        drawn = generate(
            self.actor,
            [prompt["input_ids"] for prompt in prompts],
            sampling,
            num_samples=num_samples,
            seed=(self.seed,),
            prompt_numbers=[prompt["number"] for prompt in prompts],
            tokenizer=self.tokenizer,
            group=self.group,
            batch_size=self.inference_batch_size,
            pad_id=sampling.stop_ids[0],
        )
        self._count("generate", start)
        self.num_tokens += sum(map(len, drawn.ids))
        start = time.perf_counter()
        asked = [prompt for prompt in prompts for _ in range(num_samples)]
        with errors_everywhere(dist.group.WORLD if dist.is_initialized() else None):
            texts, scores = self._grade(asked, drawn) if rank_and_size(self.copies)[0] == 0 else ([], [])
        if self.copies is not None:
            box = [(drawn, texts, scores)]
            dist.broadcast_object_list(box, group=self.copies, group_src=0)
            drawn, texts, scores = box[0]
        self._count("reward", start)
        truncated = [not finished for finished in drawn.finished]
        rows = zip(asked, drawn.ids, drawn.log_probs, truncated, texts, scores, strict=True)
        names = ("prompt", "ids", "log_probs", "truncated", "text", "score")
        completions = [Completion(**dict(zip(names, row, strict=True))) for row in rows]
        return [completions[first : first + num_samples] for first in range(0, len(completions), num_samples)]

    def _grade(self, asked: list[dict[str, Any]], drawn: Completions) -> tuple[list[str], list[Score]]:
        if not asked:
            return [], []  # of no completions transformers would make one empty text
        texts = self.tokenizer.batch_decode(drawn.ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        truncated = [not finished for finished in drawn.finished]
        return texts, score_completions(self.reward_model, asked, texts, truncated, [len(ids) for ids in drawn.ids])

    def _count(self, phase: str, start: float) -> None:
        self.seconds[phase] += time.perf_counter() - start
