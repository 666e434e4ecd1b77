"""Log-probabilities of completions against full logits, for heads that are plain and heads that are not (fp32).

B completions, S tokens, A = S - 1 predicted positions.
"""

import pytest
import torch
import torch.distributed as dist
from distributed import pool
from parity import lora_config, randomise_lora_B, whole_gradients
from tiny_grpo import Layout, boost
from tiny_models import VOCAB, tiny_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from coati_ext.models.completion_log_probs import CompletionLogProbs, disable_dropout
from coati_ext.models.lora import inject_lora

LENGTHS = [(3, 4), (1, 6), (5, 0), (2, 9), (4, 1)]  # prompt and completion; one completion is empty
TOLERANCE = 1e-5  # of log-probabilities: fp32 sums in another order

# Of dense families that do more with their logits than multiply: what they do, large enough to be seen.
SCALED_OR_CAPPED = {
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, "layer_types": ["full_attention"] * 2},
    "gemma2": {"final_logit_softcapping": 2.0, "head_dim": 8, "layer_types": ["full_attention"] * 2},
    "granite": {"logits_scaling": 3.0},
}


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    length = max(map(sum, LENGTHS))
    sequences_BS = torch.randint(3, VOCAB, (len(LENGTHS), length), generator=torch.Generator().manual_seed(1))
    prompt_B1 = torch.tensor([[prompt] for prompt, _ in LENGTHS])
    end_B1 = torch.tensor([[prompt + completion] for prompt, completion in LENGTHS])
    position_A = torch.arange(length - 1)
    return sequences_BS, (position_A >= prompt_B1 - 1) & (position_A < end_B1 - 1)


def by_full_logits(model, sequences_BS, action_mask_BA, temperature) -> tuple[torch.Tensor, torch.Tensor]:
    logits_BAV = model(input_ids=sequences_BS).logits[:, :-1] / temperature
    log_probs_BAV = logits_BAV.log_softmax(-1)
    entropy_BA = -(log_probs_BAV.exp() * log_probs_BAV).sum(-1)
    found_BA = log_probs_BAV.gather(-1, sequences_BS[:, 1:, None])[..., 0]
    return found_BA.where(action_mask_BA, 0), entropy_BA.where(action_mask_BA, 0).detach()


def dense(model_type: str, **kwargs):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        initializer_range=0.2, **kwargs,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def assert_equals_full_logits(model, *, linear: bool) -> None:
    """Values, entropies and the gradient of every adapter tensor, at a temperature other than 1."""
    inject_lora(model, lora_config(["all"]))
    randomise_lora_B(model)
    log_probs = CompletionLogProbs(model)
    assert log_probs.linear == linear
    sequences_BS, mask_BA = rows()
    weights_BA = torch.randn(mask_BA.shape, generator=torch.Generator().manual_seed(4))
    gradients = []
    for function in (by_full_logits, lambda _, *arguments: log_probs(*arguments)):
        model.zero_grad()
        found_BA, entropy_BA = function(model, sequences_BS, mask_BA, 0.7)
        (found_BA * weights_BA).sum().backward()
        assert not entropy_BA.requires_grad and not found_BA[~mask_BA].any()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad})
        if len(gradients) == 1:
            expected_BA, expected_entropy_BA = found_BA, entropy_BA
    torch.testing.assert_close(found_BA, expected_BA, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(entropy_BA, expected_entropy_BA, rtol=0, atol=TOLERANCE)
    for name, exact in gradients[0].items():
        assert (gradients[1][name] - exact).norm() <= 1e-5 * exact.norm() + 1e-7, name


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe", "olmoe", "minimax_m2"])
def test_plain_heads_see_the_tokens_of_completions_only(family):
    assert_equals_full_logits(tiny_model(family), linear=True)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_tied_heads_are_plain(family):
    assert_equals_full_logits(tiny_model(family, tie_word_embeddings=True), linear=True)


@pytest.mark.parametrize("model_type", SCALED_OR_CAPPED)
def test_logits_that_are_scaled_or_capped_are_so_in_chunks_too(model_type):
    assert_equals_full_logits(dense(model_type, **SCALED_OR_CAPPED[model_type]), linear=True)


def test_a_moe_family_that_scales_its_logits_does_so_in_chunks_too():
    assert_equals_full_logits(tiny_model("cohere2_moe", logit_scale=0.3), linear=True)


def test_a_setting_of_logits_that_is_not_known_has_them_computed_in_full():
    model = tiny_model("llama")
    model.config.logit_noise = 0.1
    assert_equals_full_logits(model, linear=False)


def test_logits_that_no_setting_tells_of_are_found_out_by_trying():
    model = tiny_model("llama")
    upstream_forward = model.forward

    def forward(*args, **kwargs):
        out = upstream_forward(*args, **kwargs)
        out.logits = out.logits * 1.5
        return out

    model.forward = forward
    assert_equals_full_logits(model, linear=False)


def test_an_output_head_with_a_bias_is_plain():
    model = tiny_model("llama")
    head = torch.nn.Linear(32, VOCAB)
    head.weight = model.lm_head.weight
    torch.nn.init.normal_(head.bias)
    model.lm_head = head
    assert_equals_full_logits(model, linear=True)


def test_nothing_in_the_mask_gives_zeros_and_zero_gradients():
    model = tiny_model("mixtral")
    inject_lora(model, lora_config(["all"]))
    randomise_lora_B(model)
    sequences_BS, mask_BA = rows()
    found_BA, _ = CompletionLogProbs(model)(sequences_BS, mask_BA & False, 1.0)
    found_BA.sum().backward()
    assert found_BA.shape == mask_BA.shape and not found_BA.any()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def tensor_parallel(family: str) -> dict:
    boosted = boost(family, Layout(tp=2), lr=0.0)
    log_probs = CompletionLogProbs(boosted.model)
    sequences_BS, mask_BA = rows()
    found_BA, entropy_BA = log_probs(sequences_BS, mask_BA, 0.7)
    boosted.booster.backward(found_BA.sum(), boosted.optimizer)
    plugin = boosted.plugin
    gradients = whole_gradients(boosted.inner, boosted.optimizer, plugin.pp_group, plugin.tp_group)
    return {"linear": log_probs.linear, "found": found_BA.detach(), "entropy": entropy_BA, "gradients": gradients}


def test_a_head_that_ranks_share_is_applied_in_slices():
    model = tiny_model("llama")
    inject_lora(model, lora_config(["all"]), seed=0)
    randomise_lora_B(model)
    expected_BA, entropy_BA = by_full_logits(model, *rows(), 0.7)
    expected_BA.sum().backward()
    for ours in pool(2).run(tensor_parallel, "llama"):
        assert ours["linear"]
        torch.testing.assert_close(ours["found"], expected_BA.detach(), rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(ours["entropy"], entropy_BA, rtol=0, atol=TOLERANCE)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                exact = parameter.grad
                assert (ours["gradients"][name] - exact).norm() <= 1e-5 * exact.norm(), name


def expert_parallel() -> tuple:
    boosted = boost("mixtral", Layout(ep=2), lr=0.0)
    sequences_BS, mask_BA = rows()
    mine = slice(0, 2) if dist.get_rank() == 0 else slice(2, 5)
    log_probs = CompletionLogProbs(boosted.model)
    with torch.no_grad():
        return log_probs.linear, log_probs(sequences_BS[mine], mask_BA[mine], 0.7)[0]


def test_ranks_that_share_experts_have_rows_of_their_own():
    model = tiny_model("mixtral")
    inject_lora(model, lora_config(["all"]), seed=0)
    randomise_lora_B(model)
    with torch.no_grad():
        expected_BA, _ = by_full_logits(model, *rows(), 0.7)
    parts = pool(2).run(expert_parallel)
    assert all(linear for linear, _ in parts)
    torch.testing.assert_close(torch.cat([part for _, part in parts]), expected_BA, rtol=0, atol=TOLERANCE)


def test_dropout_of_the_model_is_switched_off():
    model = tiny_model("mixtral", attention_dropout=0.5)
    model.add_module("dropout", torch.nn.Dropout(0.3))
    disable_dropout(model.train())
    sequences_BS, mask_BA = rows()
    log_probs = CompletionLogProbs(model)
    with torch.no_grad():
        once, again = (log_probs(sequences_BS, mask_BA, 1.0)[0] for _ in range(2))
    assert torch.equal(once, again) and model.dropout.p == 0
