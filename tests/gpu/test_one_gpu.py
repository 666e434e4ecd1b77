"""What only a GPU can show: bf16 and fp16 kernels, and a training step in the precision that users train in."""

import pytest
import torch
from distributed import pool
from parity import reference, run_layout

from coati_ext.kernel.grouped_gemm import grouped_mm, grouped_mm_reference

pytestmark = pytest.mark.gpu

EPSILON = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-23}


def relative_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours.double() - exact).norm() / exact.norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("counts", [[300, 0, 17, 1], [0, 0, 0, 5], [0, 0, 0, 0]])
@pytest.mark.parametrize(("k", "n"), [(256, 384), (256, 4), (4, 256), (72, 40)])
def test_grouped_mm_forward_and_gradients(dtype, counts, k, n):
    torch.manual_seed(0)
    x = torch.randn(sum(counts), k, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(len(counts), n, k, device="cuda", dtype=dtype, requires_grad=True)
    offs = torch.tensor(counts, device="cuda").cumsum(0, dtype=torch.int32)
    out = grouped_mm(x, weight.transpose(-2, -1), offs)
    probe = torch.randn_like(out)
    out.backward(probe)

    x64, weight64 = (t.detach().double().requires_grad_() for t in (x, weight))
    out64 = grouped_mm_reference(x64, weight64.transpose(-2, -1), offs)
    out64.backward(probe.double())
    for ours, exact in ((out, out64), (x.grad, x64.grad), (weight.grad, weight64.grad)):
        assert ours.shape == exact.shape
        assert relative_error(ours, exact) <= 4 * EPSILON[dtype]  # one rounding of the output, fp32 accumulation


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_a_bf16_step_is_the_fp32_step_within_bf16_noise(family):
    losses, norms, grads = reference(family, ["all"], num_used=None)
    ((ours, ours_norms, ours_grads),) = pool(1, "cuda").run(run_bf16, family, 1)
    assert ours == pytest.approx(losses, rel=2e-2)
    assert ours_norms == pytest.approx(norms, rel=5e-2)
    assert ours_grads.keys() == grads.keys()


def test_an_fp32_step_on_the_gpu_equals_the_cpu():
    losses, _, grads = reference("mixtral", ["all"], num_used=3)
    ((ours, _, ours_grads),) = pool(1, "cuda").run(run_fp32, "mixtral", 1)
    assert ours == pytest.approx(losses, rel=1e-5)
    assert max(relative_error(ours_grads[name], grads[name].double()) for name in grads) <= 1e-4


def test_fp16_steps_report_the_unscaled_gradient_norm():
    """The loss scale starts at 65536 and halves at each overflow; a skipped step has no norm."""
    losses, norms, _ = reference("mixtral", ["all"], num_used=None)
    ((ours, ours_norms, _),) = pool(1, "cuda").run(run_fp16, "mixtral", 8)
    assert ours == pytest.approx(losses * 8, rel=1e-2)
    assert ours_norms[-1] == pytest.approx(norms[0], rel=2e-2)
    assert all(norm is None or norm == pytest.approx(norms[0], rel=2e-2) for norm in ours_norms)


def run_fp16(family: str, steps: int):
    return run_layout(family, ["all"], 1, 2, precision="fp16", steps=steps)


def run_bf16(family: str, ep: int):
    return run_layout(family, ["all"], ep, 2, precision="bf16")


def run_fp32(family: str, ep: int):
    return run_layout(family, ["all"], ep, 2, num_used=3)


def test_fp16_norms_are_right_while_the_loss_scale_grows():
    """colossalai divides by the scale that it has just raised, which halves the norm and the step."""
    _, exact, _ = reference("deepseek_v3", ["mlp"], num_used=None, steps=4)
    settings = {"growth_interval": 1, "initial_scale": 16.0}
    ((_, norms, _),) = pool(1, "cuda").run(fp16_steps, settings)
    assert norms == pytest.approx(exact, rel=3e-2)  # fp16 rounding; each step doubles the scale


def fp16_steps(plugin_kwargs: dict):
    return run_layout("deepseek_v3", ["mlp"], 1, 1, steps=4, precision="fp16", plugin_kwargs=plugin_kwargs)
