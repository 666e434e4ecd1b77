"""Products with FP8 weights, compiled for Hopper, against fp32 over the dequantised weights."""

import pytest
import torch

from coati_ext.kernel.fp8_cast import dequantize_fp8, quantize_fp8
from coati_ext.kernel.fp8_gemm import (
    fp8_rows_by_fp8,
    has_fp8_kernels,
    quantize_rows,
    quantize_rows_reference,
    rows_by_fp8,
)
from coati_ext.kernel.row_groups import RowGroups

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not hopper, reason="the kernels are for Hopper")]

COUNTS = {"many rows": [700, 0, 321, 64], "few rows": [3, 0, 40, 1]}


def case(counts, widths, q):
    torch.manual_seed(0)
    weight, scale = quantize_fp8(torch.randn(len(counts), *widths, device="cuda"))
    groups = RowGroups(torch.tensor(counts, device="cuda").cumsum(0).int(), sum(counts))
    return weight, scale, dequantize_fp8(weight, scale, dtype=torch.float32), groups


def wanted(x, exact, counts, low):
    parts = []
    for e, rows in enumerate(x.split(counts)):
        part = rows.float() @ exact[e]
        parts.append(part if low is None else part + low[0].split(counts)[e].float() @ low[1][e].float())
    return torch.cat(parts)


def error(found, exact):
    return ((found.float() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("q", [0, 16, 72])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("widths", [(4096, 7168), (272, 208), (384, 1408)])
@pytest.mark.parametrize("name", COUNTS)
def test_products_are_those_of_the_dequantised_weight(name, widths, transposed, q):
    counts = COUNTS[name]
    weight, scale, exact, groups = case(counts, widths, q)
    n, k = widths
    x = torch.randn(sum(counts), n if transposed else k, device="cuda", dtype=torch.bfloat16)
    low = None
    if q:
        factor = torch.randn(len(counts), q, k if transposed else n, device="cuda", dtype=torch.bfloat16)
        low = (torch.randn(sum(counts), q, device="cuda", dtype=torch.bfloat16), factor)
    assert has_fp8_kernels(x, weight)
    found = rows_by_fp8(x, weight, scale, groups, transposed=transposed, low=low)
    by = exact if transposed else exact.transpose(1, 2)
    assert error(found, wanted(x, by, counts, low)) < 3e-3  # of bf16: 8 bits
    assert torch.equal(found, rows_by_fp8(x, weight, scale, groups, transposed=transposed, low=low))


@pytest.mark.parametrize("widths", [(4096, 7168), (272, 208)])
@pytest.mark.parametrize("name", COUNTS)
def test_products_of_quantised_rows(name, widths):
    counts = COUNTS[name]
    weight, scale, exact, groups = case(counts, widths, 0)
    x = torch.randn(sum(counts), widths[1], device="cuda", dtype=torch.bfloat16)
    codes, scales = quantize_rows(x)
    expected, expected_scales = quantize_rows_reference(x)
    assert torch.equal(scales, expected_scales) and torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    found = fp8_rows_by_fp8(codes, scales, weight, scale, groups, dtype=torch.bfloat16)
    rows = codes.float() * scales.repeat_interleave(128, 1)[:, : widths[1]]
    assert error(found, wanted(rows, exact.transpose(1, 2), counts, None)) < 3e-3
    assert error(found, wanted(x, exact.transpose(1, 2), counts, None)) < 4e-2  # of rows in e4m3: 4 bits


@pytest.mark.parametrize("num_rows", [1, 64, 1000])
def test_a_linear_layer_multiplies_by_its_dequantised_weight(num_rows):
    from torch import nn

    from coati_ext.models.fp8_linear import Fp8Linear

    torch.manual_seed(0)
    layer = Fp8Linear(nn.Linear(1536, 576, bias=True, device="cuda", dtype=torch.bfloat16))
    layer.weight.data, layer.weight_scale_inv.data = quantize_fp8(torch.randn(576, 1536, device="cuda"))
    x = torch.randn(num_rows, 1536, device="cuda", dtype=torch.bfloat16)
    exact = x.float() @ dequantize_fp8(layer.weight, layer.weight_scale_inv, dtype=torch.float32).T + layer.bias.float()
    assert error(layer(x), exact) < 5e-3
