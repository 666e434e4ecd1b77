"""A linear layer with an FP8 weight, by a copy and by the kernel for few rows, against its dequantised weight."""

import pytest
import torch
from interpreted import interpreted
from torch import nn

from coati_ext.kernel import fp8_gemm
from coati_ext.kernel.fp8_cast import dequantize_fp8, quantize_fp8
from coati_ext.kernel.fp8_gemm import dequantize_rows
from coati_ext.models import fp8_linear
from coati_ext.models.fp8_linear import Fp8Linear


@pytest.fixture(params=["copy", "kernel"])
def path(request, monkeypatch):
    if request.param == "kernel":
        modules = __import__("sys").modules
        for name in ("moe_rows_triton", "fp8_gemm_triton", "fp8_rows_triton"):
            monkeypatch.setitem(modules, f"coati_ext.kernel.{name}", interpreted(name))
        monkeypatch.setattr(fp8_gemm.moe_rows, "has_kernels", lambda tensor: True)
        monkeypatch.setattr(fp8_gemm, "_is_hopper", lambda device: True)

        def forbidden(*args, **kwargs):
            raise AssertionError("a forward of few rows made a copy of the weight")

        monkeypatch.setattr(fp8_linear.F, "linear", forbidden)
    return request.param


def layer_of(width_in: int, width_out: int, *, bias: bool) -> tuple[Fp8Linear, torch.Tensor]:
    """The layer in fp16, and its dequantised weight."""
    torch.manual_seed(0)
    layer = Fp8Linear(nn.Linear(width_in, width_out, bias=bias, dtype=torch.float16))
    values, scales = quantize_fp8(torch.randn(width_out, width_in))
    layer.weight.data, layer.weight_scale_inv.data = values, scales
    return layer, dequantize_fp8(values, scales, dtype=torch.float32)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (2, 9), (7,)])
def test_output_and_gradients_are_those_of_the_dequantised_weight(path, shape, bias):
    layer, weight = layer_of(160, 72, bias=bias)
    x = torch.randn(*shape, 160).half().requires_grad_()
    out = layer(x)
    exact = x.detach().float() @ weight.T + (layer.bias.detach().float() if bias else 0)
    assert out.shape == (*shape, 72)
    assert (out.float() - exact).norm() <= 2e-3 * exact.norm()
    probe = torch.randn_like(out)
    wanted = probe.float() @ weight
    grads = torch.autograd.grad(out, [x, layer.bias] if bias else [x], probe)
    assert (grads[0].float() - wanted).norm() <= 2e-3 * wanted.norm()
    if bias:
        torch.testing.assert_close(grads[1].float(), probe.float().flatten(0, -2).sum(0), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("shape", [(1, 1), (2, 9)])
def test_fp8_products_are_of_rows_rounded_to_fp8_and_gradients_as_without(path, shape):
    layer, weight = layer_of(160, 72, bias=True)
    layer.fp8_compute = True
    x = torch.randn(*shape, 160).half().requires_grad_()
    out = layer(x)
    codes, scales = fp8_gemm.quantize_rows(x.detach().flatten(0, -2))
    rounded = dequantize_rows(codes, scales, dtype=torch.float32)
    exact = (rounded @ weight.T + layer.bias.detach().float()).view(*shape, 72)
    assert (out.float() - exact).norm() <= 2e-3 * exact.norm()
    probe = torch.randn_like(out)
    wanted = probe.float() @ weight
    (grad,) = torch.autograd.grad(out, [x], probe)
    assert (grad.float() - wanted).norm() <= 2e-3 * wanted.norm()


@pytest.mark.parametrize("fp8_compute", [False, True])
def test_no_rows_are_no_rows(monkeypatch, fp8_compute):
    layer, _ = layer_of(160, 72, bias=True)
    layer.fp8_compute = fp8_compute
    monkeypatch.setattr(fp8_linear, "has_fp8_kernels", lambda x, weight: True)
    assert layer(torch.zeros(0, 160).half()).shape == (0, 72)
