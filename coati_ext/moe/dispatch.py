"""Bring each token to the rank that holds its expert, and back.

Legend: T tokens of this rank, K top-k, N = T*K routed rows, E experts of the model, L = E / ep_size experts of a rank,
R rows received by this rank, H hidden.

Every rank takes part in every all-to-all, with zero rows if need be, forward and backward: a rank whose experts get no
token neither hangs nor leaves the graph.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class DispatchPlan:
    """Where the routed rows of one forward go.

    send_order_N: routed rows sorted by expert (stable), an index into the flattened (T, K) choice.
    counts_E: rows per expert of the model that this rank sends.
    offs_L: int32, end of each local expert's rows among the rows this rank computes.
    recv_order_R: sorts the received rows by local expert; None without expert parallelism (they are sorted already).
    send_splits, recv_splits: rows sent to and received from each rank of the EP group.
    """

    send_order_N: torch.Tensor
    counts_E: torch.Tensor
    offs_L: torch.Tensor
    recv_order_R: torch.Tensor | None = None
    send_splits: list[int] | None = None
    recv_splits: list[int] | None = None


@torch.no_grad()
def plan_dispatch(
    top_k_index_TK: torch.Tensor, num_experts: int, ep_group: dist.ProcessGroup | None = None
) -> DispatchPlan:
    """Sort the routed rows by expert and agree with the EP group on who gets how many.

    The host waits for the device once; without an EP group never.
    """
    expert_N, send_order_N = top_k_index_TK.reshape(-1).sort(stable=True)
    # Not bincount, which waits for the device: without an EP group this can be part of a CUDA graph.
    ends_E = torch.searchsorted(expert_N, torch.arange(num_experts, device=expert_N.device), right=True)
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    ep_size = dist.get_world_size(ep_group) if ep_group is not None else 1
    if ep_size == 1:
        return DispatchPlan(send_order_N=send_order_N, counts_E=counts_E, offs_L=ends_E.int())
    received = torch.empty_like(counts_E)
    dist.all_to_all_single(received, counts_E, group=ep_group)
    send_splits, recv_splits = torch.stack(
        [counts_E.view(ep_size, -1).sum(1), received.view(ep_size, -1).sum(1)]
    ).tolist()
    recv_order_R, offs_L = sort_received(received.view(ep_size, -1))
    return DispatchPlan(
        send_order_N=send_order_N,
        counts_E=counts_E,
        offs_L=offs_L,
        recv_order_R=recv_order_R,
        send_splits=send_splits,
        recv_splits=recv_splits,
    )


def sort_received(counts_PL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Order that turns rows lying (source rank, local expert) into (local expert, source rank), and the experts' ends.

    Args:
        counts_PL: rows received from each rank P for each local expert L.

    Example:
        >>> order, offs = sort_received(torch.tensor([[1, 2], [1, 0]]))
        >>> order.tolist(), offs.tolist()
        ([0, 3, 1, 2], [2, 4])
    """
    num_ranks, num_local = counts_PL.shape
    expert_of_segment = torch.arange(num_local, device=counts_PL.device).repeat(num_ranks)
    expert_R = torch.repeat_interleave(expert_of_segment, counts_PL.reshape(-1))
    return torch.argsort(expert_R, stable=True), counts_PL.sum(0).cumsum(0, dtype=torch.int32)


def dispatch(
    hidden_TH: torch.Tensor, plan: DispatchPlan, top_k: int, ep_group: dist.ProcessGroup | None
) -> torch.Tensor:
    """The rows (R, H) of this rank's experts, sorted by expert."""
    rows = hidden_TH[torch.div(plan.send_order_N, top_k, rounding_mode="floor")]
    if plan.recv_order_R is None:
        return rows
    return _exchange(rows, plan.send_splits, plan.recv_splits, ep_group)[plan.recv_order_R]


def combine(
    rows_RH: torch.Tensor, top_k_weights_TK: torch.Tensor, plan: DispatchPlan, ep_group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Bring the experts' outputs home and sum them over the top-k with the routing weights, in their precision."""
    if plan.recv_order_R is not None:
        rows_RH = _exchange(rows_RH[_inverse(plan.recv_order_R)], plan.recv_splits, plan.send_splits, ep_group)
    num_tokens, top_k = top_k_weights_TK.shape
    rows_TKH = rows_RH[_inverse(plan.send_order_N)].view(num_tokens, top_k, -1)
    return (rows_TKH * top_k_weights_TK.unsqueeze(-1)).sum(1).to(rows_RH.dtype)


def _exchange(
    rows: torch.Tensor, send_splits: list[int], recv_splits: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    return _AllToAll.apply(rows, send_splits, recv_splits, group)


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


def _inverse(order: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return inverse
