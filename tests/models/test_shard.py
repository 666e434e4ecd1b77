"""A decoder cut into pipeline stages computes what the whole computes; what cannot be cut is refused by name."""

import pytest
import torch
import transformers
from tiny_models import CONFIGS, tiny_model, token_batch
from torch import nn

from coati_ext.models.shard import PassThrough, shard_decoder, stage_forward
from coati_ext.moe.experts import shard_experts
from coati_ext.utils.preflight import MOE_FAMILIES

SUPPORTED = [name for name in CONFIGS if name == "llama" or CONFIGS[name]().model_type in MOE_FAMILIES]
SUPPORTED.remove("glm_moe_dsa")  # its layers hand on more than hidden states
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=96)


def through_stages(family: str, layers_per_stage: tuple[int, ...], batch: dict) -> torch.Tensor:
    message, last = None, len(layers_per_stage) - 1
    for stage in range(len(layers_per_stage)):
        part = tiny_model(family)
        shard_decoder(part, layers_per_stage=layers_per_stage, stage=stage)
        hidden = message["hidden_states"] if message else None
        message = stage_forward(part, is_first=stage == 0, is_last=stage == last, hidden_states=hidden, **batch)
    return message.logits


@pytest.mark.parametrize("family", SUPPORTED)
def test_stages_compute_what_the_whole_model_does(family):
    model, ids = tiny_model(family), token_batch(2, 7)
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    num_layers = model.config.num_hidden_layers
    shard_experts(model)  # the experts of stages add up in their order
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits
        logits = through_stages(family, (1, num_layers - 1), batch)
    assert torch.equal(logits, expected)


def test_a_stage_has_its_layers_and_nothing_of_the_others():
    model = tiny_model("deepseek_v3")
    shard_decoder(model, layers_per_stage=(1, 2), stage=1)
    base = model.model
    assert [isinstance(layer, PassThrough) for layer in base.layers] == [True, False, False]
    assert isinstance(base.embed_tokens, PassThrough) and not isinstance(base.norm, PassThrough)
    assert all(
        name.startswith(("model.layers.1.", "model.layers.2.", "model.norm", "lm_head"))
        for name, _ in model.named_parameters()
    )


def test_it_works_on_the_meta_device_and_a_second_time_does_nothing():
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS["mixtral"]())
    for module in model.modules():  # as build_meta_model leaves them
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros(buffer.shape))
    shard_decoder(model, layers_per_stage=(1, 1), stage=0)
    names = [name for name, _ in model.named_parameters()]
    shard_decoder(model, layers_per_stage=(1, 1), stage=1)
    assert [name for name, _ in model.named_parameters()] == names and model.structure.num_parameters > 0
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.GraniteConfig(**SIZES, intermediate_size=48, embedding_multiplier=2.0), "GraniteModel does more"),
        (transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=96), "GPT2Model has no embed_tokens"),
        (CONFIGS["glm_moe_dsa"](), "GlmMoeDsaModel does more with its hidden states"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(config, message):
    model = transformers.AutoModelForCausalLM.from_config(config)
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        shard_decoder(model, layers_per_stage=(1, config.num_hidden_layers - 1), stage=0)
    assert [type(module) for module in model.modules()] == before  # as it was


def test_a_plan_that_leaves_parameters_out_is_refused():
    model = tiny_model("llama")
    model.model.extra = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"extra.weight of LlamaModel is on no stage"):
        shard_decoder(model, layers_per_stage=(1, 1), stage=0)
