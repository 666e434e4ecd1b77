"""Frozen experts with LoRA as one autograd function, from the rows that arrive to their weighted sums.

Legend: S source rows (tokens, or rows from other ranks), K rows made of each, R rows sorted by expert, L experts of
this rank, H hidden, I expert intermediate, r rank, q columns that the factors of one weight take together.

The frozen product with LoRA, x·W + s·(x·A)·B, is one product (`frozen_weights.py`); x·A is made in the pass that writes
the rows.

Composed of differentiable parts, the layer would keep its rows, activation and outputs. Here the routing weight
multiplies the activation, where it is the same by linearity and the rows are narrower, so that outputs are not kept;
the rows are read through their index again, and the activation is made again, in the passes that need them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from coati_ext.kernel.moe_rows import (
    LowRank,
    factor_gradient,
    gather_rows,
    sum_rows,
    swiglu_rows,
    swiglu_rows_backward,
)
from coati_ext.moe.dispatch import OwnRows
from coati_ext.moe.frozen_weights import FrozenWeight


def lora_experts(
    source_SH: torch.Tensor,
    weight_R: torch.Tensor,
    own: OwnRows,
    gate_up: FrozenWeight,
    down: FrozenWeight,
    lora_A: Mapping[str, torch.Tensor],
    lora_B: Mapping[str, torch.Tensor],
    scaling: float,
) -> torch.Tensor:
    """(S, H): sums of weight · (expert with SwiGLU and LoRA), differentiable in source, weight and the factors.

    Args:
        weight_R: routing weights, of row i that at order_R[i].
        lora_A, lora_B: as in `MoeExperts`; empty: without LoRA, whatever there is room for.
    """
    for weight in (gate_up, down) if lora_A else ():
        weight.take(lora_A, lora_B)
    factors = [one[name] for name in lora_A for one in (lora_A, lora_B)]
    frozen = _Frozen(own=own, gate_up=gate_up, down=down, scaling=scaling, adapted=tuple(lora_A))
    return _LoraExperts.apply(source_SH, weight_R, frozen, *factors)


@dataclass(frozen=True, kw_only=True)
class _Frozen:
    own: OwnRows
    gate_up: FrozenWeight
    down: FrozenWeight
    scaling: float
    adapted: tuple[str, ...]

    def low(self, weight: FrozenWeight, factor_LqK: torch.Tensor | None) -> LowRank | None:
        if not (self.adapted and weight.total):
            return None
        return LowRank(factor_EqK=factor_LqK, scaling=self.scaling, spare=weight.spare, groups=self.own.groups)


class _LoraExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, source_SH, weight_R, frozen, *factors):
        gate_up, down, own, groups = frozen.gate_up, frozen.down, frozen.own, frozen.own.groups
        source_SH = source_SH.contiguous()
        rows, low_up = gather_rows(source_SH, own.index_R, frozen.low(gate_up, gate_up.a_LqK))
        gate_up_R2I = gate_up.forward(rows, low_up, groups)
        del rows
        act, low_down = swiglu_rows(gate_up_R2I, weight_R, own.order_R, frozen.low(down, down.a_LqK))
        out_RH = down.forward(act, low_down, groups)
        ctx.frozen, ctx.dtype = frozen, factors[0].dtype if factors else None
        ctx.save_for_backward(source_SH, weight_R, gate_up_R2I, low_up, low_down)
        return sum_rows(out_RH, own.position_SK)

    @staticmethod
    def backward(ctx, grad_SH):
        frozen, (source_SH, weight_R, gate_up_R2I, low_up, low_down) = ctx.frozen, ctx.saved_tensors
        gate_up, down, own, groups = frozen.gate_up, frozen.down, frozen.own, frozen.own.groups
        grad_SH = grad_SH.contiguous()
        grad, grad_low_down = gather_rows(grad_SH, own.index_R, frozen.low(down, down.b_LqN))
        grad_act_RI = down.backward(grad, grad_low_down, groups)
        del grad
        grad_gate_up, grad_low_up, grad_weight_R, act_RI = swiglu_rows_backward(
            grad_act_RI, gate_up_R2I, weight_R, own.order_R, frozen.low(gate_up, gate_up.b_LqN)
        )
        del grad_act_RI

        found = {}
        if low_down is not None:
            a = factor_gradient(grad_low_down, act_RI, groups, dtype=ctx.dtype)
            b = factor_gradient(low_down, grad_SH, groups, dtype=ctx.dtype, index_R=own.index_R, transposed=True)
            found["down_proj"] = (a, b)
        del act_RI
        if low_up is not None:
            a = factor_gradient(grad_low_up, source_SH, groups, dtype=ctx.dtype, index_R=own.index_R)
            for name, (rows, columns) in gate_up.places.items():
                of_rows = grad_gate_up[:, rows]
                b = factor_gradient(low_up[:, columns], of_rows, groups, dtype=ctx.dtype, transposed=True)
                found[name] = (a[:, columns], b)
        grad_source_SH = None
        if ctx.needs_input_grad[0]:
            grad_rows = gate_up.backward(grad_gate_up, grad_low_up, groups)
            grad_source_SH = sum_rows(grad_rows, own.position_SK)
        gradients = [gradient for name in frozen.adapted for gradient in found[name]]
        return grad_source_SH, grad_weight_R, None, *gradients
