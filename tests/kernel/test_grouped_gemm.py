import pytest
import torch

from coati_ext.kernel.grouped_gemm import grouped_mm, grouped_mm_reference

COUNTS = [[5, 0, 3], [0, 0, 1], [7, 0, 0], [0, 0, 0]]


def operands(counts, k, n, dtype, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(counts), k, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(len(counts), n, k, generator=generator, dtype=dtype).requires_grad_()
    return x, weight, torch.tensor(counts).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("k", "n"), [(16, 8), (4, 12), (3, 5), (1, 1)])
def test_forward_and_gradients_equal_the_loop(counts, k, n):
    x, weight, offs = operands(counts, k, n, torch.float32)
    out = grouped_mm(x, weight.transpose(-2, -1), offs)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(grad)

    x64, weight64 = (t.detach().double().requires_grad_() for t in (x, weight))
    out64 = grouped_mm_reference(x64, weight64.transpose(-2, -1), offs)
    out64.backward(grad.double())
    for ours, exact in ((out, out64), (x.grad, x64.grad), (weight.grad, weight64.grad)):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)  # fp32 sums of at most 16 products


def test_gradcheck_in_float64():
    x, weight, offs = operands([2, 0, 3], 3, 4, torch.float64)
    assert torch.autograd.gradcheck(lambda a, b: grouped_mm(a, b.transpose(-2, -1), offs), (x, weight))


def test_a_frozen_weight_gets_no_gradient_and_rows_do():
    x, weight, offs = operands([2, 3], 8, 8, torch.float32)
    weight.requires_grad_(False)
    grouped_mm(x, weight, offs).sum().backward()  # .sum() hands an expanded gradient down
    assert weight.grad is None
    torch.testing.assert_close(x.grad[0], weight[0].sum(1))


def test_no_rows_leave_the_weight_in_the_graph_with_zeros():
    x, weight, offs = operands([0, 0], 8, 4, torch.float32)
    grouped_mm(x, weight.transpose(-2, -1), offs).sum().backward()
    assert weight.grad.shape == weight.shape and not weight.grad.any()


def test_rank_4_works_in_bf16_where_the_stride_rule_would_refuse_it():
    x, weight, offs = operands([3, 2], 16, 4, torch.bfloat16)
    out = grouped_mm(x, weight.transpose(-2, -1), offs)
    exact = grouped_mm_reference(x.double(), weight.double().transpose(-2, -1), offs)
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)  # bf16 has 8 bits


def test_mixed_dtypes_and_int64_offsets_are_refused():
    x, weight, offs = operands([3, 2], 16, 8, torch.float32)
    with pytest.raises(ValueError, match="bfloat16"):
        grouped_mm(x, weight.transpose(-2, -1).bfloat16(), offs)
    with pytest.raises(ValueError, match="int32"):
        grouped_mm(x, weight.transpose(-2, -1), offs.long())
