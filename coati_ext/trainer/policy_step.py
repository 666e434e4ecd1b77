"""One optimizer step of a policy: the loss over all completions of the step, wherever they lie.

The denominators are counted over all micro-batches and ranks before the first forward pass, so the loss and its
gradients are the same whatever the split. B completions, A predicted positions.
"""

import warnings
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from coati_ext.dataset.packing import model_inputs
from coati_ext.experience_buffer import Experience
from coati_ext.models.aggregation import Denominators
from coati_ext.models.completion_log_probs import CompletionLogProbs
from coati_ext.models.importance import masked_mean
from coati_ext.models.lm_head import LanguageModelLoss
from coati_ext.models.loss import num_supervised_tokens
from coati_ext.models.policy_loss import PolicyLoss
from coati_ext.trainer.base import Batch, StepResult, StepTrainer
from coati_ext.utils.metric_sums import Mean, MetricSums, Sum


class PolicyStepTrainer(StepTrainer):
    """Takes optimizer steps on completions and, mixed in, on conversations.

    Args:
        log_probs: of the policy that is trained.
        ptx_coef: loss = (1 - ptx_coef) * policy loss + ptx_coef * language-model loss.
        kwargs: as in `StepTrainer`.

    Attributes:
        sums: metrics of the steps so far.
        num_updates: optimizer steps, skipped ones included; `num_idle` of them had nothing to learn from.
        has_learnt: whether rewards have ever differed within a group.
    """

    COUNTED = (*StepTrainer.COUNTED, "num_updates", "num_idle", "has_learnt")

    def __init__(self, *, policy_loss: PolicyLoss, log_probs: CompletionLogProbs, ptx_coef: float, **kwargs: Any):
        super().__init__(**kwargs)
        self.policy_loss, self.log_probs = policy_loss, log_probs
        self.ptx_coef, self.ptx_loss = ptx_coef, LanguageModelLoss(log_probs.head)
        self.num_updates = 0
        self.num_idle = 0
        self.has_learnt = False
        self.sums = MetricSums()

    @property
    @abstractmethod
    def temperature(self) -> float:
        """That the completions were drawn at."""

    @property
    @abstractmethod
    def is_on_policy(self) -> bool:
        """Whether the policy is the one that drew the completions: the ratio is then 1, to the last bit."""

    @property
    def next_update(self) -> int:
        return self.num_updates + 1

    @property
    def num_taken(self) -> int:
        """Optimizer steps that updated the weights."""
        return self.num_updates - self.num_idle - self.num_skipped - self.num_overflowed

    def train_step(
        self,
        micro_batches: list[Experience],
        language_model_batches: list[Batch],
        denominators: Denominators | None = None,
    ) -> StepResult:
        """One optimizer step over the micro-batches of this rank, or none where no rank has anything to learn from.

        Args:
            micro_batches: at least one, and as many on every rank that shares experts.
            denominators: this rank's own, if completions without a gradient were left out of the micro-batches.

        Raises:
            ValueError: the loss or the gradient norm is not finite (on every rank alike), with where it began.
        """
        if denominators is None:
            denominators = Denominators.of(batch.action_mask for batch in micro_batches)
        denominators, num_signals, num_supervised = self._counts(micro_batches, language_model_batches, denominators)
        self.has_learnt = self.has_learnt or num_signals > 0
        self.sums.add({"signals": self._once(num_signals)})
        has_policy_loss = int(denominators.counts[0]) > 0 and (num_signals > 0 or self.policy_loss.kl_coef > 0)
        if not has_policy_loss and num_supervised == 0:
            result = self._idle()
        else:
            result = self._train(micro_batches, denominators, language_model_batches, num_supervised)
        self._count(result)
        self.num_updates += 1
        self._stop_if_lost(result)
        return result

    def _counts(
        self, micro_batches: list[Experience], language_model_batches: list[Batch], own: Denominators
    ) -> tuple[Denominators, int, int]:
        """Of all ranks: denominators, completions with an advantage, supervised tokens of conversations."""
        signals = torch.stack([((b.advantages != 0) & b.action_mask.any(-1)).sum() for b in micro_batches]).sum()
        supervised = [num_supervised_tokens(batch["labels"]) for batch in language_model_batches]
        supervised = torch.stack(supervised).sum() if supervised else torch.zeros_like(signals)
        counts = torch.cat([own.counts, torch.stack([signals, supervised])])
        dist.all_reduce(counts, group=self.dp_group)
        return Denominators(counts[:2]), int(counts[2]), int(counts[3])

    def _train(
        self,
        micro_batches: list[Experience],
        denominators: Denominators,
        language_model_batches: list[Batch],
        num_supervised: int,
    ) -> StepResult:
        def forward_backward() -> torch.Tensor:
            return self._forward_backward(micro_batches, denominators, language_model_batches, num_supervised)

        def forward() -> None:
            for batch in micro_batches:
                self._policy_loss(batch, denominators)
            for batch in language_model_batches:
                self._language_model_loss(batch, num_supervised)

        def repeat() -> None:
            kept, self.sums = self.sums, MetricSums()  # a step done again is not counted twice
            self._repeat(forward_backward, forward)
            self.sums = kept

        loss = forward_backward()
        dist.all_reduce(loss, group=self.dp_group)
        loss = loss.item() / dist.get_world_size(self.dp_group)
        result = self._apply_gradients(loss, [batch.tensors() for batch in micro_batches], repeat)
        if result.grad_norm is not None:
            self.sums.add({"grad_norm": mean_of(result.grad_norm), "loss": mean_of(loss)})
        self.sums.add({"skipped": self._once(result.skip_reason is not None)})
        return result

    def _idle(self) -> StepResult:
        """No advantage anywhere: the gradient is zero, and no step of an optimizer's momentum is taken for it."""
        self.num_idle += 1
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # before any optimizer step
            self.lr_scheduler.step()
        self.sums.add({"idle": self._once(1.0)})
        return StepResult(loss=0.0, grad_norm=0.0)

    def _forward_backward(
        self,
        micro_batches: list[Experience],
        denominators: Denominators,
        language_model_batches: list[Batch],
        num_supervised: int,
    ) -> torch.Tensor:
        """Gradients of this rank's share times the number of ranks, over which the plugin averages; that loss."""
        dp_size = dist.get_world_size(self.dp_group)

        def policy(batch: Experience) -> torch.Tensor:
            return (1 - self.ptx_coef) * self._policy_loss(batch, denominators)

        def language_model(batch: Batch) -> torch.Tensor:
            return self.ptx_coef * self._language_model_loss(batch, num_supervised)

        parts: list[tuple[Callable, Any]] = [(policy, batch) for batch in micro_batches]
        parts += [(language_model, batch) for batch in language_model_batches]
        total = torch.zeros((), device=self.device)
        for index, (loss_of, batch) in enumerate(parts):
            with self._no_sync(is_last=index == len(parts) - 1):
                loss = loss_of(batch) * dp_size
                self.booster.backward(loss, self.optimizer)
            total += loss.detach()
        return total

    def _policy_loss(self, batch: Experience, denominators: Denominators) -> torch.Tensor:
        log_probs_BA, entropy_BA = self.log_probs(batch.sequences, batch.action_mask, self.temperature)
        loss, metrics = self.policy_loss(
            log_probs_BA,
            None if self.is_on_policy else batch.action_log_probs,
            batch.advantages,
            batch.action_mask,
            denominators=denominators,
            ref_log_probs_BA=batch.reference_log_probs,
            sampler_log_probs_BA=batch.sampler_log_probs,
        )
        self.sums.add({**metrics, "entropy": masked_mean(entropy_BA, batch.action_mask)})
        return loss

    def _language_model_loss(self, batch: Batch, num_supervised: int) -> torch.Tensor:
        loss = self.ptx_loss(model_inputs(batch), batch["labels"], max(1, num_supervised))
        self.sums.add({"ptx_loss": Sum(loss.detach())})
        return loss

    def _once(self, value: float) -> Sum:
        """What all data-parallel ranks know alike, reported by one of them."""
        return sum_of(value if dist.get_rank(self.dp_group) == 0 else 0.0)


def sum_of(value: float) -> Sum:
    return Sum(torch.tensor(float(value), dtype=torch.float64))


def mean_of(value: float) -> Mean:
    return Mean(torch.tensor(float(value), dtype=torch.float64), torch.tensor(1))
