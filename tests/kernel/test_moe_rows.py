"""The passes over the rows of an experts layer: the torch path and the interpreted Triton kernels, against formulas."""

import pytest
import torch
import torch.nn.functional as F
from interpreted import interpreted

from coati_ext.kernel import moe_rows
from coati_ext.kernel.moe_rows import LowRank, factor_gradient
from coati_ext.kernel.row_groups import RowGroups
from coati_ext.moe.dispatch import GatherRows, SumRows

SHAPES = [(1, 1, 1), (5, 2, 24), (3, 8, 1030)]  # T, K, H
# Rows of each group: none, one, part of a tile, a tile, more than one.
COUNTS = [[5, 0, 3], [0, 0, 1], [64, 1, 0], [0, 130, 33]]
WIDTHS = [(256, 16, 64), (40, 8, 16), (136, 2, 16), (24, 72, 128), (40, 8, 0)]  # columns of the rows, q, spare columns


@pytest.fixture(scope="module")
def kernels():
    return interpreted("moe_rows_triton")


@pytest.fixture(scope="module")
def gradients():
    return interpreted("factor_gradient_triton")


@pytest.fixture(params=["torch", "triton", "triton, high tiles"])
def path(request, kernels, gradients, monkeypatch):
    """Where the functions of `moe_rows` go."""
    if request.param != "torch":
        monkeypatch.setattr(kernels, "ENOUGH", 1 if request.param == "triton, high tiles" else 256)
        monkeypatch.setattr(moe_rows, "has_kernels", lambda tensor: True)
        modules = __import__("sys").modules
        monkeypatch.setitem(modules, "coati_ext.kernel.moe_rows_triton", kernels)
        monkeypatch.setitem(modules, "coati_ext.kernel.factor_gradient_triton", gradients)
    return request.param


def routing(num_tokens, top_k):
    order_N = torch.randperm(num_tokens * top_k, generator=torch.Generator().manual_seed(1))
    return order_N // top_k, order_N.argsort().view(num_tokens, top_k)


@pytest.mark.parametrize(("num_tokens", "top_k", "width"), SHAPES)
def test_gather_and_sum_are_each_others_backward(num_tokens, top_k, width):
    token_N, position_TK = routing(num_tokens, top_k)
    generator = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(num_tokens, width, generator=generator, dtype=torch.float64).requires_grad_()
    rows_NH = torch.randn(num_tokens * top_k, width, generator=generator, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: GatherRows.apply(x, token_N, position_TK)[:, :3], (hidden_TH[:, :3],))
    assert torch.autograd.gradcheck(lambda x: SumRows.apply(x, token_N, position_TK), (rows_NH[:, :3],))
    torch.testing.assert_close(GatherRows.apply(hidden_TH, token_N, position_TK), hidden_TH[token_N])
    torch.testing.assert_close(SumRows.apply(rows_NH, token_N, position_TK), rows_NH[position_TK].sum(1))


@pytest.mark.parametrize(("num_tokens", "top_k", "width"), SHAPES)
def test_rows_are_gathered_and_summed(path, num_tokens, top_k, width):
    token_N, position_TK = routing(num_tokens, top_k)
    hidden_TH = torch.randn(num_tokens, width).half()
    rows_NH, low = moe_rows.gather_rows(hidden_TH, token_N)
    assert low is None and torch.equal(rows_NH, hidden_TH[token_N])
    exact = rows_NH.double()[position_TK].sum(1)
    torch.testing.assert_close(moe_rows.sum_rows(rows_NH, position_TK).double(), exact, rtol=1e-3, atol=1e-3)


class Case:
    """Rows in groups and a factor of any strides, in fp16, which the interpreter holds in numpy."""

    def __init__(self, counts, widths):
        self.generator = torch.Generator().manual_seed(0)
        width, q, spare = widths
        self.num_rows = sum(counts)
        factor = self.random(len(counts), q + 1, width + 2).half()[:, :q, :width]
        ends = torch.tensor(counts).cumsum(0)
        self.groups = RowGroups(ends.int(), self.num_rows)
        self.low = LowRank(factor_EqK=factor, scaling=0.5, spare=spare, groups=self.groups)
        self.spans = [slice(end - count, end) for end, count in zip(ends.tolist(), counts, strict=True)]

    def random(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def check(self, wide, low, rows):
        """`wide` are these rows, their product with the factor, and zeros; `low` is the product."""
        factor = self.low.factor_EqK.double()
        exact = torch.cat([0.5 * rows[span].double() @ factor[e].T for e, span in enumerate(self.spans)])
        width, q = rows.shape[1], factor.shape[1]
        assert wide.shape == (self.num_rows, width + self.low.spare) and torch.equal(wide[:, :width], rows)
        close(low, exact)
        if self.low.spare:
            assert torch.equal(wide[:, width : width + q], low) and not wide[:, width + q :].any()


def close(found, exact):
    # fp16 has 11 bits; products of up to 256 numbers
    torch.testing.assert_close(found.double(), exact.double(), rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("counts", COUNTS)
def test_gathered_rows_carry_their_product(path, counts, widths):
    case = Case(counts, widths)
    source, index = case.random(7, widths[0]).half(), torch.randint(7, (case.num_rows,), generator=case.generator)
    case.check(*moe_rows.gather_rows(source, index, case.low), source[index])


@pytest.mark.parametrize("with_low", [False, True])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("counts", COUNTS)
def test_swiglu_and_its_gradients(path, counts, widths, with_low):
    case, back = Case(counts, widths), Case(counts, (2 * widths[0], *widths[1:]))
    n, width = case.num_rows, widths[0]
    gate_up, weight, grad = case.random(n, 2 * width).half(), case.random(n), case.random(n, width).half()
    order = torch.randperm(n, generator=case.generator)
    leaves = [gate_up.double().requires_grad_(), weight.double().requires_grad_()]
    gate, up = leaves[0].chunk(2, -1)
    exact = F.silu(gate) * up * leaves[1][order].unsqueeze(-1)
    of_gate_up, of_weight = torch.autograd.grad(exact, leaves, grad.double())

    act, low = moe_rows.swiglu_rows(gate_up, weight, order, case.low if with_low else None)
    grad_gate_up, grad_low, grad_weight, again = moe_rows.swiglu_rows_backward(
        grad, gate_up, weight, order, back.low if with_low else None
    )
    close(act[:, :width], exact.detach())
    close(grad_gate_up[:, : 2 * width], of_gate_up)
    close(grad_weight, of_weight)
    assert torch.equal(act[:, :width], again)
    if with_low:
        case.check(act, low, again)
        back.check(grad_gate_up, grad_low, grad_gate_up[:, : 2 * width])
    else:
        assert low is None and grad_low is None and act.shape[1] == width and grad_gate_up.shape[1] == 2 * width


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("counts", COUNTS)
def test_gradients_of_factors(path, counts, widths, indexed):
    case = Case(counts, widths)
    width, q, _ = widths
    x, low = case.random(case.num_rows, width + 8).half()[:, :width], case.random(case.num_rows, q + 3).half()[:, :q]
    index = torch.randperm(case.num_rows, generator=case.generator) if indexed else None
    rows = x.double() if index is None else x.double()[index]
    exact = torch.stack([low[span].double().T @ rows[span] for span in case.spans])
    close(factor_gradient(low, x, case.groups, dtype=torch.float32, index_R=index), exact)
    transposed = factor_gradient(low, x, case.groups, dtype=torch.float16, index_R=index, transposed=True)
    close(transposed, exact.transpose(1, 2))


def test_no_rows_are_no_rows(path):
    groups = RowGroups(torch.zeros(2, dtype=torch.int32), 0)
    low = LowRank(factor_EqK=torch.ones(2, 4, 8).half(), scaling=1.0, spare=16, groups=groups)
    none = torch.zeros(0, dtype=torch.int64)
    assert moe_rows.gather_rows(torch.zeros(4, 8).half(), none, low)[0].shape == (0, 24)
    assert moe_rows.swiglu_rows(torch.zeros(0, 16).half(), torch.zeros(0), none, low)[0].shape == (0, 24)
    gradient = factor_gradient(torch.zeros(0, 4).half(), torch.zeros(0, 8).half(), groups, dtype=torch.float32)
    assert gradient.shape == (2, 4, 8) and not gradient.any()


def test_tiles_follow_the_groups(kernels):
    tiles = kernels.tiles_of(torch.tensor([17, 17, 18], dtype=torch.int32), 18, 16)
    assert tiles.height == 16
    assert tiles.start_E.tolist() == [0, 17, 17, 18]
    assert tiles.first_tile_E.tolist() == [0, 2, 2, 3]
    assert tiles.group_M.tolist()[:3] == [0, 0, 2]


def test_tiles_are_high_where_rows_are_many(kernels):
    assert [kernels.height_for(n) for n in (0, 8191, 8192, 16383, 16384)] == [16, 16, 32, 32, 64]
