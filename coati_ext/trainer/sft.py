"""Supervised fine-tuning: one loop around one `train_step`, with or without a pipeline.

The loss of a step is the mean over all supervised tokens of the step, whatever ranks and micro-steps they lie on: the
token count is summed over all of them before the first forward. What is shown is that mean, in fp32.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from tqdm import tqdm

from coati_ext.dataset.collator import IGNORE_INDEX, split_rows
from coati_ext.dataset.packing import model_inputs, num_real_tokens
from coati_ext.models.lm_head import LanguageModelHead, LanguageModelLoss
from coati_ext.models.loss import GPTLMLoss, num_supervised_tokens
from coati_ext.models.sequence_parallel import sequence_chunk
from coati_ext.moe.load import reset_expert_load
from coati_ext.trainer.base import Batch, StepResult, StepTrainer, holds_state
from coati_ext.utils.device import peak_memory_gb
from coati_ext.utils.metrics import MetricsLogger

if TYPE_CHECKING:
    from colossalai.booster import Booster


class SFTTrainer(StepTrainer):
    """Runs optimizer steps over the batches of a data loader.

    Args:
        booster, model, optimizer, lr_scheduler, dp_group, skip_nonfinite, max_skipped, save_dir: as in `StepTrainer`.
        dataloader: micro-batches of input_ids, labels and attention_mask or position_ids; the same number on every
            rank. If its batch sampler has `set_epoch`, it is called before each epoch.
        sp_group: the ranks that share each row (sequence parallelism); None without.
        pp_group: the stages of this rank's pipeline; None without one.
        microbatch_size: rows that go through the pipeline at a time.
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
        pp_group: dist.ProcessGroup | None = None,
        sp_group: dist.ProcessGroup | None = None,
        microbatch_size: int = 1,
        num_epochs: int = 1,
        accumulation_steps: int = 1,
        max_steps: int | None = None,
        skip_nonfinite: bool = False,
        max_skipped: int = 10,
        save_dir: str | None = None,
    ):
        super().__init__(
            booster=booster,
            model=model,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dp_group=dp_group,
            skip_nonfinite=skip_nonfinite,
            max_skipped=max_skipped,
            save_dir=save_dir,
        )
        self.dataloader = dataloader
        self.pp_group, self.sp_group = pp_group, sp_group
        self.microbatch_size = microbatch_size
        self.num_epochs, self.accumulation_steps = num_epochs, accumulation_steps
        self.num_steps = num_optimizer_steps(len(dataloader), num_epochs, accumulation_steps, max_steps)
        self.criterion = GPTLMLoss()
        has_head = pp_group is None or dist.get_rank(pp_group) == dist.get_world_size(pp_group) - 1
        head = LanguageModelHead(model, sp_group) if has_head and holds_state(optimizer) else None
        self._loss = None if head is None else LanguageModelLoss(head)
        self._without_logits = head is not None and head.is_plain
        self.loss_first: float | None = None  # of steps that were taken
        self.loss_last: float | None = None

    @property
    def num_taken(self) -> int:
        """Steps that updated the weights."""
        return self.step - self.num_skipped - self.num_overflowed

    @property
    def resumes_with(self) -> dict[str, tuple[Any, str]]:
        """What a continuation must have as well: its value, and the flags that it comes from."""
        sampler = self.dataloader.batch_sampler
        rows = sampler.batch_size * sampler.dp_size * self.accumulation_steps
        return {"global batch": (rows, "--batch_size x data-parallel ranks x --accumulation_steps")}

    COUNTED = (*StepTrainer.COUNTED, "loss_first", "loss_last")
    LENGTH_FLAGS = "--num_epochs or --max_steps"

    def train_step(self, micro_batches: list[Batch]) -> StepResult:
        """One optimizer step over the micro-batches of this rank.

        Raises:
            ValueError: the loss or the gradient norm is not finite (on every rank alike), with where it began.
        """
        micro_batches = [self._mine(batch) for batch in micro_batches]
        counts = torch.stack(
            [
                sum(_num_supervised(batch) for batch in micro_batches),
                sum(num_real_tokens(batch) for batch in micro_batches),
            ]
        )
        dist.all_reduce(counts, group=self.dp_group)
        num_supervised, num_tokens = counts.tolist()
        counts = {"num_supervised_tokens": num_supervised, "num_tokens": num_tokens}
        dp_size = dist.get_world_size(self.dp_group)

        # The plugin averages gradients over dp; their sum is wanted, over one denominator.
        loss = self._forward_backward(micro_batches, max(num_supervised, 1) / dp_size)
        dist.all_reduce(loss, group=self.dp_group)
        loss = loss.item() / dp_size
        result = self._apply_gradients(loss, micro_batches, partial(self._do_again, micro_batches))
        return replace(result, **counts)

    def _forward_backward(self, micro_batches: list[Batch], num_tokens: float) -> torch.Tensor:
        """Gradients of sum(token losses) / num_tokens; returns that loss, on every stage of a pipeline."""

        def criterion(output: Any, batch: Batch) -> torch.Tensor:
            labels, shifted = _supervision(batch)
            if self._without_logits:  # of a pipeline's last stage
                return self._loss.of_hidden(output["hidden_states"], labels, num_tokens, shifted=shifted)
            return self.criterion(output.logits, labels, num_tokens=num_tokens, shifted=shifted)

        loss = torch.zeros((), device=self.device)
        if self.pp_group is not None:
            rows = self._rows(micro_batches)
            result = self.booster.execute_pipeline(
                iter([rows]), self.model, criterion, self.optimizer, return_loss=True
            )
            if result["loss"] is not None:
                loss += result["loss"]
            dist.all_reduce(loss, group=self.pp_group)
            return loss
        for index, batch in enumerate(micro_batches):
            with self._no_sync(is_last=index == len(micro_batches) - 1):
                part = self._loss_of(batch, num_tokens)
                self.booster.backward(part, self.optimizer)
            loss += part.detach()
        return loss

    def _loss_of(self, batch: Batch, num_tokens: float) -> torch.Tensor:
        """Without a pipeline."""
        labels, shifted = _supervision(batch)
        if self._loss is not None:
            return self._loss(model_inputs(batch), labels, num_tokens, shifted=shifted)
        return self.criterion(self.model(**model_inputs(batch)).logits, labels, num_tokens, shifted=shifted)

    def _mine(self, batch: Batch) -> Batch:
        """On the device; under sequence parallelism this rank's part of each row."""
        batch = {name: value.to(self.device) for name, value in batch.items()}
        if self.sp_group is None:
            return batch
        return sequence_chunk(batch, dist.get_rank(self.sp_group), dist.get_world_size(self.sp_group))

    def _rows(self, micro_batches: list[Batch]) -> list[Batch]:
        """What goes through the pipeline, labels included, a few rows at a time."""
        parts = [part for batch in micro_batches for part in split_rows(batch, self.microbatch_size)]
        keep = ("labels", "targets")
        rows = [{**model_inputs(part), **{k: part[k] for k in keep if k in part}} for part in parts]
        # Ranks that share experts must call them equally often: some have fewer rows, or packed them better.
        count = torch.tensor(len(rows), device=self.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=self.dp_group)
        rows += [_without_supervision(rows[0])] * (int(count) - len(rows))
        return [{**row, "with_head": False} for row in rows] if self._without_logits else rows

    def _do_again(self, micro_batches: list[Batch]) -> None:
        def forward() -> None:
            for batch in micro_batches:  # there is no pipeline then
                self._loss_of(batch, 1.0)

        self._repeat(lambda: self._forward_backward(micro_batches, 1.0), forward)

    def fit(
        self,
        logger: MetricsLogger,
        *,
        show_progress: bool = True,
        after_step: Callable[["SFTTrainer"], bool] = lambda trainer: False,
    ) -> list[float]:
        """The steps that are left (all, unless `self.step` was set by a resume); returns their losses.

        Args:
            after_step: called after each step; training ends early where it returns true (on every rank alike).

        Raises:
            ValueError: see `train_step`; `max_skipped` steps were not finite without one that was taken.
        """
        self.model.train()
        reset_expert_load(self.model)
        losses = []
        bar = tqdm(
            total=self.num_steps,
            initial=self.step,
            desc="fine-tuning",
            unit="step",
            disable=not show_progress,
            dynamic_ncols=True,
        )
        with bar:
            for micro_batches in islice(self._steps(), max(0, self.num_steps - self.step)):
                start = time.perf_counter()
                lr = self.lr_scheduler.get_last_lr()[0]
                result = self.train_step(micro_batches)
                self._count(result)
                tokens_per_s = result.num_tokens / (time.perf_counter() - start)
                losses.append(result.loss)
                bar.set_postfix_str(_postfix(result, tokens_per_s), refresh=False)
                bar.update()
                extra = {"skipped": result.skip_reason} if result.skip_reason else {}
                logger.log(self.step, {**_scalars(result, lr, tokens_per_s), **self._expert_load()}, **extra)
                self._stop_if_lost(result)
                if after_step(self):
                    break
        return losses

    def _count(self, result: StepResult) -> None:
        super()._count(result)
        self.step += 1
        if result.skip_reason is None:
            self.loss_first = result.loss if self.loss_first is None else self.loss_first
            self.loss_last = result.loss

    def _steps(self) -> Iterator[list[Batch]]:
        """From `self.step` on; an epoch's last step may have fewer micro-batches."""
        steps_per_epoch = math.ceil(len(self.dataloader) / self.accumulation_steps)
        for epoch in range(self.step // steps_per_epoch, self.num_epochs):
            first = (self.step % steps_per_epoch) * self.accumulation_steps
            set_epoch = getattr(getattr(self.dataloader, "batch_sampler", None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch, first)
                batches = iter(self.dataloader)
            else:
                batches = islice(iter(self.dataloader), first, None)
            while micro_batches := list(islice(batches, self.accumulation_steps)):
                yield micro_batches


def _supervision(batch: Batch) -> tuple[torch.Tensor, bool]:
    """(Labels, whether position t already has the label of token t + 1)."""
    return (batch["targets"], True) if "targets" in batch else (batch["labels"], False)


def _without_supervision(rows: Batch) -> Batch:
    """One token that adds nothing to the loss, with the tensors of `rows`."""
    one = {name: value[:1, :1].clone() for name, value in rows.items()}
    return {name: value.fill_(IGNORE_INDEX) if name in ("labels", "targets") else value for name, value in one.items()}


def _num_supervised(batch: Batch) -> torch.Tensor:
    labels, shifted = _supervision(batch)
    return num_supervised_tokens(labels, shifted=shifted)


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
    skipped = "fp16 overflow, skipped" if result.overflowed else "not finite, skipped"
    norm = skipped if result.grad_norm is None else f"{result.grad_norm:.3f}"
    return f"loss {result.loss:.4f}, grad norm {norm}, {tokens_per_s:,.0f} tok/s"
