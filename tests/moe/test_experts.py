"""The experts layer on one process against transformers' own eager experts with W + ΔW."""

import pytest
import torch
from tiny_models import tiny_model, token_batch
from torch import nn

from coati_ext.moe import MoeExperts, expert_load, is_experts_module, reset_expert_load
from coati_ext.moe.dispatch import sort_received

FAMILIES = ["mixtral", "qwen3_moe", "deepseek_v3"]
SCALING = 1.5


def experts_of(model: nn.Module) -> tuple[str, nn.Module]:
    return next((name, module) for name, module in model.named_modules() if is_experts_module(module))


def adapted_pair(family: str, rank: int, projections=("gate_proj", "up_proj", "down_proj")):
    """Our layer with random LoRA, and transformers' eager module with the merged weights as a function of A and B."""
    torch.manual_seed(0)
    _, original = experts_of(tiny_model(family))
    _, to_shard = experts_of(tiny_model(family))
    layer = MoeExperts(to_shard.requires_grad_(False))
    layer.add_lora(list(projections), rank=rank, scaling=SCALING)
    for factors in (layer.lora_A, layer.lora_B):
        for parameter in factors.values():
            nn.init.normal_(parameter, std=0.3)
    return layer, original


def merged_forward(original: nn.Module, layer: MoeExperts, *inputs: torch.Tensor) -> torch.Tensor:
    """W + scaling·B·A per expert through transformers' eager loop; differentiable in A and B."""
    delta = {
        name: SCALING * torch.einsum("eor,eri->eoi", layer.lora_B[name], layer.lora_A[name]) for name in layer.lora_A
    }
    zeros = {name: torch.zeros(layer.num_experts, *reversed(layer.features(name))) for name in ("gate_proj", "up_proj")}
    gate_up = torch.cat([delta.get(name, zeros[name]) for name in ("gate_proj", "up_proj")], dim=1)
    weights = {
        "gate_up_proj": original.gate_up_proj.detach() + gate_up,
        "down_proj": original.down_proj.detach() + delta.get("down_proj", 0),
    }
    original.config._experts_implementation = "eager"
    return torch.func.functional_call(original, weights, inputs)


def routed_inputs(layer: MoeExperts, *, num_tokens: int, top_k: int, num_used: int):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(num_tokens, layer.down_proj.shape[1], generator=generator).requires_grad_()
    index = torch.stack([torch.randperm(num_used, generator=generator)[:top_k] for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, top_k, generator=generator).requires_grad_()
    return hidden, index, weights


def leaves_of(layer: MoeExperts, inputs: tuple) -> list[torch.Tensor]:
    return [inputs[0], inputs[2], *layer.lora_A.values(), *layer.lora_B.values()]


@pytest.mark.parametrize("in_one_function", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rank", [1, 4, 8])
@pytest.mark.parametrize("num_tokens", [1, 13])
def test_output_and_every_gradient_equal_merged_weights(family, rank, num_tokens, in_one_function):
    layer, _ = adapted_pair(family, rank)
    assert layer.parts_because(training=True) is None
    layer._is_swiglu = in_one_function  # False: the differentiable parts
    inputs = routed_inputs(layer, num_tokens=num_tokens, top_k=2, num_used=3)  # expert 3 and later get no token
    ours = layer(*inputs)
    probe = torch.randn(ours.shape, generator=torch.Generator().manual_seed(4))
    ours_grads = torch.autograd.grad(ours, leaves_of(layer, inputs), probe)

    exact_layer, original = (module.double() for module in adapted_pair(family, rank))
    exact_inputs = [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in inputs]
    merged = merged_forward(original, exact_layer, *exact_inputs)
    merged_grads = torch.autograd.grad(merged, leaves_of(exact_layer, exact_inputs), probe.double())

    torch.testing.assert_close(ours.double(), merged, rtol=1e-4, atol=1e-5)  # fp32
    for ours_grad, merged_grad in zip(ours_grads, merged_grads, strict=True):
        torch.testing.assert_close(ours_grad.double(), merged_grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("projections", [("gate_proj", "up_proj"), ("down_proj",), ()])
def test_any_part_of_the_projections_can_be_adapted(projections):
    layer, original = adapted_pair("qwen3_moe", 4, projections)
    inputs = routed_inputs(layer, num_tokens=5, top_k=3, num_used=8)
    torch.testing.assert_close(layer(*inputs), merged_forward(original, layer, *inputs), rtol=1e-4, atol=1e-5)


def test_factors_have_the_dtype_that_the_weights_were_cast_to():
    _, experts = experts_of(tiny_model("mixtral"))
    layer = MoeExperts(experts.requires_grad_(False)).to(torch.bfloat16)
    layer.add_lora(["gate_proj", "up_proj"], rank=2, scaling=1.0)
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}


def test_frozen_weights_get_no_gradient_and_a_starved_expert_gets_zeros():
    layer, _ = adapted_pair("mixtral", 4)
    layer(*routed_inputs(layer, num_tokens=6, top_k=2, num_used=3)).sum().backward()
    assert layer.gate_up_proj.grad is None and layer.down_proj.grad is None
    for factors in (layer.lora_A, layer.lora_B):
        for parameter in factors.values():
            assert not parameter.grad[3].any()
            assert all(parameter.grad[expert].any() for expert in range(3))


def test_packing_gives_memory_back_after_each_weight(monkeypatch):
    """On a GPU the next weight would be cut from what the one before has left, and keep the rest of it."""
    layer, _ = adapted_pair("mixtral", rank=2)
    moments, plain = [], {name: getattr(layer, name).data_ptr() for name in ("gate_up_proj", "down_proj")}

    def note_what_is_packed() -> None:
        moments.append([name for name, place in plain.items() if getattr(layer, name).data_ptr() != place])

    monkeypatch.setattr(torch.cuda, "empty_cache", note_what_is_packed)
    layer.pack()
    assert moments == [["gate_up_proj"], ["gate_up_proj", "down_proj"]]


def test_load_counts_every_routed_row_and_can_be_reset():
    model = tiny_model("mixtral")
    name, experts = experts_of(model)
    model.set_submodule(name, MoeExperts(experts))
    model(token_batch(2, 5))
    load = expert_load(model)[name]
    assert load.sum().item() == 2 * 5 * 2
    reset_expert_load(model)
    assert not expert_load(model)[name].any()


@pytest.mark.parametrize("attribute", ["has_bias", "is_transposed"])
def test_a_layout_that_is_not_built_is_refused_by_name(attribute):
    _, experts = experts_of(tiny_model("mixtral"))
    setattr(experts, attribute, True)
    with pytest.raises(ValueError, match=rf"layers\.0\.mlp\.experts \(MixtralExperts\) has {attribute}=True"):
        MoeExperts(experts, name="layers.0.mlp.experts")


def test_received_rows_are_sorted_by_expert_and_stay_in_rank_order():
    order, offs = sort_received(torch.tensor([[2, 0, 1], [0, 1, 2]]), 6)
    assert order.tolist() == [0, 1, 3, 2, 4, 5]
    assert offs.tolist() == [2, 3, 6]
