"""The memory-bound steps of an experts layer: gather routed rows, sum them back, the gated activation, LoRA's factors.

Legend: T tokens, K top-k, R rows of this rank's experts, sorted by expert, E experts, H hidden, I expert intermediate,
q columns of the factors.

Each is one pass over its rows: by Triton where the rows are 16-bit on a GPU (`moe_rows_triton.py`), else by torch. What
LoRA needs of the rows, scaling · row · factor, is made in the same pass and put behind the row. None uses atomics or an
index_put, so results do not change from run to run.
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from coati_ext.kernel.grouped_gemm import rows_by_weights, weight_gradient
from coati_ext.kernel.row_groups import RowGroups


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """The factor that rows are to be multiplied by, and how many columns there are behind a row for the product."""

    factor_EqK: torch.Tensor
    """Of any strides."""
    scaling: float
    spare: int
    """0, or at least q; those beyond q become zeros."""
    groups: RowGroups


def has_kernels(tensor: torch.Tensor) -> bool:
    """Whether Triton runs here: 16-bit rows on a GPU of NVIDIA that has products of bf16."""
    return tensor.dtype in (torch.bfloat16, torch.float16) and on_triton(tensor.device)


@cache
def on_triton(device: torch.device) -> bool:
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) >= (8, 0)


def gather_rows(
    source_TH: torch.Tensor, index_R: torch.Tensor, low: LowRank | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows of `source`, (R, H), or (R, H + spare) with the low-rank product behind them, and that alone, (R, q)."""
    if has_kernels(source_TH) and len(index_R):
        from coati_ext.kernel.moe_rows_triton import gather_rows_triton

        return gather_rows_triton(source_TH.contiguous(), index_R, low)
    return _with_low(source_TH[index_R], low)


def sum_rows(rows_RH: torch.Tensor, position_TK: torch.Tensor) -> torch.Tensor:
    """(T, H): the rows of each token added up, in fp32 (fp64 for fp64) and in the order of k."""
    if has_kernels(rows_RH) and len(position_TK):
        from coati_ext.kernel.moe_rows_triton import sum_rows_triton

        return sum_rows_triton(rows_RH, position_TK)
    wide = torch.promote_types(rows_RH.dtype, torch.float32)
    return rows_RH[position_TK].sum(1, dtype=wide).to(rows_RH.dtype)


def swiglu_rows(
    gate_up_R2I: torch.Tensor, weight_R: torch.Tensor, order_R: torch.Tensor, low: LowRank | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """silu(gate) * up * weight of the row, rounded once, (R, I) or (R, I + spare), and the low-rank product alone.

    Args:
        gate_up_R2I: gate is the first half of the columns.
        weight_R, order_R: the weight of row i is weight[order[i]]; order is a permutation.
    """
    if has_kernels(gate_up_R2I) and len(weight_R):
        from coati_ext.kernel.moe_rows_triton import swiglu_rows_triton

        return swiglu_rows_triton(gate_up_R2I, weight_R, order_R, low)
    gate, up = gate_up_R2I.to(torch.promote_types(gate_up_R2I.dtype, torch.float32)).chunk(2, dim=-1)
    return _with_low((F.silu(gate) * up * weight_R[order_R].unsqueeze(-1)).to(gate_up_R2I.dtype), low)


def swiglu_rows_backward(
    grad_RI: torch.Tensor,
    gate_up_R2I: torch.Tensor,
    weight_R: torch.Tensor,
    order_R: torch.Tensor,
    low: LowRank | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Gradients of `swiglu_rows` and its result again.

    Returns:
        The gradient of gate_up, (R, 2I) or (R, 2I + spare), and its low-rank product alone; the gradient of weight,
        (R,), in its order; the result, (R, I).
    """
    if has_kernels(gate_up_R2I) and len(weight_R):
        from coati_ext.kernel.moe_rows_triton import swiglu_rows_backward_triton

        return swiglu_rows_backward_triton(grad_RI, gate_up_R2I, weight_R, order_R, low)
    wide = torch.promote_types(gate_up_R2I.dtype, torch.float32)
    gate, up = gate_up_R2I.to(wide).chunk(2, dim=-1)
    grad, weight = grad_RI.to(wide), weight_R.to(wide)[order_R].unsqueeze(-1)
    sigmoid = gate.sigmoid()
    act, grad_act = F.silu(gate) * up, grad * weight
    from_gate, from_up = grad_act * up * sigmoid * (1 + gate * (1 - sigmoid)), grad_act * gate * sigmoid
    grad_gate_up, low_Rq = _with_low(torch.cat([from_gate, from_up], dim=-1).to(gate_up_R2I.dtype), low)
    grad_weight = torch.empty_like(weight_R)
    grad_weight[order_R] = (grad * act).sum(-1).to(weight_R.dtype)
    return grad_gate_up, low_Rq, grad_weight, (act * weight).to(gate_up_R2I.dtype)


def factor_gradient(
    low_Rq: torch.Tensor,
    x: torch.Tensor,
    groups: RowGroups,
    *,
    dtype: torch.dtype,
    transposed: bool = False,
    index_R: torch.Tensor | None = None,
) -> torch.Tensor:
    """(E, q, K), or (E, K, q) if `transposed`: each group's low' · x; zeros for a group without rows.

    Args:
        low_Rq, x: of any row strides; x is (R, K), or with `index_R` what it takes the rows from.
    """
    if has_kernels(x) and len(low_Rq):
        from coati_ext.kernel.factor_gradient_triton import factor_gradient_triton

        return factor_gradient_triton(low_Rq, x, groups.tiles, transposed=transposed, dtype=dtype, index_R=index_R)
    rows = x if index_R is None else x[index_R]
    left, right = (rows, low_Rq) if transposed else (low_Rq, rows)
    return weight_gradient(left, right, groups.offs_E).to(dtype)


def _with_low(rows: torch.Tensor, low: LowRank | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    if low is None:
        return rows, None
    low_Rq = low.scaling * rows_by_weights(rows, low.factor_EqK.transpose(1, 2), low.groups.offs_E)
    if not low.spare:
        return rows, low_Rq
    zeros = rows.new_zeros(len(rows), low.spare - low_Rq.shape[1])
    return torch.cat([rows, low_Rq, zeros], dim=-1), low_Rq
