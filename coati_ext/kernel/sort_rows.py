"""Routed rows sorted by expert, without a host that waits.

Legend: T tokens, K top-k, N = T*K routed rows, E experts of the model.
"""

from dataclasses import dataclass

import torch

from coati_ext.kernel.moe_rows import on_triton


@dataclass(frozen=True, kw_only=True)
class SortedRows:
    """
    order_N, token_N: the rows in the order of their expert (stable): an index into the flattened (T, K) choice, and
        their token. int64.
    position_TK: where the rows of each token are among these. int64.
    counts_E: rows of each expert. int64.
    ends_E: where the rows of each expert end. int32.
    """

    order_N: torch.Tensor
    token_N: torch.Tensor
    position_TK: torch.Tensor
    counts_E: torch.Tensor
    ends_E: torch.Tensor


def sort_rows(top_k_index_TK: torch.Tensor, num_experts: int) -> SortedRows:
    """Sort the chosen experts; by Triton in four launches on a GPU of NVIDIA, else by torch, in some twenty."""
    if on_triton(top_k_index_TK.device) and top_k_index_TK.numel():
        from coati_ext.kernel.sort_rows_triton import sort_rows_triton

        return SortedRows(**sort_rows_triton(top_k_index_TK, num_experts))
    expert_N, order_N = top_k_index_TK.reshape(-1).int().sort(stable=True)  # a radix sort takes a pass a byte
    # Not bincount, which waits for the device: without an EP group this can be part of a CUDA graph.
    ends_E = torch.searchsorted(
        expert_N, torch.arange(num_experts, dtype=torch.int32, device=expert_N.device), right=True
    )
    top_k = top_k_index_TK.shape[-1]
    return SortedRows(
        order_N=order_N,
        token_N=torch.div(order_N, top_k, rounding_mode="floor"),
        position_TK=inverse(order_N).view(-1, top_k),
        counts_E=ends_E.diff(prepend=ends_E.new_zeros(1)),
        ends_E=ends_E.int(),
    )


def inverse(order_N: torch.Tensor) -> torch.Tensor:
    """Where each row is in this order."""
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(order_N.shape[0], device=order_N.device)
    return inverse_N
