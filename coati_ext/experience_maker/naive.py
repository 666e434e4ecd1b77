"""Experience for GRPO: groups of graded completions, with the log-probabilities that an update needs.

P prompts, G completions of each, B = P * G rows, S tokens, A = S - 1 predicted positions.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedTokenizerBase

from coati_ext.experience_buffer import Experience
from coati_ext.experience_maker.metrics import rollout_metrics
from coati_ext.experience_maker.rollout import Completion, Group, Rollout
from coati_ext.experience_maker.scoring import RewardModels
from coati_ext.models.advantages import ADVANTAGES, group_advantages
from coati_ext.models.completion_log_probs import CompletionLogProbs
from coati_ext.models.generation import Sampling
from coati_ext.models.lora import adapters_disabled
from coati_ext.utils.collective import rank_and_size
from coati_ext.utils.metric_sums import Metric

NextPrompts = Callable[[int], list[dict[str, Any]]]


class NaiveExperienceMaker:
    """Draws, grades and compares completions in the training process.

    Args:
        actor: the policy, or a wrapper around it.
        reward_model: as `score_completions` takes it.
        initial_model: the reference; None: the policy with its adapters off.
        num_generation: completions of a prompt, G.
        inference_batch_size: most completions that are drawn at a time.
        logits_forward_batch_size: rows of one forward pass for log-probabilities; the same on all ranks.
        advantage: one of `coati_ext.models.advantages.ADVANTAGES`.
        with_old_log_probs, with_reference: whether an update will need them.
        mask_truncated: leave completions that were cut at the limit out of the loss.
        dynamic_sampling_rounds: how often groups that teach nothing are replaced by those of new prompts.
        seed: of the noise; what is drawn for a prompt depends on it and on the prompt's number alone.
        group: the ranks that must call the model together (expert parallelism).
        dp_group: the ranks that have different prompts.
        copies: the ranks that have the same prompts (tensor parallelism).
    """

    def __init__(
        self,
        actor: nn.Module,
        reward_model: RewardModels,
        initial_model: nn.Module | None,
        tokenizer: PreTrainedTokenizerBase,
        *,
        num_generation: int = 8,
        inference_batch_size: int | None = None,
        logits_forward_batch_size: int = 16,
        advantage: str = "group_std",
        with_old_log_probs: bool = True,
        with_reference: bool = False,
        mask_truncated: bool = False,
        dynamic_sampling_rounds: int = 0,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
        dp_group: dist.ProcessGroup | None = None,
        copies: dist.ProcessGroup | None = None,
    ) -> None:
        if advantage not in ADVANTAGES:
            raise ValueError(f"unknown advantage {advantage!r}; known are {', '.join(ADVANTAGES)}")
        self.actor, self.initial_model, self.num_generation = actor, initial_model, num_generation
        self.logits_forward_batch_size, self.advantage = logits_forward_batch_size, advantage
        self.with_old_log_probs, self.with_reference = with_old_log_probs, with_reference
        self.mask_truncated, self.dynamic_sampling_rounds = mask_truncated, dynamic_sampling_rounds
        self.dp_group = dp_group
        self.log_probs = CompletionLogProbs(actor)
        self._reference = CompletionLogProbs(initial_model) if initial_model is not None else self.log_probs
        self.rollout = Rollout(
            actor,
            reward_model,
            tokenizer,
            inference_batch_size=inference_batch_size,
            seed=seed,
            group=group,
            copies=copies,
        )
        self.samples: list[Completion] = []
        """The completions of the last call."""

    def make_experience(
        self, next_prompts: NextPrompts, num_prompts: int, sampling: Sampling
    ) -> tuple[Experience, dict[str, Metric]]:
        """Experience of `num_prompts` groups of this rank, a group's rows together, and metrics of the rollout.

        Args:
            next_prompts: `PromptLoader.next`; called with the same numbers on all ranks.
            sampling: its temperature is that of the log-probabilities too.

        Raises:
            ValueError, RuntimeError: of the generation or of a reward, on all ranks.
        """
        if sampling.temperature == 0:
            raise ValueError(
                "a temperature of 0 draws the same completion each time, which has nothing to compare with"
            )
        groups, metrics = self._collect(next_prompts, num_prompts, sampling)
        self.samples = [completion for group in groups for completion in group]
        experience = self._experience(groups)
        start = time.perf_counter()
        if self.with_old_log_probs:
            experience.action_log_probs = self._in_chunks(self.log_probs, experience, sampling.temperature)
        if self.with_reference:
            with adapters_disabled(self.actor):  # of an `initial_model` of its own: no effect
                experience.reference_log_probs = self._in_chunks(self._reference, experience, sampling.temperature)
        self.rollout.seconds["log_probs"] = time.perf_counter() - start
        return experience, metrics

    def _collect(
        self, next_prompts: NextPrompts, num_prompts: int, sampling: Sampling
    ) -> tuple[list[Group], dict[str, Metric]]:
        """Groups that differ in what they are paid, as far as the rounds allow, then others."""
        kept: list[Group] = []
        spare: list[Group] = []
        drawn: list[Group] = []
        for _ in range(1 + self.dynamic_sampling_rounds):
            missing = self._most(num_prompts - len(kept))
            if missing <= 0:
                break
            groups = self.rollout(next_prompts(missing), sampling, self.num_generation)
            drawn += groups
            for group in groups:
                (kept if not self.dynamic_sampling_rounds or _differs(group) else spare).append(group)
        return (kept + spare)[:num_prompts], rollout_metrics(drawn, num_kept=min(len(kept), num_prompts))

    def _most(self, count: int) -> int:
        """Over the ranks."""
        if rank_and_size(self.dp_group)[1] == 1:
            return count
        found = torch.tensor(count, device=self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.dp_group)
        return int(found)

    @property
    def _device(self) -> torch.device:
        return next(self.actor.parameters()).device

    def _experience(self, groups: list[Group]) -> Experience:
        rows = [completion for group in groups for completion in group]
        rewards_B = torch.tensor([completion.reward for completion in rows])
        advantages_PG, valid_PG = group_advantages(rewards_B.view(len(groups), -1), self.advantage)
        length = max(len(row.prompt["input_ids"]) + len(row.ids) for row in rows)
        sequences_BS = torch.zeros(len(rows), length, dtype=torch.int64)
        attention_BS = torch.zeros(len(rows), length, dtype=torch.bool)
        action_BA = torch.zeros(len(rows), length - 1, dtype=torch.bool)
        sampler_BA = torch.zeros(len(rows), length - 1)
        for i, (row, valid) in enumerate(zip(rows, valid_PG.flatten().tolist(), strict=True)):
            start, stop = len(row.prompt["input_ids"]), len(row.prompt["input_ids"]) + len(row.ids)
            sequences_BS[i, :stop] = torch.tensor(row.prompt["input_ids"] + row.ids)
            attention_BS[i, :stop] = True
            action_BA[i, start - 1 : stop - 1] = valid and not (self.mask_truncated and row.truncated)
            sampler_BA[i, start - 1 : stop - 1] = torch.tensor(row.log_probs)
        experience = Experience(
            sequences=sequences_BS,
            attention_mask=attention_BS,
            action_mask=action_BA,
            sampler_log_probs=sampler_BA,
            reward=rewards_B,
            advantages=advantages_PG.flatten(),
        )
        return experience.to(self._device)

    @torch.no_grad()
    def _in_chunks(self, log_probs: CompletionLogProbs, experience: Experience, temperature: float) -> torch.Tensor:
        """(B, A), some rows at a time, rows of like length together."""
        found_BA = torch.zeros_like(experience.sampler_log_probs)
        order = experience.attention_mask.sum(-1).argsort().cpu()
        for index in order.split(self.logits_forward_batch_size):
            part = experience.take(index)
            values, _ = log_probs(part.sequences, part.action_mask, temperature)
            found_BA[index, : values.shape[1]] = values.float()
        return found_BA


def _differs(group: Group) -> bool:
    """By accuracy, since shaped rewards always differ; by reward where nothing judged the answers."""
    accuracies = [completion.score.accuracy for completion in group]
    values = accuracies if all(value is not None for value in accuracies) else [c.reward for c in group]
    finite = [value for value in values if value == value]
    return len(set(finite)) > 1
