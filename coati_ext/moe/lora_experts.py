"""Frozen experts with LoRA as one autograd function, from the rows that arrive to their weighted sums.

Legend: S source rows (tokens, or rows from other ranks), K rows made of each, R rows sorted by expert, L experts of
this rank, H hidden, I expert intermediate, r rank, q columns that the factors of one weight take together.

The frozen product with LoRA, x·W + s·(x·A)·B, is one library product: the weights lie in a buffer with q more columns,
which take B, and q more rows, which take A, and the rows have q more columns for x·A, which the pass that writes the
rows makes. So LoRA costs q / width of the big product.

Composed of differentiable parts, the layer would keep its rows, activation and outputs. Here the routing weight
multiplies the activation, where it is the same by linearity and the rows are narrower, so that outputs are not kept;
the rows are read through their index again, and the activation is made again, in the passes that need them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from coati_ext.kernel.grouped_gemm import rows_by_weights
from coati_ext.kernel.moe_rows import (
    LowRank,
    factor_gradient,
    gather_rows,
    sum_rows,
    swiglu_rows,
    swiglu_rows_backward,
)
from coati_ext.moe.dispatch import DispatchPlan

# q is a multiple of this, for the 16 bytes of the stride rule, or of the wider one, which keeps rows on cache lines,
# where it adds at most 4 % to a row.
NARROW, WIDE = 16, 64
WIDE_FROM = 25 * WIDE


class PackedWeight:
    """A frozen weight with room for factors: (L, N + q, K + q), the weight at the top left.

    Args:
        parameter: (L, N, K); becomes a view of the buffer.
        ranks: of the projections that share its input, by name; empty: no room is made.
    """

    def __init__(self, parameter: nn.Parameter, ranks: Mapping[str, int]) -> None:
        num_experts, self.width_out, self.width_in = parameter.shape
        self.ranks = dict(ranks)
        total = sum(ranks.values())
        multiple = WIDE if self.width_in >= WIDE_FROM else NARROW
        self.q = -(-total // multiple) * multiple
        if not total:
            self.buffer = parameter.data
            return
        self.buffer = parameter.data.new_zeros(num_experts, self.width_out + self.q, self.width_in + self.q)
        self.buffer[:, : self.width_out, : self.width_in] = parameter.data
        parameter.data = self.buffer[:, : self.width_out, : self.width_in]

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether it still is the parameter's memory."""
        return parameter.data_ptr() == self.buffer.data_ptr() and parameter.stride() == self.buffer.stride()

    @property
    def places(self) -> dict[str, tuple[slice, slice]]:
        """Rows of the weight, and columns of the factors, of each projection."""
        found, first = {}, 0
        for name, rank in self.ranks.items():
            half = self.width_out // 2
            rows = {"gate_proj": slice(0, half), "up_proj": slice(half, 2 * half)}
            found[name] = (rows.get(name, slice(0, self.width_out)), slice(first, first + rank))
            first += rank
        return found

    def take(self, lora_A: Mapping[str, torch.Tensor], lora_B: Mapping[str, torch.Tensor]) -> None:
        """Copy the factors into their places. (As views of them they would not be contiguous, which ZeRO asks for.)"""
        for name, (rows, columns) in self.places.items():
            self.a_LqK[:, columns].copy_(lora_A[name].detach())
            self.buffer[:, rows, self.width_in :][..., columns].copy_(lora_B[name].detach())

    @property
    def total(self) -> int:
        return sum(self.ranks.values())

    @property
    def a_LqK(self) -> torch.Tensor:
        """The factors A one below the other."""
        return self.buffer[:, self.width_out : self.width_out + self.total, : self.width_in]

    @property
    def b_LqN(self) -> torch.Tensor:
        """The factors B, as they contract the output; zeros where rows are of another projection."""
        return self.buffer[:, : self.width_out, self.width_in : self.width_in + self.total].transpose(1, 2)

    def forward_LKN(self, width: int) -> torch.Tensor:
        """What rows of this width, with or without their low-rank product, are multiplied by."""
        return self.buffer[:, : self.width_out, :width].transpose(1, 2)

    def backward_LNK(self, width: int) -> torch.Tensor:
        """The same for gradients of the output."""
        return self.buffer[:, :width, : self.width_in]


def lora_experts(
    source_SH: torch.Tensor,
    weight_R: torch.Tensor,
    plan: DispatchPlan,
    gate_up: PackedWeight,
    down: PackedWeight,
    lora_A: Mapping[str, torch.Tensor],
    lora_B: Mapping[str, torch.Tensor],
    scaling: float,
) -> torch.Tensor:
    """(S, H): sums of weight · (expert with SwiGLU and LoRA), differentiable in source, weight and the factors.

    Args:
        weight_R: routing weight of each row.
        lora_A, lora_B: as in `MoeExperts`; empty: without LoRA, whatever there is room for.
    """
    for packed in (gate_up, down) if lora_A else ():
        packed.take(lora_A, lora_B)
    factors = [one[name] for name in lora_A for one in (lora_A, lora_B)]
    frozen = _Frozen(plan=plan, gate_up=gate_up, down=down, scaling=scaling, adapted=tuple(lora_A))
    return _LoraExperts.apply(source_SH, weight_R, frozen, *factors)


@dataclass(frozen=True, kw_only=True)
class _Frozen:
    plan: DispatchPlan
    gate_up: PackedWeight
    down: PackedWeight
    scaling: float
    adapted: tuple[str, ...]

    def low(self, packed: PackedWeight, factor_LqK: torch.Tensor) -> LowRank | None:
        if not (self.adapted and packed.q):
            return None
        return LowRank(factor_EqK=factor_LqK, scaling=self.scaling, spare=packed.q, groups=self.plan.groups)


class _LoraExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, source_SH, weight_R, frozen, *factors):
        gate_up, down, plan, offs_L = frozen.gate_up, frozen.down, frozen.plan, frozen.plan.groups.offs_E
        source_SH = source_SH.contiguous()
        rows, low_up = gather_rows(source_SH, plan.index_R, frozen.low(gate_up, gate_up.a_LqK))
        gate_up_R2I = rows_by_weights(rows, gate_up.forward_LKN(rows.shape[1]), offs_L)
        del rows
        act, low_down = swiglu_rows(gate_up_R2I, weight_R, frozen.low(down, down.a_LqK))
        out_RH = rows_by_weights(act, down.forward_LKN(act.shape[1]), offs_L)
        ctx.frozen, ctx.dtype = frozen, factors[0].dtype if factors else None
        ctx.save_for_backward(source_SH, weight_R, gate_up_R2I, low_up, low_down)
        return sum_rows(out_RH, plan.position_SK)

    @staticmethod
    def backward(ctx, grad_SH):
        frozen, (source_SH, weight_R, gate_up_R2I, low_up, low_down) = ctx.frozen, ctx.saved_tensors
        gate_up, down, plan, groups = frozen.gate_up, frozen.down, frozen.plan, frozen.plan.groups
        grad_SH = grad_SH.contiguous()
        grad, grad_low_down = gather_rows(grad_SH, plan.index_R, frozen.low(down, down.b_LqN))
        grad_act_RI = rows_by_weights(grad, down.backward_LNK(grad.shape[1]), groups.offs_E)
        del grad
        grad_gate_up, grad_low_up, grad_weight_R, act_RI = swiglu_rows_backward(
            grad_act_RI, gate_up_R2I, weight_R, frozen.low(gate_up, gate_up.b_LqN)
        )
        del grad_act_RI

        found = {}
        if low_down is not None:
            a = factor_gradient(grad_low_down, act_RI, groups, dtype=ctx.dtype)
            b = factor_gradient(low_down, grad_SH, groups, dtype=ctx.dtype, index_R=plan.index_R, transposed=True)
            found["down_proj"] = (a, b)
        del act_RI
        if low_up is not None:
            a = factor_gradient(grad_low_up, source_SH, groups, dtype=ctx.dtype, index_R=plan.index_R)
            for name, (rows, columns) in gate_up.places.items():
                of_rows = grad_gate_up[:, rows]
                b = factor_gradient(low_up[:, columns], of_rows, groups, dtype=ctx.dtype, transposed=True)
                found[name] = (a[:, columns], b)
        grad_source_SH = None
        if ctx.needs_input_grad[0]:
            grad_rows = rows_by_weights(grad_gate_up, gate_up.backward_LNK(grad_gate_up.shape[1]), groups.offs_E)
            grad_source_SH = sum_rows(grad_rows, plan.position_SK)
        gradients = [gradient for name in frozen.adapted for gradient in found[name]]
        return grad_source_SH, grad_weight_R, None, *gradients
