"""Products with FP8 weights that are dequantised as they go: the interpreted kernels against the dequantised weight."""

import pytest
import torch
from interpreted import interpreted

from coati_ext.kernel import fp8_gemm as module
from coati_ext.kernel.fp8_cast import dequantize_fp8, quantize_fp8
from coati_ext.kernel.fp8_gemm import fp8_rows_by_fp8, quantize_rows, quantize_rows_reference, rows_by_fp8
from coati_ext.kernel.row_groups import RowGroups

COUNTS = [[3, 0, 70], [0, 0, 1]]  # rows of each group: none, part of a tile, more than one
WIDTHS = [(128, 256), (144, 80), (40, 24)]  # N, K: whole blocks, ragged ones, and too narrow for descriptors


@pytest.fixture(params=["reference", "many rows", "few rows"])
def path(request, monkeypatch):
    if request.param != "reference":
        kernels, rows_kernels = interpreted("fp8_gemm_triton"), interpreted("fp8_rows_triton")
        monkeypatch.setattr(kernels, "MANY", 0 if request.param == "many rows" else 1 << 30)
        modules = __import__("sys").modules
        monkeypatch.setitem(modules, "coati_ext.kernel.moe_rows_triton", interpreted("moe_rows_triton"))
        monkeypatch.setitem(modules, "coati_ext.kernel.fp8_gemm_triton", kernels)
        monkeypatch.setitem(modules, "coati_ext.kernel.fp8_rows_triton", rows_kernels)
        monkeypatch.setattr(module.moe_rows, "has_kernels", lambda tensor: True)
        monkeypatch.setattr(module, "_is_hopper", lambda device: True)
    return request.param


class Case:
    """fp16, which the interpreter holds in numpy."""

    def __init__(self, counts, widths, q):
        self.generator = torch.Generator().manual_seed(0)
        self.n, self.k = widths
        self.weight, self.scale = quantize_fp8(self.random(len(counts), *widths))
        self.exact = dequantize_fp8(self.weight, self.scale, dtype=torch.float32).double()
        ends = torch.tensor(counts).cumsum(0)
        self.num_rows = sum(counts)
        self.groups = RowGroups(ends.int(), self.num_rows)
        self.spans = [slice(end - count, end) for end, count in zip(ends.tolist(), counts, strict=True)]
        self.q = q

    def random(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def low(self, width):
        """Of strides that factors have where they lie in buffers."""
        if not self.q:
            return None
        factor = self.random(len(self.spans), width + 3, self.q + 2).half().transpose(1, 2)
        return self.random(self.num_rows, self.q + 1).half()[:, : self.q], factor[:, : self.q, :width]

    def wanted(self, x, low, transposed):
        parts = [x[span].double() @ (w if transposed else w.T) for span, w in zip(self.spans, self.exact, strict=True)]
        if low is not None:
            rows, factor = (each.double() for each in low)
            parts = [
                part + rows[span] @ factor[e] for e, (part, span) in enumerate(zip(parts, self.spans, strict=True))
            ]
        return torch.cat(parts)


def close(found, exact, tolerance):
    assert found.shape == exact.shape
    assert (found.double() - exact).norm() <= tolerance * exact.norm()


@pytest.mark.parametrize("q", [0, 3, 20])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("counts", COUNTS)
def test_products_are_those_of_the_dequantised_weight(path, counts, widths, transposed, q):
    case = Case(counts, widths, q)
    x = case.random(case.num_rows, case.n if transposed else case.k).half()
    low = case.low(case.k if transposed else case.n)
    found = rows_by_fp8(x, case.weight, case.scale, case.groups, transposed=transposed, low=low)
    close(found, case.wanted(x, low, transposed), 1e-3)  # of fp16: 11 bits


@pytest.mark.parametrize("q", [0, 20])
@pytest.mark.parametrize("widths", [(128, 256), (144, 80)])
@pytest.mark.parametrize("counts", COUNTS)
def test_products_of_quantised_rows(path, counts, widths, q):
    case = Case(counts, widths, q)
    x8, scale = quantize_rows_reference(case.random(case.num_rows, case.k).half())
    low = case.low(case.n)
    found = fp8_rows_by_fp8(x8, scale, case.weight, case.scale, case.groups, dtype=torch.float16, low=low)
    x = x8.double() * scale.double().repeat_interleave(128, 1)[:, : case.k]
    close(found, case.wanted(x, low, False), 1e-3)


def test_rows_are_quantised_by_blocks_of_their_columns(path):
    x = torch.randn(9, 200, generator=torch.Generator().manual_seed(0)).half() * 3
    x[2, :128], x[3] = 0, x[3] / 1000
    codes, scale = quantize_rows(x)
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == x.shape and scale.shape == (9, 2)
    assert scale[2, 0] == 1 and codes.float()[2, :128].abs().max() == 0
    largest = torch.stack([x[:, :128].abs().amax(1), x[:, 128:].abs().amax(1)], 1).float()
    torch.testing.assert_close(scale[largest > 0], (largest / 448)[largest > 0])
    scales = scale.repeat_interleave(128, 1)[:, :200]
    right = (codes.float() * scales - x.float()).abs() <= x.float().abs() / 15 + scales / 512
    # The interpreter loses the carry of what rounds up to a power of two; tests/gpu has the exact comparison.
    assert right.all() if path == "reference" else right.float().mean() > 0.95


def test_no_rows_are_no_rows(path):
    case = Case([0, 0], (128, 256), 4)
    low = case.low(128)
    x = torch.zeros(0, 256).half()
    assert rows_by_fp8(x, case.weight, case.scale, case.groups, transposed=False, low=low).shape == (0, 128)
    assert quantize_rows(x)[0].shape == (0, 256)


def test_kernels_want_one_grid_of_blocks(monkeypatch):
    monkeypatch.setattr(module.moe_rows, "has_kernels", lambda tensor: True)
    monkeypatch.setattr(module, "_is_hopper", lambda device: True)
    rows = torch.zeros(1, 8)
    assert module.has_fp8_kernels(rows, torch.zeros(1, 512, 8), 2)
    assert not module.has_fp8_kernels(rows, torch.zeros(1, 192, 8), 2)  # whose second half begins within a block
    assert module.has_fp8_kernels(rows, torch.zeros(1, 192, 8), 1)
