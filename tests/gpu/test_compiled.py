"""torch.compile by Inductor around the experts: gradients in fp32 are those without it."""

import pytest
import torch
from peft import LoraConfig
from tiny_models import tiny_model, token_batch

from coati_ext.models.compiled import compile_layers
from coati_ext.models.lora import inject_lora
from coati_ext.models.recompute import enable_recompute

pytestmark = pytest.mark.gpu


def gradients(family: str, compiled: bool) -> list[torch.Tensor]:
    model = tiny_model(family).cuda().train()
    enable_recompute(model)
    inject_lora(model, LoraConfig(r=4, lora_alpha=8, target_modules=["all"]))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 10)
    if compiled:
        compile_layers(model)
    found = []
    for shape in ((2, 9), (1, 14), (3, 5)):
        ids = token_batch(*shape).cuda()
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        found += [p.grad for p in model.parameters() if p.requires_grad]
    return found


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_gradients_of_every_shape_are_the_same(family):
    torch._dynamo.reset()
    for found, expected in zip(gradients(family, True), gradients(family, False), strict=True):
        assert (found - expected).norm() <= 1e-4 * expected.norm()  # Triton's tiles add up in another order
