"""Bring each token to the rank that holds its expert, and back.

Legend: T tokens of this rank, K top-k, N = T*K routed rows, E experts of the model, L = E / ep_size experts of a rank,
S source rows (without expert parallelism the tokens, with it the rows that this rank received), R rows of this rank's
experts, sorted by expert, H hidden.

Every rank takes part in every all-to-all, with zero rows if need be, forward and backward: a rank whose experts get no
token neither hangs nor leaves the graph.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from coati_ext.kernel.moe_rows import gather_rows, sum_rows
from coati_ext.kernel.row_groups import RowGroups
from coati_ext.kernel.sort_rows import SortedRows, inverse, sort_rows


@dataclass(frozen=True, kw_only=True)
class DispatchPlan:
    """Where the routed rows of one forward go.

    rows: by expert.
    exchange: with the EP group; None without one.
    """

    rows: SortedRows
    exchange: "Exchange | None"

    @cached_property
    def own(self) -> "OwnRows":
        """Rows of this rank's experts. At its first use under expert parallelism the host waits for the counts."""
        if self.exchange is not None:
            return self.exchange.wait()
        rows = self.rows
        groups = RowGroups(rows.ends_E, len(rows.order_N))
        return OwnRows(index_R=rows.token_N, order_R=rows.order_N, position_SK=rows.position_TK, groups=groups)


@dataclass(frozen=True, kw_only=True)
class OwnRows:
    """Rows of this rank's experts, sorted by expert.

    index_R: the source row of each.
    order_R: its place among the routing weights.
    position_SK: the rows that are made of each source row.
    groups: which expert they belong to.
    """

    index_R: torch.Tensor
    order_R: torch.Tensor
    position_SK: torch.Tensor
    groups: RowGroups


class Exchange:
    """How many rows go from rank to rank: asked for at once, waited for when it must be known.

    Attributes, once waited for:
        send_splits, recv_splits: rows sent to and received from each rank of the EP group.
    """

    def __init__(self, counts_E: torch.Tensor, ep_group: dist.ProcessGroup) -> None:
        self.group = ep_group
        received_E = torch.empty_like(counts_E)
        dist.all_to_all_single(received_E, counts_E, group=ep_group)
        self._received_PL = received_E.view(dist.get_world_size(ep_group), -1)
        splits = torch.stack([counts_E.view_as(self._received_PL).sum(1), self._received_PL.sum(1)])
        self._splits = splits.to("cpu", non_blocking=True)
        self._copied = None
        if splits.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> OwnRows:
        if self._copied is not None:
            self._copied.synchronize()
        self.send_splits, self.recv_splits = self._splits.tolist()
        num_rows = sum(self.recv_splits)
        index_R, offs_L = sort_received(self._received_PL, num_rows)
        position_SK = inverse(index_R).unsqueeze(1)
        groups = RowGroups(offs_L, num_rows)
        return OwnRows(index_R=index_R, order_R=index_R, position_SK=position_SK, groups=groups)

    def there(self, rows: torch.Tensor) -> torch.Tensor:
        """To the ranks of the experts, differentiable."""
        return _AllToAll.apply(rows, self.send_splits, self.recv_splits, self.group)

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        return _AllToAll.apply(rows, self.recv_splits, self.send_splits, self.group)


@torch.no_grad()
def plan_dispatch(
    top_k_index_TK: torch.Tensor, num_experts: int, ep_group: dist.ProcessGroup | None = None
) -> DispatchPlan:
    """Sort the routed rows by expert, and tell the EP group who gets how many; the host waits for nothing."""
    rows = sort_rows(top_k_index_TK, num_experts)
    shared = ep_group is not None and dist.get_world_size(ep_group) > 1
    return DispatchPlan(rows=rows, exchange=Exchange(rows.counts_E, ep_group) if shared else None)


def sort_received(counts_PL: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Order that turns rows lying (source rank, local expert) into (local expert, source rank), and the experts' ends.

    Args:
        counts_PL: rows received from each rank P for each local expert L.
        num_rows: all of them, so that the host need not wait for the device.

    Example:
        >>> order, offs = sort_received(torch.tensor([[1, 2], [1, 0]]), 4)
        >>> order.tolist(), offs.tolist()
        ([0, 3, 1, 2], [2, 4])
    """
    num_ranks, num_local = counts_PL.shape
    expert_of_segment = torch.arange(num_local, device=counts_PL.device).repeat(num_ranks)
    expert_R = torch.repeat_interleave(expert_of_segment, counts_PL.reshape(-1), output_size=num_rows)
    return torch.argsort(expert_R, stable=True), counts_PL.sum(0).cumsum(0, dtype=torch.int32)


def dispatch(
    hidden_TH: torch.Tensor, top_k_weights_TK: torch.Tensor, plan: DispatchPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """The source rows (S, H), and the routing weights (R,) of the rows that will be made of them, in `order_R`."""
    weights = top_k_weights_TK.reshape(-1)
    if plan.exchange is None:
        return hidden_TH, weights
    weights = Permute.apply(weights.unsqueeze(1), plan.rows.order_N, plan.rows.position_TK.view(-1))
    # What the device does while the host waits.
    rows = GatherRows.apply(hidden_TH, plan.rows.token_N, plan.rows.position_TK)
    plan.own  # noqa: B018 - the host waits here
    return plan.exchange.there(rows), plan.exchange.there(weights).squeeze(1)


def combine(out_SH: torch.Tensor, plan: DispatchPlan) -> torch.Tensor:
    """Bring the experts' weighted outputs, one for each source row, home: (T, H)."""
    if plan.exchange is None:
        return out_SH
    return SumRows.apply(plan.exchange.back(out_SH), plan.rows.token_N, plan.rows.position_TK)


class GatherRows(torch.autograd.Function):
    """`rows[n] = source[index[n]]`; its backward is `SumRows`.

    Args of `apply`: source rows; index, int64; positions, where the rows of each source row are, as many for all.
    """

    @staticmethod
    def forward(ctx, source, index, positions):
        ctx.save_for_backward(index, positions)
        return gather_rows(source, index)[0]

    @staticmethod
    def backward(ctx, grad):
        return SumRows.apply(grad, *ctx.saved_tensors), None, None


class SumRows(torch.autograd.Function):
    """`out[s] = sum over k of rows[positions[s, k]]`; its backward is `GatherRows`. Arguments as there."""

    @staticmethod
    def forward(ctx, rows, index, positions):
        ctx.save_for_backward(index, positions)
        return sum_rows(rows.contiguous(), positions)

    @staticmethod
    def backward(ctx, grad):
        return GatherRows.apply(grad, *ctx.saved_tensors), None, None


class Permute(torch.autograd.Function):
    """Rows in another order; backward is the inverse order, not an accumulation."""

    @staticmethod
    def forward(ctx, rows, order, inverse):
        ctx.save_for_backward(order, inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx, grad):
        order, inverse = ctx.saved_tensors
        return Permute.apply(grad, inverse, order), None, None


class _AllToAll(torch.autograd.Function):
    """Uneven all-to-all of rows; its backward is the same exchange the other way round."""

    @staticmethod
    def forward(ctx, rows, send_splits, recv_splits, group):
        ctx.reverse = (recv_splits, send_splits, group)
        received = rows.new_empty(sum(recv_splits), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), recv_splits, send_splits, group=group)
        return received

    @staticmethod
    def backward(ctx, grad):
        return _AllToAll.apply(grad, *ctx.reverse), None, None, None
