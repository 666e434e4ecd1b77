"""Each function against log_softmax in fp64, values and gradients, and gradcheck at odd sizes."""

import pytest
import torch

from coati_ext.models.log_probs import (
    linear_cross_entropy,
    linear_log_probs,
    log_probs_and_entropy,
    log_probs_of,
)


def random(*shape, seed=0, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)


def random_targets(*shape, words, seed=9):
    return torch.randint(0, words, shape, generator=torch.Generator().manual_seed(seed))


def reference(logits, targets, temperature=1.0):
    """(Log-probabilities, entropies) in fp64, differentiable."""
    whole = torch.log_softmax(logits.double() / temperature, dim=-1)
    return whole.gather(-1, targets[..., None]).squeeze(-1), -(whole.exp() * whole).sum(-1)


def head_reference(hidden, weight, bias=None, softcap=None, scale=None):
    logits = hidden.double() @ weight.double().T + (0 if bias is None else bias.double())
    logits = logits * (1 if scale is None else scale)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


# --- from logits


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk_size", [1, 4, 1000])
def test_log_probs_equal_fp64(temperature, chunk_size):
    logits, targets = random(3, 5, 37, scale=8).add_(50).requires_grad_(), random_targets(3, 5, words=37)
    log_probs, entropy = log_probs_and_entropy(logits, targets, temperature, chunk_size=chunk_size)
    exact = logits.detach().double().requires_grad_()
    expected, expected_entropy = reference(exact, targets, temperature)
    upstream = random(3, 5, seed=1)
    log_probs.backward(upstream)
    expected.backward(upstream.double())
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=0, atol=1e-5)
    # Logits around 83 (50 / 0.6) are rounded by up to 4e-6.
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=0, atol=1e-5)
    assert torch.equal(log_probs_of(logits, targets, temperature, chunk_size=chunk_size), log_probs)


def test_chunks_change_nothing():
    logits, targets = random(2, 7, 21), random_targets(2, 7, words=21)
    assert torch.equal(log_probs_of(logits, targets, chunk_size=3), log_probs_of(logits, targets, chunk_size=14))


def test_bf16_logits_are_summed_in_fp32_and_their_gradient_is_bf16():
    logits, targets = random(2, 4, 501, scale=3).bfloat16().requires_grad_(), random_targets(2, 4, words=501)
    log_probs = log_probs_of(logits, targets, chunk_size=3)
    log_probs.sum().backward()
    torch.testing.assert_close(log_probs.double(), reference(logits.detach(), targets)[0], rtol=0, atol=1e-5)
    assert log_probs.dtype == torch.float32 and logits.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("rows, words", [(0, 5), (1, 1), (1, 7), (5, 3)])
def test_gradcheck_of_logits(rows, words):
    logits, targets = random(rows, words, dtype=torch.float64).requires_grad_(), random_targets(rows, words=words)
    assert torch.autograd.gradcheck(lambda x: log_probs_of(x, targets, 0.7, chunk_size=2), logits)


def test_nothing_is_kept_in_fp32():
    logits, targets = random(1, 6, 50).bfloat16().requires_grad_(), random_targets(1, 6, words=50)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        log_probs_of(logits, targets)
    assert {tensor.dtype for tensor in kept if tensor.numel() >= logits.numel()} == {torch.bfloat16}


def test_a_word_with_probability_0_has_no_part_in_the_entropy():
    logits = torch.tensor([[0.0, -torch.inf, 0.0]]).requires_grad_()
    log_probs, entropy = log_probs_and_entropy(logits, torch.tensor([2]))
    log_probs.sum().backward()
    torch.testing.assert_close(entropy, torch.tensor([2.0]).log())
    assert logits.grad.tolist() == [[-0.5, 0.0, 0.5]]


def test_the_entropy_has_no_gradient():
    _, entropy = log_probs_and_entropy(random(2, 3, 5).requires_grad_(), random_targets(2, 3, words=5))
    assert not entropy.requires_grad


# --- from what goes into the head

VARIANTS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "bias": {"bias": random(19, seed=5)},
    "softcap": {"logit_softcap": 2.0, "temperature": 1.3},
    "scale": {"logit_scale": 0.25, "bias": random(19, seed=5)},
    "all": {"logit_scale": 1.5, "logit_softcap": 3.0, "temperature": 0.8, "bias": random(19, seed=5)},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunk_size", [1, 3, 1024])
def test_linear_log_probs_equal_fp64(variant, chunk_size):
    settings = dict(VARIANTS[variant])
    hidden, weight, targets = random(7, 13), random(19, 13, seed=1), random_targets(7, words=19)
    leaves = [hidden, weight] + ([settings["bias"].clone()] if "bias" in settings else [])
    exact = [leaf.double().requires_grad_() for leaf in leaves]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    if "bias" in settings:
        settings["bias"] = leaves[2]
    log_probs, entropy = linear_log_probs(hidden, weight, targets, chunk_size=chunk_size, **settings)
    logits = head_reference(*exact, softcap=settings.get("logit_softcap"), scale=settings.get("logit_scale"))
    expected, expected_entropy = reference(logits, targets, settings.get("temperature", 1.0))
    upstream = random(7, seed=2)
    log_probs.backward(upstream)
    expected.backward(upstream.double())
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=0, atol=1e-5)
    for leaf, exact_leaf in zip(leaves, exact, strict=True):
        torch.testing.assert_close(leaf.grad.double(), exact_leaf.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows, width, words", [(0, 3, 5), (1, 1, 1), (1, 3, 7), (5, 2, 3)])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_gradcheck_of_the_head(rows, width, words, softcap):
    hidden, weight, bias = (
        random(*shape, seed=seed, dtype=torch.float64).requires_grad_()
        for seed, shape in enumerate([(rows, width), (words, width), (words,)])
    )
    targets = random_targets(rows, words=words)

    def function(hidden, weight, bias):
        settings = {"logit_softcap": softcap, "logit_scale": 0.5, "temperature": 0.7}
        return linear_log_probs(hidden, weight, targets, bias=bias, chunk_size=2, **settings)[0]

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


def test_chunked_heads_differ_by_rounding_only():
    hidden, weight, targets = random(33, 8), random(41, 8, seed=1), random_targets(33, words=41)
    results = []
    for chunk_size in (1, 5, 33):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        log_probs, _ = linear_log_probs(*leaves, targets, chunk_size=chunk_size)
        log_probs.square().sum().backward()
        results.append([log_probs.detach(), *(leaf.grad for leaf in leaves)])
    for other in results[1:]:
        for found, expected in zip(other, results[0], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, targets = random(4, 8).requires_grad_(), random(9, 8, seed=1), random_targets(4, words=9)
    log_probs, _ = linear_log_probs(hidden, weight, targets, chunk_size=3)
    log_probs.sum().backward()
    assert weight.grad is None and hidden.grad.abs().sum() > 0


def test_a_frozen_input_trains_the_head():
    hidden, weight, targets = random(4, 8), random(9, 8, seed=1).requires_grad_(), random_targets(4, words=9)
    linear_log_probs(hidden, weight, targets)[0].sum().backward()
    assert hidden.grad is None and weight.grad.abs().sum() > 0


def test_logits_of_all_rows_never_exist():
    rows, words, chunk_size = 64, 100, 4
    hidden, weight = random(rows, 3).requires_grad_(), random(words, 3, seed=1).requires_grad_()
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            sizes.extend(leaf.numel() for leaf in torch.utils._pytree.tree_leaves(result) if torch.is_tensor(leaf))
            return result

    with Watch():
        log_probs, _ = linear_log_probs(hidden, weight, random_targets(rows, words=words), chunk_size=chunk_size)
        log_probs.sum().backward()
    assert max(sizes) == chunk_size * words  # 3 * words and 3 * rows are smaller


def test_bf16_products_are_kept_in_fp32():
    hidden, weight, targets = random(6, 16).bfloat16(), random(31, 16, seed=1).bfloat16(), random_targets(6, words=31)
    hidden.requires_grad_(), weight.requires_grad_()
    log_probs, entropy = linear_log_probs(hidden, weight, targets, chunk_size=4)
    log_probs.sum().backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected, expected_entropy = reference(head_reference(*exact), targets)
    expected.sum().backward()
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=0, atol=1e-5)
    for found, wanted in zip((hidden, weight), exact, strict=True):
        assert found.grad.dtype == torch.bfloat16
        # The gradient of the products is rounded to bf16 (2**-9) once, as is the result.
        torch.testing.assert_close(found.grad.double(), wanted.grad, rtol=1e-2, atol=1e-2)


# --- cross-entropy


def test_cross_entropy_equals_torch_and_skips_what_is_ignored():
    hidden, weight = random(9, 5), random(11, 5, seed=1)
    targets = random_targets(9, words=11)
    targets[[0, 4, 8]] = -100
    leaves, exact = (
        [hidden.requires_grad_(), weight.requires_grad_()],
        [hidden.detach().double(), weight.detach().double()],
    )
    exact = [leaf.requires_grad_() for leaf in exact]
    loss = linear_cross_entropy(*leaves, targets, chunk_size=4)
    expected = torch.nn.functional.cross_entropy(exact[0] @ exact[1].T, targets, ignore_index=-100, reduction="sum")
    (loss / 6).backward()
    (expected / 6).backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    for leaf, exact_leaf in zip(leaves, exact, strict=True):
        torch.testing.assert_close(leaf.grad.double(), exact_leaf.grad, rtol=1e-5, atol=1e-6)
    assert not hidden.grad[[0, 4, 8]].any()


def test_cross_entropy_of_nothing_is_zero_and_stays_in_the_graph():
    hidden, weight = random(3, 5).requires_grad_(), random(7, 5, seed=1).requires_grad_()
    loss = linear_cross_entropy(hidden, weight, torch.full((3,), -100))
    loss.backward()
    assert loss.item() == 0 and not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("variant", ["plain", "bias", "softcap", "scale"])
@pytest.mark.parametrize("chunk_size", [1, 3, 1024])
def test_cross_entropy_of_every_kind_of_head_equals_fp64(variant, chunk_size):
    settings = {name: value for name, value in VARIANTS[variant].items() if name != "temperature"}
    leaves = [random(7, 13), random(19, 13, seed=1), *([settings["bias"].clone()] if "bias" in settings else [])]
    exact = [leaf.double().requires_grad_() for leaf in leaves]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    if "bias" in settings:
        settings["bias"] = leaves[2]
    targets = random_targets(7, words=19)
    loss = linear_cross_entropy(*leaves[:2], targets, chunk_size=chunk_size, **settings)
    logits = head_reference(*exact, softcap=settings.get("logit_softcap"), scale=settings.get("logit_scale"))
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    (loss * 0.3).backward()
    (expected * 0.3).backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    for leaf, exact_leaf in zip(leaves, exact, strict=True):
        torch.testing.assert_close(leaf.grad.double(), exact_leaf.grad, rtol=1e-5, atol=1e-6)


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts matrix products."""

    num = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.num += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("frozen", "products_of_a_chunk"), [(True, 2), (False, 3)])
def test_cross_entropy_makes_no_product_twice(frozen, products_of_a_chunk):
    hidden, weight = random(6, 5).requires_grad_(), random(11, 5, seed=1).requires_grad_(not frozen)
    with Products() as counted:
        linear_cross_entropy(hidden, weight, random_targets(6, words=11), chunk_size=3).backward()
    assert counted.num == 2 * products_of_a_chunk


def test_cross_entropy_without_a_backward_makes_the_logits_alone():
    hidden, weight = random(6, 5).requires_grad_(), random(11, 5, seed=1).requires_grad_()
    with torch.no_grad(), Products() as counted:
        linear_cross_entropy(hidden, weight, random_targets(6, words=11), chunk_size=3)
    assert counted.num == 2


def test_the_factor_of_bf16_gradients_is_not_rounded_to_bf16():
    hidden, weight = random(40, 64).bfloat16().requires_grad_(), random(31, 64, seed=1).bfloat16().requires_grad_()
    loss = linear_cross_entropy(hidden, weight, random_targets(40, words=31), chunk_size=17)
    factor = 1.0035  # between 1 and 1.0078, which are neighbours
    for leaf in (hidden, weight):
        once, scaled = (torch.autograd.grad(loss * f, leaf, retain_graph=True)[0] for f in (1.0, factor))
        assert once.dtype == scaled.dtype == torch.bfloat16
        ratio = (once.double() * scaled.double()).sum() / once.double().square().sum()
        assert abs(ratio - factor) < 1e-3  # what rounding of each element leaves in the mean


def test_small_gradients_of_fp16_are_rounded_after_the_loss_scale():
    hidden, weight = torch.ones(1, 4).half(), torch.zeros(7, 4).half()
    weight[3] = 4.5  # the others have a probability of 1.5e-8, which is 0 in fp16
    weight.requires_grad_()
    (linear_cross_entropy(hidden, weight, torch.tensor([3])) * 65536).backward()
    expected = torch.tensor([0.0] * 6 + [18.0], dtype=torch.float64).softmax(0)[0] * 65536
    torch.testing.assert_close(weight.grad[0].double(), expected.expand(4), rtol=1e-3, atol=0)


def test_cross_entropy_can_be_differentiated_again():
    hidden = random(6, 5).requires_grad_()
    loss = linear_cross_entropy(hidden, random(11, 5, seed=1), random_targets(6, words=11))
    once, again = (torch.autograd.grad(loss * 3, hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(once, again) and once.any()


@pytest.mark.parametrize("target", [-1, 7])
def test_a_target_that_is_no_word_gives_no_number(target):
    hidden, weight = random(2, 5), random(7, 5, seed=1)
    log_probs, _ = linear_log_probs(hidden, weight, torch.tensor([0, target]))
    assert log_probs.isnan().tolist() == [False, True]
    assert linear_cross_entropy(hidden, weight, torch.tensor([0, target])).isnan()


# --- refusals


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"temperature": 0.0}, "temperature must be above 0, got 0.0"),
        ({"temperature": float("nan")}, "temperature must be above 0"),
        ({"logit_softcap": -1.0}, "softcap must be above 0"),
        ({"logit_scale": 0.0}, "scale must be above 0"),
        ({"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
        ({"bias": torch.zeros(4)}, r"bias \(4,\)"),
    ],
)
def test_the_head_refuses(settings, said):
    with pytest.raises(ValueError, match=said):
        linear_log_probs(torch.zeros(2, 3), torch.zeros(5, 3), torch.zeros(2, dtype=torch.long), **settings)


def test_shapes_and_dtypes_that_do_not_fit_are_refused():
    targets = torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match=r"hidden \(2, 4\), weight \(5, 3\)"):
        linear_log_probs(torch.zeros(2, 4), torch.zeros(5, 3), targets)
    with pytest.raises(ValueError, match=r"targets \(2,\)"):
        linear_cross_entropy(torch.zeros(3, 3), torch.zeros(5, 3), targets)
    with pytest.raises(ValueError, match=r"hidden is torch.float32 but weight is torch.bfloat16"):
        linear_log_probs(torch.zeros(2, 3), torch.zeros(5, 3).bfloat16(), targets)
    with pytest.raises(ValueError, match=r"logits \(2, 3, 5\) and targets \(2,\) do not fit"):
        log_probs_of(torch.zeros(2, 3, 5), targets)
