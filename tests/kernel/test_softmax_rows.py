"""The passes of a softmax over rows: torch's and the interpreted kernels, against fp64."""

import pytest
import torch
from interpreted import interpreted

from coati_ext.kernel import softmax_rows as module
from coati_ext.kernel.softmax_rows import softmax_gradient, softmax_sums

BLOCK = 8  # few words, for the interpreter


@pytest.fixture(params=["torch", "triton"])
def path(request, monkeypatch):
    if request.param == "triton":
        kernels = interpreted("softmax_rows_triton")
        monkeypatch.setattr(module, "on_triton", lambda device: True)
        monkeypatch.setitem(__import__("sys").modules, "coati_ext.kernel.softmax_rows_triton", kernels)
        monkeypatch.setattr(kernels, "BLOCK", BLOCK)
    return request.param


def rows(num_rows, num_words):
    """Logits around 50, and targets, of which the first is not here where there are two."""
    generator = torch.Generator().manual_seed(num_words)
    logits = torch.randn(num_rows, num_words, generator=generator) * 8 + 50
    targets = torch.randint(num_words, (num_rows,), generator=generator)
    targets[: num_rows // 2] = -3
    targets[1 : num_rows // 2] = num_words
    return logits, targets


SIZES = [(1, 1), (2, 7), (3, 8), (5, 21)]  # of one block, less and more


@pytest.mark.parametrize(("num_rows", "num_words"), SIZES)
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_equal_fp64(path, num_rows, num_words, weighted):
    logits, targets = rows(num_rows, num_words)
    sums = softmax_sums(logits.clone(), targets, weighted=weighted)
    below = logits.double() - logits.double().amax(-1, keepdim=True)
    here = (targets >= 0) & (targets < num_words)
    assert torch.equal(sums.max_C, logits.amax(-1))
    torch.testing.assert_close(sums.sum_C.double(), below.exp().sum(-1), rtol=1e-6, atol=0)
    assert torch.equal(sums.target_C, logits.gather(-1, targets.where(here, 0)[:, None])[:, 0].where(here, 0))
    if weighted:
        torch.testing.assert_close(sums.weighted_C.double(), (below.exp() * below).sum(-1), rtol=1e-5, atol=1e-6)
    else:
        assert sums.weighted_C is None


@pytest.mark.parametrize(("num_rows", "num_words"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_equals_fp64(path, num_rows, num_words, dtype):
    logits, targets = rows(num_rows, num_words)
    grad = torch.randn(num_rows, generator=torch.Generator().manual_seed(1))
    exact = logits.double()
    expected = -exact.softmax(-1) * grad.double()[:, None]
    for row, target in enumerate(targets.tolist()):
        if 0 <= target < num_words:
            expected[row, target] += grad[row]
    sums = softmax_sums(logits.clone(), targets, weighted=False)
    found = softmax_gradient(logits, sums.max_C, sums.sum_C.log(), targets, grad, dtype)
    assert found.dtype == dtype
    # Logits around 80 are known to 4e-6; the interpreter does not round to bf16 but cuts off.
    rounding = 2**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), expected, rtol=rounding, atol=1e-6)


def test_a_word_without_probability_adds_nothing(path):
    logits = torch.zeros(1, 20)
    logits[0, :9], logits[0, 12] = -torch.inf, -torch.inf  # a whole block, and one among others
    sums = softmax_sums(logits.clone(), torch.tensor([10]), weighted=True)
    assert (sums.max_C.item(), sums.sum_C.item(), sums.weighted_C.item()) == (0, 10, 0)
    found = softmax_gradient(logits, sums.max_C, sums.sum_C.log(), torch.tensor([10]), torch.ones(1), torch.float32)
    torch.testing.assert_close(found[0, 9:12], torch.tensor([-0.1, 0.9, -0.1]))
    assert not found[0, :9].any() and found[0, 12] == 0


def test_a_logit_that_is_no_number_makes_the_sum_none(path):
    logits = torch.zeros(2, 20)
    logits[1, 3] = torch.nan
    sums = softmax_sums(logits, torch.tensor([0, 0]), weighted=False)
    assert sums.sum_C.isnan().tolist() == [False, True]
