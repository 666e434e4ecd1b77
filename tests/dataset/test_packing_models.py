"""What models compute on packed rows is what they compute unpacked, and models that mix samples are refused."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
import transformers
from distributed import pool
from packed_samples import MAX_LENGTH, make_samples, pieces
from tiny_models import CONFIGS, VOCAB, tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from coati_ext.dataset.collator import ConversationCollator
from coati_ext.dataset.packing import PackedCollator, check_packing_supported, model_inputs
from coati_ext.models.loss import num_supervised_tokens
from coati_ext.utils.preflight import MOE_FAMILIES

DECODER = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
MOE = dict(moe_intermediate_size=24, num_experts_per_tok=2, norm_topk_prob=True)
MLA = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
GROUPED = dict(n_routed_experts=8, n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1)

# Family -> (config class, what it needs besides DECODER). Windows of 4 are shorter than most samples.
FAMILIES = {
    "qwen2": ("Qwen2Config", {}),
    "qwen2_windows": (
        "Qwen2Config",
        dict(use_sliding_window=True, sliding_window=4, layer_types=["full_attention", "sliding_attention"]),
    ),
    "qwen3": ("Qwen3Config", dict(head_dim=8)),
    "qwen2_moe": ("Qwen2MoeConfig", dict(MOE, num_experts=4, shared_expert_intermediate_size=24)),
    "olmoe": ("OlmoeConfig", dict(num_experts=4, num_experts_per_tok=2)),
    "glm4_moe": ("Glm4MoeConfig", dict(MOE, **GROUPED, head_dim=8)),
    "deepseek_v2": ("DeepseekV2Config", dict(MOE, **MLA, **GROUPED, num_key_value_heads=4)),
    "gpt_oss": ("GptOssConfig", dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=4)),
    "qwen3_next": (
        "Qwen3NextConfig",
        dict(
            MOE,
            head_dim=8,
            num_experts=4,
            shared_expert_intermediate_size=24,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            layer_types=["linear_attention", "full_attention"],
        ),
    ),
    "lfm2": ("Lfm2Config", dict(layer_types=["full_attention", "conv"])),
    "opt": ("OPTConfig", dict(ffn_dim=48, word_embed_proj_dim=32)),
    "bloom": ("BloomConfig", dict(n_layer=2, n_head=4)),
}
# MoE families that train here but whose layers or masks let packed samples see each other
MIXING = {"afmoe", "minimax", "qwen3_next"}
SUPPORTED = [name for name in CONFIGS if name == "llama" or CONFIGS[name]().model_type in MOE_FAMILIES]
PACKABLE = [*(name for name in SUPPORTED if name not in MIXING), "qwen2", "qwen2_windows", "qwen3"]


def family_model(family: str, attention: str = "sdpa", **kwargs) -> PreTrainedModel:
    if family in CONFIGS:
        model = tiny_model(family, **kwargs)
    else:
        torch.manual_seed(0)
        name, extra = FAMILIES[family]
        config = getattr(transformers, name)(**{**DECODER, **extra, **kwargs}, initializer_range=0.2)
        config.use_cache = False
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.set_attn_implementation(attention)
    return model


def run_model(model: PreTrainedModel, batch: dict[str, torch.Tensor]):
    """Per-row losses (R, S-1), 0 where unsupervised, and the gradients of their mean over supervised tokens."""
    model.zero_grad()
    logits = model(**model_inputs(batch)).logits
    assert logits.isfinite().all()
    targets = batch["labels"][:, 1:]
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), targets, ignore_index=-100, reduction="none")
    (losses.sum() / num_supervised_tokens(batch["labels"])).backward()
    return losses.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_packed_equals_unpacked(model: PreTrainedModel, packed: dict[str, torch.Tensor]) -> None:
    """To 1e-5 of the largest loss and of each gradient's norm: fp32 sums in another order."""
    samples = make_samples()
    expected_losses, expected = run_model(model, ConversationCollator(0)(samples))
    losses, grads = run_model(model, packed)
    by_ids = {tuple(sample["input_ids"].tolist()): row for row, sample in enumerate(samples)}
    aligned = {
        "num_tokens": packed["num_tokens"],
        "position_ids": packed["position_ids"],
        "losses": F.pad(losses, (1, 0)),
    }
    for ids, piece in zip(pieces(packed, "input_ids"), pieces(aligned, "losses"), strict=True):
        wanted = expected_losses[by_ids[tuple(ids.tolist())], : len(ids) - 1]
        torch.testing.assert_close(piece[1:], wanted, rtol=0, atol=1e-5 * expected_losses.max().item())
    assert grads.keys() == expected.keys() and len(grads) > 10
    for name, wanted in expected.items():
        assert (grads[name] - wanted).norm() <= 1e-5 * wanted.norm() + 1e-9, name


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", PACKABLE)
def test_losses_and_gradients_are_those_of_the_unpacked_batch(family, attention):
    model = family_model(family, attention)
    packed = PackedCollator(0, MAX_LENGTH, pad_to_multiple_of=5)(make_samples())
    assert packed["input_ids"].shape == (4, 15)  # rows of unlike fill
    assert_packed_equals_unpacked(model, packed)
    check_packing_supported(model)


@pytest.mark.parametrize("family", sorted(MIXING))
def test_a_moe_family_that_mixes_samples_is_refused(family):
    model = family_model(family)
    with pytest.raises(AssertionError):
        assert_packed_equals_unpacked(model, PackedCollator(0, MAX_LENGTH)(make_samples()))
    with pytest.raises(ValueError, match="lets tokens see other samples of their row"):
        check_packing_supported(model)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_sliding_windows_stay_within_a_sample(attention):
    model = family_model("mixtral", attention, sliding_window=4)
    assert_packed_equals_unpacked(model, PackedCollator(0, MAX_LENGTH)(make_samples()))
    check_packing_supported(model)


def test_one_long_row_gives_the_same():
    assert_packed_equals_unpacked(
        family_model("mixtral"), PackedCollator(0, MAX_LENGTH, single_row=True)(make_samples())
    )


@pytest.mark.parametrize(
    ("family", "attention", "reason"),
    [
        ("gpt_oss", "eager", r"GptOssForCausalLM lets .* its mask \(attention eager\) without position_ids"),
        ("opt", "sdpa", r"OPTForCausalLM lets .* its mask \(attention sdpa\) without position_ids"),
        ("qwen3_next", "sdpa", "Qwen3NextForCausalLM lets .* linear_attention layers run along the whole row"),
        ("lfm2", "sdpa", "Lfm2ForCausalLM lets .* conv layers run along the whole row"),
        ("bloom", "eager", "BloomForCausalLM takes no position_ids"),
    ],
)
def test_a_family_that_mixes_samples_is_refused(family, attention, reason):
    model = family_model(family, attention)
    with pytest.raises(ValueError, match=reason):
        check_packing_supported(model)


def test_a_cache_is_refused_since_it_turns_packing_off():
    model = family_model("mixtral")
    model.config.use_cache = True
    with pytest.raises(ValueError, match=r"set model\.config\.use_cache = False"):
        check_packing_supported(model)


def test_a_model_that_hides_a_sample_from_itself_is_refused():
    model = family_model("llama")
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda module, args, output: (torch.zeros_like(output[0]), None))
    with pytest.raises(ValueError, match="hides a packed sample's tokens from itself"):
        check_packing_supported(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_the_check_is_exact_in_half_precision(family, attention, dtype):
    check_packing_supported(family_model(family, attention).to(dtype))


def test_the_check_leaves_no_trace():
    model = family_model("mixtral", attention_dropout=0.5).train()
    model.model.layers[0].eval()
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    with torch.no_grad():
        check_packing_supported(model)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    assert not model.get_input_embeddings()._forward_hooks


# Flash attention


def flash_by_hand(module, query, key, value, attention_mask, scaling=None, position_ids=None, **kwargs):
    """Flash attention on a CPU: transformers' own decision whether a batch is packed, then each sequence by itself."""
    from transformers.modeling_flash_attention_utils import _is_packed_sequence, prepare_fa_kwargs_from_position_ids

    assert attention_mask is None
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    bounds = [0, query.shape[2]]
    if _is_packed_sequence(position_ids, query.shape[0]):
        bounds = prepare_fa_kwargs_from_position_ids(position_ids)[0][0].tolist()
    outputs = [
        F.scaled_dot_product_attention(
            query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], is_causal=True, scale=scaling
        )
        for a, b in pairwise(bounds)
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


@pytest.fixture
def flash(monkeypatch) -> str:
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask
    from transformers.modeling_utils import AttentionInterface

    name = "flash_by_hand"  # `set_attn_implementation` would look for a kernel of this name; the config does not
    monkeypatch.setitem(AttentionInterface._global_mapping, name, flash_by_hand)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, flash_attention_mask)
    return name


def test_flash_attention_keeps_the_samples_of_a_single_row_apart(flash):
    model = family_model("mixtral")
    packed = PackedCollator(0, MAX_LENGTH, pad_to_multiple_of=5, single_row=True)(make_samples())
    expected_losses, expected = run_model(model, packed)
    model.config._attn_implementation = flash
    losses, grads = run_model(model, packed)
    torch.testing.assert_close(losses, expected_losses, rtol=0, atol=1e-5 * expected_losses.max().item())
    for name, wanted in expected.items():
        assert (grads[name] - wanted).norm() <= 1e-5 * wanted.norm() + 1e-9, name
    check_packing_supported(model, single_row=True)


def test_flash_attention_over_several_rows_is_refused(flash):
    model = family_model("mixtral")
    model.config._attn_implementation = flash
    with pytest.raises(ValueError, match="flash_by_hand looks for packed samples in batches of one row only"):
        check_packing_supported(model)


# Under the plugin


def boosted_check(precision: str) -> list[str]:
    """The check before and after `boost`, on a model whose experts are spread over the ranks."""
    from coati_ext import compat

    compat.apply()  # before Booster is imported
    from colossalai.booster import Booster
    from parity import lora_config

    from coati_ext.plugin import MoeLoraPlugin

    booster = Booster(plugin=MoeLoraPlugin(ep_size=2, precision=precision))
    model = booster.enable_lora(tiny_model("mixtral"), lora_config=lora_config(["mlp", "attention"]))
    check_packing_supported(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer, *_ = booster.boost(model, optimizer)
    check_packing_supported(model)
    with_gradient = [name for name, p in model.named_parameters() if p.grad is not None]
    model.unwrap().config.use_cache = True
    try:
        check_packing_supported(model)
    except ValueError as error:
        return [*with_gradient, str(error)]
    return with_gradient


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_check_runs_under_expert_parallelism(precision):
    for (answer,) in pool(2).run(boosted_check, precision):
        assert "MixtralForCausalLM lets tokens see other samples" in answer
