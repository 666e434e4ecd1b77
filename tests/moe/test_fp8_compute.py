"""Experts with FP8 weights whose forward products are of FP8 rows: against the formula, expert by expert.

Legend: T tokens, K top-k, H hidden, I expert intermediate.
"""

import pytest
import torch
import torch.nn.functional as F

from coati_ext.benchmark import experts
from coati_ext.kernel.fp8_cast import dequantize_fp8
from coati_ext.kernel.fp8_gemm import dequantize_rows, quantize_rows
from coati_ext.moe.kernel_choice import describe_kernels

SHAPE = experts.Shape(num_experts=4, hidden=200, intermediate=72, top_k=2)  # parts of no whole blocks


def block_of(make) -> torch.nn.Module:
    torch.manual_seed(0)
    block = make(SHAPE, 3, torch.device("cpu")).float()
    for factors in (block.lora_A, block.lora_B):
        for parameter in factors.values():
            torch.nn.init.normal_(parameter, std=0.1)
    return block


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    index_TK = torch.rand(11, SHAPE.num_experts - 1).topk(SHAPE.top_k, dim=-1).indices  # one expert gets nothing
    return torch.randn(11, SHAPE.hidden).requires_grad_(), index_TK, torch.rand(11, SHAPE.top_k).requires_grad_()


class _Rounded(torch.autograd.Function):
    """To FP8 and back; the gradient passes straight through."""

    @staticmethod
    def forward(ctx, x):
        return dequantize_rows(*quantize_rows(x), dtype=x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad


def formula(block, hidden_TH, index_TK, weight_TK) -> torch.Tensor:
    def frozen(name: str, parts: int) -> torch.Tensor:
        each = (getattr(block, key).data.unflatten(1, (parts, -1)) for key in (name, f"{name}_scale_inv"))
        return dequantize_fp8(*each, dtype=torch.float32).flatten(1, 2)

    def lora(x, e, name):
        return block.scaling * x @ block.lora_A[name][e].T @ block.lora_B[name][e].T

    gate_up, down, outs = frozen("gate_up_proj", 2), frozen("down_proj", 1), []
    for x, chosen, weights in zip(hidden_TH.split(1), index_TK.tolist(), weight_TK, strict=True):
        out = 0
        for e, weight in zip(chosen, weights, strict=True):
            gate, up = (_Rounded.apply(x) @ gate_up[e].T).chunk(2, dim=-1)
            act = F.silu(gate + lora(x, e, "gate_proj")) * (up + lora(x, e, "up_proj")) * weight
            out = out + _Rounded.apply(act) @ down[e].T + lora(act, e, "down_proj")
        outs.append(out)
    return torch.cat(outs)


@pytest.mark.parametrize("in_one_function", [True, False])
def test_output_and_gradients_are_the_formula_s(in_one_function):
    block = block_of(experts._ours_fp8_compute)
    block._is_swiglu = in_one_function
    given = inputs()
    leaves = [given[0], given[2], *block.lora_A.values(), *block.lora_B.values()]
    outs = [block(*given), formula(block, *given)]
    probe = torch.randn_like(outs[0])
    found, wanted = ([out, *torch.autograd.grad(out, leaves, probe)] for out in outs)
    for ours, exact in zip(found, wanted, strict=True):
        # Sums in another order round a few numbers to the FP8 code beside.
        assert (ours - exact).norm() <= 2e-3 * exact.norm()


def test_it_costs_a_few_percent_of_the_output():
    rounded, plain = (block_of(make)(*inputs()) for make in (experts._ours_fp8_compute, experts._ours_fp8))
    assert 0.01 < (rounded - plain).norm() / plain.norm() < 0.06


def test_the_kernels_line_says_so():
    assert describe_kernels(block_of(experts._ours_fp8_compute)).endswith(
        "; FP8 weights dequantised into a copy for each product of rows rounded to FP8 (no FP8 products here)"
    )
