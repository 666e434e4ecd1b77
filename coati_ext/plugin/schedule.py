"""The 1F1B pipeline schedule over a list of micro-batches of any number and shape.

colossalai's `OneForwardOneBackwardSchedule` gives the order; its own batches must all have one size, at least as many
micro-batches as stages, and messages whose shapes are pickled along or cached from the first. Here every stage has the
micro-batches themselves, so it knows the shape of what it will receive: only the tensors travel.

Legend: B batch, S sequence, H hidden.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from colossalai.accelerator import get_accelerator
from colossalai.interface import OptimizerWrapper
from colossalai.pipeline.schedule import OneForwardOneBackwardSchedule
from colossalai.pipeline.stage_manager import PipelineStageManager
from torch import nn

Batch = dict[str, torch.Tensor]
Message = dict[str, torch.Tensor]
KEY = "hidden_states"


class MicroBatchSchedule(OneForwardOneBackwardSchedule):
    """`data_iter` yields one item: the list of micro-batches of the step. The loss is their sum, not their mean."""

    def __init__(self, stage_manager: PipelineStageManager, *, hidden_size: int, dtype: torch.dtype):
        super().__init__(stage_manager, microbatch_size=1, enable_metadata_cache=False)
        self.comm = _HiddenStatesComm(stage_manager, hidden_size, dtype)

    def load_batch(self, data_iter: Iterator[list[Batch]], device: torch.device | None = None) -> None:
        micro_batches = next(data_iter)
        self.num_microbatches = len(micro_batches)
        self._waiting = deque(micro_batches)
        self.comm.expect([tuple(batch["input_ids"].shape) for batch in micro_batches])

    def load_micro_batch(self) -> Batch:
        return self._waiting.popleft()

    def forward_step(
        self,
        model: nn.Module,
        input_obj: Message | None,
        criterion: Callable[[Any, Batch], torch.Tensor],
        accum_loss: torch.Tensor | None = None,
        outputs: list | None = None,
    ) -> torch.Tensor | Message:
        batch = self.load_micro_batch()
        output = model(**batch, **(input_obj or {}))
        if not self.stage_manager.is_last_stage():
            return output
        loss = criterion(output, batch)
        if accum_loss is not None:
            accum_loss.add_(loss.detach())
        if outputs is not None:
            outputs.append(output)
        return loss

    def backward_step(
        self,
        optimizer: OptimizerWrapper,
        input_obj: Message | None,
        output_obj: torch.Tensor | Message,
        output_obj_grad: Message | None,
    ) -> Message | None:
        if output_obj_grad is None:
            optimizer.backward(output_obj)
        elif output_obj[KEY].requires_grad:  # not on a first stage without an adapter
            optimizer.backward_by_grad(output_obj[KEY], output_obj_grad[KEY])
        return None if input_obj is None else {KEY: input_obj[KEY].grad}


class _HiddenStatesComm:
    """The messages between neighbouring stages; the methods are those of colossalai's `PipelineP2PCommunication`.

    Forward and backward messages both come in the order of the micro-batches, so their shapes are two queues.
    """

    def __init__(self, stage_manager: PipelineStageManager, hidden_size: int, dtype: torch.dtype):
        self._stages, self._hidden_size, self._dtype = stage_manager, hidden_size, dtype
        self._forward: deque[tuple[int, ...]] = deque()
        self._backward: deque[tuple[int, ...]] = deque()

    def expect(self, shapes_BS: list[tuple[int, ...]]) -> None:
        self._forward, self._backward = deque(shapes_BS), deque(shapes_BS)

    def recv_forward(self, *_: Any, **__: Any) -> tuple[Message, list]:
        return self._exchange(None, None, self._stages.get_prev_rank(), self._forward)

    def recv_backward(self, *_: Any, **__: Any) -> tuple[Message, list]:
        return self._exchange(None, None, self._stages.get_next_rank(), self._backward)

    def send_forward(self, message: Message, *_: Any, **__: Any) -> list:
        return self._exchange(message, self._stages.get_next_rank(), None, None)[1]

    def send_backward(self, message: Message, *_: Any, **__: Any) -> list:
        return self._exchange(message, self._stages.get_prev_rank(), None, None)[1]

    def send_forward_recv_backward(self, message: Message, *_: Any, **__: Any) -> tuple[Message, list]:
        peer = self._stages.get_next_rank()
        return self._exchange(message, peer, peer, self._backward)

    def send_backward_recv_forward(self, message: Message, *_: Any, **__: Any) -> tuple[Message, list]:
        peer = self._stages.get_prev_rank()
        return self._exchange(message, peer, peer, self._forward)

    def _exchange(
        self, message: Message | None, to: int | None, source: int | None, shapes: deque | None
    ) -> tuple[Message | None, list]:
        group, device = self._stages.get_p2p_process_group(), get_accelerator().get_current_device()
        operations, received = [], None
        if to is not None:
            operations.append(dist.P2POp(dist.isend, message[KEY].detach().contiguous(), to, group))
        if source is not None:
            received = torch.empty(*shapes.popleft(), self._hidden_size, dtype=self._dtype, device=device)
            operations.append(dist.P2POp(dist.irecv, received, source, group))
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        if received is None:
            return None, []
        return {KEY: received.requires_grad_(torch.is_grad_enabled() and shapes is self._forward)}, []
