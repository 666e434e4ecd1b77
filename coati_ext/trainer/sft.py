"""Supervised fine-tuning: one loop around one `train_step`.

The loss of a step is the mean over all supervised tokens of the step, whatever ranks and micro-steps they lie on: the
token count is summed over all of them before the first forward. What is shown is that mean, in fp32.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from tqdm import tqdm

from coati_ext.models.loss import GPTLMLoss, num_supervised_tokens
from coati_ext.moe.load import expert_load, reset_expert_load
from coati_ext.utils.device import current_device, peak_memory_gb
from coati_ext.utils.metrics import MetricsLogger

if TYPE_CHECKING:
    from colossalai.booster import Booster

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Of one optimizer step, over all ranks. `grad_norm` is before clipping; None if fp16 overflowed (step skipped)."""

    loss: float
    grad_norm: float | None
    num_supervised_tokens: int
    num_tokens: int


class SFTTrainer:
    """Runs optimizer steps over boosted objects.

    Args:
        booster, model, optimizer: after `booster.boost`; the optimizer's `get_grad_norm` gives the global norm.
        dataloader: micro-batches of input_ids, attention_mask, labels; the same number on every rank. If its batch
            sampler has `set_epoch`, it is called before each epoch.
        dp_group: the ranks that see different data.
        max_steps: end after this many optimizer steps.
    """

    def __init__(
        self,
        *,
        booster: "Booster",
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: LRScheduler,
        dataloader: Iterable[Batch],
        dp_group: dist.ProcessGroup,
        num_epochs: int = 1,
        accumulation_steps: int = 1,
        max_steps: int | None = None,
    ):
        self.booster, self.model, self.optimizer, self.lr_scheduler = booster, model, optimizer, lr_scheduler
        self.dataloader, self.dp_group = dataloader, dp_group
        self.num_epochs, self.accumulation_steps = num_epochs, accumulation_steps
        self.num_steps = num_optimizer_steps(len(dataloader), num_epochs, accumulation_steps, max_steps)
        self.criterion = GPTLMLoss()
        self.device = current_device()

    def train_step(self, micro_batches: list[Batch]) -> StepResult:
        """One optimizer step over the micro-batches of this rank.

        Raises:
            ValueError: the loss or the gradient norm is not finite (on every rank alike).
        """
        micro_batches = [{k: v.to(self.device) for k, v in batch.items()} for batch in micro_batches]
        counts = torch.stack(
            [
                sum(num_supervised_tokens(batch["labels"]) for batch in micro_batches),
                sum(batch["attention_mask"].sum() for batch in micro_batches),
            ]
        )
        dist.all_reduce(counts, group=self.dp_group)
        num_supervised, num_tokens = counts.tolist()
        dp_size = dist.get_world_size(self.dp_group)

        loss = torch.zeros((), device=self.device)
        for index, batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            with nullcontext() if last else self.booster.no_sync(self.model, self.optimizer):
                logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
                # The plugin averages gradients over dp; their sum is wanted, over one denominator.
                part = self.criterion(logits, batch["labels"], num_tokens=num_supervised / dp_size)
                self.booster.backward(part, self.optimizer)
            loss += part.detach()
        dist.all_reduce(loss, group=self.dp_group)
        loss = loss.item() / dp_size
        if not math.isfinite(loss):
            raise ValueError(f"the loss is {loss}; the weights were not updated. {_finite_hint(self.model)}")
        self.optimizer.step()
        grad_norm = self.optimizer.get_grad_norm()
        if grad_norm is not None and not math.isfinite(grad_norm):
            raise ValueError(f"the loss is {loss:.4f} but the gradient norm is {grad_norm}. {_finite_hint(self.model)}")
        if grad_norm is not None:
            self.lr_scheduler.step()
        self.optimizer.zero_grad()
        return StepResult(loss=loss, grad_norm=grad_norm, num_supervised_tokens=num_supervised, num_tokens=num_tokens)

    def fit(self, logger: MetricsLogger, *, show_progress: bool = True) -> list[float]:
        """All steps; returns their losses."""
        self.model.train()
        reset_expert_load(self.model)
        losses = []
        bar = tqdm(total=self.num_steps, desc="fine-tuning", unit="step", disable=not show_progress, dynamic_ncols=True)
        with bar:
            for step, micro_batches in enumerate(islice(self._steps(), self.num_steps), start=1):
                start = time.perf_counter()
                lr = self.lr_scheduler.get_last_lr()[0]
                result = self.train_step(micro_batches)
                tokens_per_s = result.num_tokens / (time.perf_counter() - start)
                losses.append(result.loss)
                bar.set_postfix_str(_postfix(result, tokens_per_s), refresh=False)
                bar.update()
                logger.log(step, {**_scalars(result, lr, tokens_per_s), **self._expert_load()})
        return losses

    def _steps(self) -> Iterator[list[Batch]]:
        for epoch in range(self.num_epochs):
            set_epoch = getattr(getattr(self.dataloader, "batch_sampler", None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
            batches = iter(self.dataloader)
            while micro_batches := list(islice(batches, self.accumulation_steps)):
                yield micro_batches

    def _expert_load(self) -> dict[str, float]:
        """max/mean routed rows per expert, per MoE layer, since the last step: 1 is perfectly even."""
        loads = expert_load(self.model, self.dp_group)
        reset_expert_load(self.model)
        return {f"expert_load/{name}": (load.max() / load.double().mean()).item() for name, load in loads.items()}


def num_optimizer_steps(num_batches: int, num_epochs: int, accumulation_steps: int, max_steps: int | None) -> int:
    """Steps of a run; an epoch's last step may have fewer micro-batches.

    Example:
        >>> num_optimizer_steps(5, 2, 2, None)
        6
    """
    steps = num_epochs * math.ceil(num_batches / accumulation_steps)
    return steps if max_steps is None else min(steps, max_steps)


def cosine_with_warmup(num_steps: int, warmup_steps: int, floor: float = 0.1) -> Callable[[int], float]:
    """Factor of the learning rate at step 0, 1, …: linear up to 1 over the warm-up, cosine down to `floor`.

    The first step is at 1/(warmup + 1), not 0: no step is wasted. ColossalAI's CosineAnnealingWarmupLR has the same
    floor.

    Example:
        >>> [round(cosine_with_warmup(5, 1)(step), 3) for step in range(5)]
        [0.5, 1.0, 0.775, 0.325, 0.1]
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        progress = min(1.0, (step - warmup_steps) / max(1, num_steps - 1 - warmup_steps))
        return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2

    return factor


def _scalars(result: StepResult, lr: float, tokens_per_s: float) -> dict[str, float]:
    scalars = {"loss": result.loss, "learning_rate": lr, "tokens_per_s": tokens_per_s, "memory_gb": peak_memory_gb()}
    return scalars if result.grad_norm is None else {**scalars, "grad_norm": result.grad_norm}


def _postfix(result: StepResult, tokens_per_s: float) -> str:
    norm = "overflow, skipped" if result.grad_norm is None else f"{result.grad_norm:.3f}"
    return f"loss {result.loss:.4f}, grad norm {norm}, {tokens_per_s:,.0f} tok/s"


def _finite_hint(model: nn.Module) -> str:
    bad = [name for name, p in model.named_parameters() if p.requires_grad and not p.isfinite().all()]
    if bad:
        return f"Adapter tensors that are not finite: {bad[:3]}{'…' if len(bad) > 3 else ''}; lower --lr."
    return "The adapter is finite: look for a broken base weight or overflowing activations (try bf16 or fp32)."
