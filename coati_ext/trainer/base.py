"""What every trainer does with the gradients of an optimizer step: take it, or leave it out and say why."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from coati_ext.moe.load import expert_load, reset_expert_load
from coati_ext.trainer.nonfinite import report_nonfinite
from coati_ext.utils.device import current_device

if TYPE_CHECKING:
    from colossalai.booster import Booster

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Of one optimizer step, over all ranks.

    `grad_norm` is before clipping; None if the step was skipped, for `skip_reason`. `overflowed`: skipped only because
    fp16's loss scale was too high, and now is lower.
    """

    loss: float
    grad_norm: float | None
    num_supervised_tokens: int = 0
    num_tokens: int = 0
    skip_reason: str | None = None
    overflowed: bool = False


class StepTrainer:
    """Holds the boosted objects and counts the optimizer steps that were taken and left out.

    Args:
        booster, model, optimizer: after `booster.boost`; the optimizer's `get_grad_norm` gives the global norm.
        dp_group: the ranks that see different tokens, over which the plugin averages gradients.
        skip_nonfinite: leave out a step whose loss or gradient is not finite, and count it, instead of stopping.
        max_skipped: stop with an error after so many such steps without one that was taken. Steps that fp16 skips to
            lower its loss scale are counted apart and are not among them; at the lowest scale an overflow is.
        save_dir: where the batch of such a step is written.
    """

    COUNTED: tuple[str, ...] = ("num_skipped", "num_skipped_in_a_row", "num_overflowed")
    """Attributes of `shared_state`."""
    LENGTH_FLAGS = ""
    """Flags that say how long a run is."""

    def __init__(
        self,
        *,
        booster: "Booster",
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: LRScheduler,
        dp_group: dist.ProcessGroup,
        skip_nonfinite: bool,
        max_skipped: int,
        save_dir: str | None,
    ):
        self.booster, self.model, self.optimizer, self.lr_scheduler = booster, model, optimizer, lr_scheduler
        self.dp_group = dp_group
        self.skip_nonfinite, self.max_skipped, self.save_dir = skip_nonfinite, max_skipped, save_dir
        self.device = current_device()
        self.step = 0  # what a state is named by
        self.num_skipped = 0  # not finite
        self.num_skipped_in_a_row = 0
        self.num_overflowed = 0  # skipped to lower fp16's loss scale

    @property
    def next_update(self) -> int:
        """The number of the optimizer step that comes next, from 1."""
        return self.step + 1

    def amount(self, step: int) -> str:
        """What a user calls all that is done after `step`."""
        return f"{step} step{'s' * (step != 1)}"

    def shared_state(self) -> dict[str, Any]:
        """What is alike on all ranks and a continuation takes up, as JSON."""
        return {name: getattr(self, name) for name in self.COUNTED}

    def load_shared_state(self, state: dict[str, Any]) -> None:
        """Take up `shared_state`."""
        for name in self.COUNTED:
            setattr(self, name, state.get(name, getattr(self, name)))

    def rank_state(self) -> dict[str, Any]:
        """What this rank needs to go on besides weights, optimizer and random numbers: JSON and tensors."""
        return {}

    def load_rank_state(self, state: dict[str, Any] | None) -> None:
        """Take up `rank_state`; None where the ranks are now others than then."""

    def _apply_gradients(self, loss: float, batches: list[Batch], repeat: Callable[[], None]) -> StepResult:
        """Take the optimizer step, unless it is not finite.

        Args:
            loss: of the whole step, alike on all ranks.
            repeat: does forward and, if it can, backward of the step again, on all ranks together.

        Raises:
            ValueError: the loss or the gradient norm is not finite (on every rank alike), with where it began.
        """
        if not math.isfinite(loss):
            return self._not_finite(f"the loss is {loss}", loss, batches, repeat)
        try:
            self.optimizer.step()
        except FloatingPointError as error:
            return self._not_finite(f"the loss is {loss:.4f} but {error}", loss, batches, repeat)
        grad_norm = self.optimizer.get_grad_norm()
        if grad_norm is not None and not math.isfinite(grad_norm):  # of an optimizer that does not raise
            raise ValueError(f"step {self.next_update}: the gradient norm is {grad_norm}; the weights are lost")
        self.optimizer.zero_grad()
        if grad_norm is None:
            scale = getattr(self.optimizer, "loss_scale", None)
            reason = f"the fp16 gradients overflowed; the loss scale is now {scale:g}" if scale else "fp16 overflowed"
            return StepResult(loss=loss, grad_norm=None, skip_reason=reason, overflowed=True)
        self.lr_scheduler.step()
        return StepResult(loss=loss, grad_norm=grad_norm)

    def _no_sync(self, *, is_last: bool) -> Any:
        """Gradients are reduced once, with the last micro-batch, where the plugin can wait that long."""
        if is_last or not self.booster.plugin.support_no_sync():
            return nullcontext()
        return self.booster.no_sync(self.model, self.optimizer)

    def _not_finite(self, what: str, loss: float, batches: list[Batch], repeat: Callable[[], None]) -> StepResult:
        self.optimizer.zero_grad()
        cause = "Under --plugin zero2 the rank and the module would be named."
        if holds_state(self.optimizer):
            cause = report_nonfinite(self.model, repeat, batches, step=self.next_update, save_dir=self.save_dir)
        self.optimizer.zero_grad()
        if not self.skip_nonfinite:
            raise ValueError(f"step {self.next_update}: {what}; the weights were not updated. {cause}")
        return StepResult(loss=loss, grad_norm=None, skip_reason=f"{what}. {cause}")

    def _repeat(self, forward_backward: Callable[[], Any], forward: Callable[[], Any]) -> None:
        """A step again, for `report_nonfinite`: with each rank's own gradients left on the parameters, or, where the
        plugin shares these out at once, without any."""
        can_wait = self.booster.plugin.support_no_sync()
        with torch.set_grad_enabled(can_wait), self._no_sync(is_last=False):
            (forward_backward if can_wait else forward)()

    def _count(self, result: StepResult) -> None:
        if result.overflowed:
            self.num_overflowed += 1
        elif result.skip_reason is not None:
            self.num_skipped += 1
            self.num_skipped_in_a_row += 1
        else:
            self.num_skipped_in_a_row = 0

    def _stop_if_lost(self, result: StepResult) -> None:
        if self.num_skipped_in_a_row >= self.max_skipped:
            raise ValueError(
                f"step {self.next_update - 1}: {self.num_skipped_in_a_row} steps in a row were not finite and left out "
                f"(--max_skipped {self.max_skipped}); training has stopped. The last one: {result.skip_reason}"
            )

    def _expert_load(self) -> dict[str, float]:
        """max/mean routed rows per expert, per MoE layer here, since the last call: 1 is perfectly even."""
        loads = expert_load(self.model, self.dp_group)
        reset_expert_load(self.model)
        return {f"expert_load/{name}": (load.max() / load.double().mean()).item() for name, load in loads.items()}


def holds_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is this project's, whose parameters can be read at any time (Gemini's cannot)."""
    return hasattr(optimizer, "state_pieces")
