"""torch.compile around the experts: numbers, names and routing stay what they are without it."""

import pytest
import torch
from peft import LoraConfig
from tiny_models import tiny_model, token_batch

from coati_ext.models.compiled import compile_layers
from coati_ext.models.fp8_linear import Fp8Linear
from coati_ext.models.lora import inject_lora
from coati_ext.models.recompute import enable_recompute

BACKEND = "aot_eager"  # all of torch.compile but its code: Inductor's for CPUs needs a C++ compiler


def adapted(family: str) -> torch.nn.Module:
    model = tiny_model(family).train()
    enable_recompute(model)
    inject_lora(model, LoraConfig(r=4, lora_alpha=8, target_modules=["all"]))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1, generator=generator)
    return model


def gradients(model: torch.nn.Module, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    ids = token_batch(*shape)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.requires_grad}}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Within rounding in fp32, of each tensor's norm: a compiled graph adds up in another order."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 1e-5 * tensor.norm(), name


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "llama"])
def test_losses_and_gradients_of_every_shape_are_the_same(family):
    torch._dynamo.reset()
    plain, compiled = adapted(family), adapted(family)
    assert compile_layers(compiled, backend=BACKEND) >= 3 * len(compiled.base_model.layers)
    torch._dynamo.utils.counters.clear()
    for shape in ((2, 9), (1, 14), (3, 5)):
        expected, found = gradients(plain, shape), gradients(compiled, shape)
        assert_same(found, expected)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] >= 2 and not counters["graph_break"]


def test_experts_and_what_chooses_them_are_left_alone():
    model = adapted("deepseek_v3")
    compile_layers(model, backend=BACKEND)
    inside = {n for n, m in model.base_model.layers[-1].named_modules() if "forward" in vars(m)}
    assert inside == {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp.shared_experts"}


def test_fp8_layers_go_uncompiled_within_compiled_ones():
    torch._dynamo.reset()
    model = adapted("llama")
    layer = model.base_model.layers[0].self_attn.o_proj
    layer.base_layer = Fp8Linear(layer.base_layer)
    layer.base_layer.weight.data.view(torch.uint8).fill_(64)
    layer.base_layer.weight_scale_inv.data.fill_(0.01)
    expected = gradients(model, (2, 9))
    compile_layers(model, backend=BACKEND)
    found = gradients(model, (2, 9))
    assert_same(found, expected)


def test_a_model_without_layers_is_refused():
    model = tiny_model("llama")
    model.model.layers = torch.nn.Identity()
    with pytest.raises(ValueError, match="--torch_compile: LlamaForCausalLM has no list of decoder layers"):
        compile_layers(model)
