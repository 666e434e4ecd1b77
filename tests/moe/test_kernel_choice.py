"""The line that tells which kernels the experts go through."""

import pytest
import torch
from tiny_models import tiny_model

from coati_ext.moe import kernel_choice
from coati_ext.moe.experts import MoeExperts, shard_experts
from coati_ext.moe.kernel_choice import describe_kernels


def experts_of(model) -> list[MoeExperts]:
    return [module for module in model.modules() if isinstance(module, MoeExperts)]


@pytest.fixture
def model():
    model = tiny_model("mixtral")
    shard_experts(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def test_on_a_cpu_it_is_torch(model):
    assert describe_kernels(model).startswith("experts: plain torch, float32 on the CPU (")


CHANGES = {
    "is not SwiGLU": lambda experts: setattr(experts, "_is_swiglu", False),
    "has dropout": lambda experts: experts.add_lora(["down_proj"], rank=2, scaling=1.0, dropout=0.1),
    "are trained": lambda experts: experts.down_proj.requires_grad_(True),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_what_keeps_experts_from_the_kernels_is_named(model, reason, monkeypatch):
    monkeypatch.setattr(kernel_choice, "has_kernels", lambda rows: rows.dtype == torch.float32)
    assert "experts: Triton kernels" in describe_kernels(model)
    CHANGES[reason](experts_of(model)[0])
    found = describe_kernels(model.eval())
    assert "Triton" not in found and found.endswith(reason)


def test_how_fp8_weights_are_multiplied_is_told(model, monkeypatch):
    for experts in experts_of(model):
        experts.keep_fp8("gate_up_proj")
        experts.keep_fp8("down_proj")
    assert describe_kernels(model).endswith("; FP8 weights dequantised into a copy for each product")
    monkeypatch.setattr(kernel_choice, "has_fp8_kernels", lambda rows, weight, num_parts=1: True)
    assert describe_kernels(model).endswith("; FP8 weights dequantised inside their products")
