"""A decode step of fixed shapes over keys and values at fixed addresses: on a GPU a CUDA graph, replayed every turn.

A step of transformers' modules launches some 25 kernels a layer from Python, which takes longer than the kernels do as
long as the model or the batch is small. A graph launches them all at once, the draw of the next token included. It is
captured once for every shape (rows, columns) that the batch takes on; all shapes lie in the same memory. What varies
from turn to turn is read from tensors: the column that a step writes, each row's padding, place in its completion, key.

Rows beyond the batch's, and rows that have ended, step along unread. Columns not written yet, and those left of a row's
first token, are masked by a 4-D mask that transformers passes on as it is.

Left out: expert parallelism (its all-to-all has to know how many rows come), experts that are not in bf16, tensor
parallelism, windows and linear attention. `can_capture` names them. The same step runs without a graph on a CPU.

Legend: R rows of the room, S its columns, V vocabulary, G query heads that share keys.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache
from inspect import signature
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from coati_ext.models.fixed_cache import ROW_MULTIPLE, Room, fix_cache, round_up
from coati_ext.models.sampling import Sampling, draw_tokens, stop_mask
from coati_ext.models.tensor_parallel_layers import TensorParallelLinear, TensorParallelLoraLinear
from coati_ext.moe.experts import MoeExperts, is_experts_module

if TYPE_CHECKING:
    from coati_ext.models.decode_engine import RowBatch

WORTH_CAPTURING = 16  # turns; a capture takes about as long as a few turns without a graph
WORTH_SHRINKING = 64  # turns, at half the rows

_ATTENTION = "coati_decode"
_FAILED: list[torch.cuda.CUDAGraph] = []  # torch's allocator of pinned memory keeps a pointer to them


def can_capture(model: PreTrainedModel, *, group: dist.ProcessGroup | None = None) -> tuple[bool, str]:
    """Whether a decode step of this model can be a CUDA graph, and the first reason why not."""
    reason = _why_not(model, group)
    return reason is None, reason or ""


def _why_not(model: PreTrainedModel, group: dist.ProcessGroup | None) -> str | None:
    name, modules, parameters = type(model).__name__, list(model.modules()), list(model.parameters())
    if group is not None:
        return "ranks of a group call the model in step"
    if any(isinstance(module, TensorParallelLinear | TensorParallelLoraLinear) for module in modules):
        return f"{name} is under tensor parallelism"
    if any(is_experts_module(module) and not isinstance(module, MoeExperts) for module in modules):
        return f"{name} has experts modules of transformers; `shard_experts` puts ours in their place"
    for experts in (module for module in modules if isinstance(module, MoeExperts)):
        if experts.gate_up_proj.dtype != torch.bfloat16:
            return f"{name} has experts in {experts.gate_up_proj.dtype}, whose products wait for the host; use bf16"
        if experts.ep_group is not None and dist.get_world_size(experts.ep_group) > 1:
            return f"{name} is under expert parallelism"
    if any(type(parameter) not in (nn.Parameter, torch.Tensor) for parameter in parameters):
        return f"{name} has parameters that are no plain tensors: a plugin moves or gathers them"
    if torch.is_autocast_enabled("cuda"):
        return "autocast is on, which keeps copies of the weights"
    attention = model.config.get_text_config()._attn_implementation
    if attention not in ("sdpa", "eager") or not model._can_set_attn_implementation():
        return f"attn_implementation is {attention!r}; supported are 'sdpa' and 'eager' of the attention interface"
    if "position_ids" not in signature(model.forward).parameters:
        return f"{name} takes no position_ids"
    if any(rope in str(getattr(module, "rope_type", "")) for module in modules for rope in ("dynamic", "longrope")):
        return f"{name} chooses its rotary tables by the length of a batch"
    layers = DynamicCache(config=model.config).layers
    kinds = [type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer]
    if kinds:
        return f"{name} caches in a {kinds[0]}"
    if len({parameter.device for parameter in parameters}) != 1 or parameters[0].device.type != "cuda":
        return f"{name} is not on one CUDA device"
    return None


def _grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention of one token a row: heads that share keys stand in the place of columns of queries.

    With a mask, transformers' sdpa repeats keys and values in memory for every head of a group: at 512 rows and 512
    columns of SmolLM2-135M that is 6 times the bytes that have to be read.
    """
    if query.shape[2] != 1 or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    rows, heads = query.shape[:2]
    query_RHGD = query.reshape(rows, key.shape[1], heads // key.shape[1], query.shape[-1])
    out = F.scaled_dot_product_attention(query_RHGD, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(rows, 1, heads, value.shape[-1]), None


AttentionInterface.register(_ATTENTION, _grouped_attention)
AttentionMaskInterface.register(_ATTENTION, sdpa_mask)


@contextmanager
def _decode_attention(model: PreTrainedModel) -> Iterator[None]:
    base = model.config.get_text_config()._attn_implementation
    if base != "sdpa":
        yield
        return
    model.set_attn_implementation(_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(base)


@lru_cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all calls: cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)


@contextmanager
def _noted_waits() -> Iterator[list[str]]:
    """Where in the code the block waits for the device. A wait in another thread is noted too."""
    waits, mode = [], torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    waits += [f"{w.filename}:{w.lineno}" for w in caught if "called a synchronizing CUDA operation" in str(w.message)]


class StaticStep:
    """The decode step of a `RowBatch` whose cache it holds in a room; keeps a graph for every shape of the room.

    Args:
        forward: `decode_engine.forward`.
        most_rows: that a batch may have.
        required: whether to raise where a graph cannot be captured, instead of a warning and steps without.
    """

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        forward: Callable[..., tuple[torch.Tensor, Cache]],
        sampling: Sampling,
        pad_id: int,
        most_rows: int,
        device: torch.device,
        required: bool = False,
    ):
        self.model, self.forward, self.sampling, self.pad_id, self.required = model, forward, sampling, pad_id, required
        self.room = Room(device=device)
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        rows = round_up(most_rows, ROW_MULTIPLE)
        names = ("token_B", "pad_B", "start_B", "key_B")
        self._rows = {name: torch.zeros(rows, dtype=torch.long, device=device) for name in names}
        self._log_prob_R = torch.zeros(rows, device=device)
        self._cache: Cache | None = None
        self._loaded: list | None = None  # the batch's rows when they were loaded
        self._stops_V: torch.Tensor | None = None
        if device.type == "cuda":
            self._stream, self._pool = _capture_stream(device), torch.cuda.graph_pool_handle()

    def holds(self, cache: Cache) -> bool:
        return cache is self._cache

    def worth_shrinking(self, batch: "RowBatch", num_rows: int) -> bool:
        return self.room.rows_for(num_rows) < self.room.rows and batch.last - batch.width >= WORTH_SHRINKING

    def make_room(self, num_rows: int, width: int, last: int) -> None:
        """For what the batch will be: comes before its rows are chosen, or others join them."""
        if self.room.reshape(num_rows, width, last):
            self.graphs.clear()
            if self.room.device.type == "cuda":
                self._pool = torch.cuda.graph_pool_handle()  # a pool whose graphs are all gone takes no other

    def turn(self, batch: "RowBatch") -> None:
        """The next token of all rows, if any is not past its end.

        Raises:
            ValueError, RuntimeError, TypeError: the step or its capture fails; the batch is as it was, or a turn on.
        """
        if batch.width >= batch.last:
            return
        self._hold(batch)
        shape = self.room.rows, self.room.columns
        with torch.cuda.device(self.room.device) if self.room.device.type == "cuda" else nullcontext():
            if shape in self.graphs:
                self.graphs[shape].replay()
                self._advance(batch)
                return
            waits = self._step_aside()
            self._advance(batch)
            if self.room.device.type == "cuda" and batch.last - batch.width >= WORTH_CAPTURING:
                if waits:
                    raise RuntimeError(f"{waits[0]} waits for the device")
                self.graphs[shape] = self._captured()

    def _hold(self, batch: "RowBatch") -> None:
        """The batch in the room, with a free column, and its rows where the step reads them."""
        cache = batch.cache
        if not self.holds(cache) or batch.width >= self.room.columns:
            self.make_room(len(batch.rows), batch.width, batch.last)
            fix_cache(cache, self.room)
            self._cache = cache
        if self._loaded is not batch.rows:
            rows, width = len(batch.rows), batch.width
            unused = {"token_B": self.pad_id, "pad_B": width, "start_B": width, "key_B": 0}
            for name, tensor in self._rows.items():
                tensor[:rows] = getattr(batch, name)
                tensor[rows:].fill_(unused[name])
            self.room.column_1.fill_(batch.width)
            self._loaded = batch.rows

    def _advance(self, batch: "RowBatch") -> None:
        rows = len(batch.rows)
        batch.width += 1
        batch.token_B = self._rows["token_B"][:rows]
        batch.unread.append((batch.token_B.clone(), self._log_prob_R[:rows].clone()))
        for layer in batch.cache.layers:
            layer.advance()

    def _step_aside(self) -> list[str]:
        """A step without a graph, on the stream of the captures: warms up what a capture may not set up.

        Returns:
            The places in the code that waited for the device, which a capture would fail at.
        """
        if self.room.device.type != "cuda":
            self._step()
            return []
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), _noted_waits() as waits:
            self._step()
        current.wait_stream(self._stream)
        return waits

    def _captured(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # All graphs share a pool: none leaves anything there that another turn reads. Other threads (a loader, NCCL's
        # watchdog) may go on calling CUDA. The outer context: after a capture that fails, torch leaves its stream set.
        try:
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                self._step()
        except Exception:
            # torch's allocator would take the capture for underway and fail when it is next asked to free its cache.
            _FAILED.append(graph)
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self.room.device.index, self._pool)
                torch._C._cuda_releasePool(self.room.device.index, self._pool)
            raise
        return graph

    def _step(self) -> None:
        room, column_1 = self.room, self.room.column_1
        token_R, pad_R, start_R, key_R = (tensor[: room.rows] for tensor in self._rows.values())
        column_S = torch.arange(room.columns, device=room.device)
        hidden_RS = (column_S < pad_R[:, None]) | (column_S > column_1)
        dtype = room.buffers[0, "keys"].dtype
        mask_RS = torch.zeros(hidden_RS.shape, dtype=dtype, device=room.device)
        mask_RS = mask_RS.masked_fill(hidden_RS, torch.finfo(dtype).min)
        position_R = torch.minimum(start_R + self.sampling.max_new_tokens - 1, column_1) - pad_R
        with _decode_attention(self.model):
            logits_RV, _ = self.forward(
                self.model, token_R[:, None], position_R[:, None], mask_RS[:, None, None], self._cache
            )
        if self._stops_V is None:
            self._stops_V = stop_mask(self.sampling, logits_RV.shape[1], room.device)
        column_1 += 1
        token, log_prob = draw_tokens(logits_RV, self.sampling, key_R, column_1 - start_R, self._stops_V)
        token_R.copy_(token)
        self._log_prob_R[: room.rows] = log_prob
