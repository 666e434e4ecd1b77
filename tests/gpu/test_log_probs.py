"""Log-probabilities on a GPU: bf16 products with fp32 results, equal to fp64, in the memory of a chunk of logits."""

import pytest
import torch

from coati_ext.models.log_probs import linear_cross_entropy, linear_log_probs, log_probs_of

pytestmark = pytest.mark.gpu

ROWS, WIDTH, WORDS = 1000, 256, 5003  # neither rows nor words are a multiple of anything


def inputs(dtype):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator).to(dtype)
    weight = (torch.randn(WORDS, WIDTH, generator=generator) / 8).to(dtype)
    targets = torch.randint(0, WORDS, (ROWS,), generator=generator)
    return hidden.cuda(), weight.cuda(), targets.cuda(), torch.randn(ROWS, generator=generator).cuda()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk_size", [300, 4096])
def test_values_and_gradients_equal_fp64(dtype, chunk_size):
    hidden, weight, targets, upstream = inputs(dtype)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    log_probs, entropy = linear_log_probs(*leaves, targets, temperature=0.8, chunk_size=chunk_size)
    log_probs.backward(upstream)
    whole = torch.log_softmax(exact[0] @ exact[1].T / 0.8, dim=-1)
    expected = whole.gather(-1, targets[:, None]).squeeze(-1)
    expected.backward(upstream.double())
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=2e-5)  # sums of 256 products in fp32
    torch.testing.assert_close(entropy.double(), -(whole.exp() * whole).sum(-1), rtol=0, atol=2e-5)
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    for leaf, exact_leaf in zip(leaves, exact, strict=True):
        scale = exact_leaf.grad.abs().max().item()
        torch.testing.assert_close(leaf.grad.double(), exact_leaf.grad, rtol=0, atol=rounding * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("settings", [{}, {"logit_softcap": 3.0, "logit_scale": 0.5}])
def test_cross_entropy_and_its_gradients_equal_fp64(dtype, settings):
    hidden, weight, targets, _ = inputs(dtype)
    targets[::7] = -100
    bias = torch.linspace(-1, 1, WORDS, device="cuda").to(dtype)
    leaves = [leaf.requires_grad_() for leaf in (hidden, weight, bias)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    loss = linear_cross_entropy(*leaves[:2], targets, bias=bias, chunk_size=300, **settings)
    logits = (exact[0] @ exact[1].T + exact[2]) * settings.get("logit_scale", 1)
    logits = 3 * torch.tanh(logits / 3) if settings else logits
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    (loss / 100).backward()
    (expected / 100).backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    # The gradient of the products is rounded, and the result: twice for bf16, which has its factor last.
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    for leaf, exact_leaf in zip(leaves, exact, strict=True):
        scale = exact_leaf.grad.abs().max().item()
        torch.testing.assert_close(leaf.grad.double(), exact_leaf.grad, rtol=0, atol=rounding * scale)


def test_from_logits_and_from_hidden_are_the_same():
    hidden, weight, targets, _ = inputs(torch.float32)
    from_logits = log_probs_of(hidden @ weight.T, targets, 0.8, chunk_size=300)
    torch.testing.assert_close(linear_log_probs(hidden, weight, targets, temperature=0.8)[0], from_logits)
    losses = linear_cross_entropy(hidden, weight, targets, chunk_size=300)
    torch.testing.assert_close(losses, torch.nn.functional.cross_entropy(hidden @ weight.T, targets, reduction="sum"))


@pytest.mark.parametrize("of", ["log_probs", "cross_entropy"])
def test_memory_is_that_of_a_chunk(of):
    hidden, weight, targets, upstream = inputs(torch.bfloat16)
    hidden.requires_grad_()

    def step() -> None:
        if of == "log_probs":
            linear_log_probs(hidden, weight, targets, chunk_size=50)[0].backward(upstream)
        else:
            linear_cross_entropy(hidden, weight, targets, chunk_size=50).backward()

    step()  # what libraries keep
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    chunk = 50 * WORDS * 4
    # fp32 logits, and their gradient in bf16; of the hidden states a copy, the gradient, and it times its factor.
    assert torch.cuda.max_memory_allocated() - before < 2 * chunk + 5 * hidden.nbytes < ROWS * WORDS * 4 / 2
