import pytest
from peft import LoraConfig
from tiny_models import tiny_model

from coati_ext.models.lora import adapters_disabled, inject_lora
from coati_ext.models.targets import resolve_targets


def kinds(family, targets, exclude=None):
    found = {}
    for candidate in resolve_targets(tiny_model(family), targets, exclude):
        found[candidate.kind] = found.get(candidate.kind, 0) + 1
    return found


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (None, {"dense MLP": 3, "routed experts": 6, "shared experts": 6}),
        (["gate_proj", "up_proj", "down_proj"], {"dense MLP": 3, "routed experts": 6, "shared experts": 6}),
        (["experts"], {"routed experts": 6}),
        (["shared_experts.gate_proj"], {"shared experts": 2}),
        (["attention"], {"attention": 15}),
        (["q_a_proj", "kv_a_proj_with_mqa"], {"attention": 6}),
        ("all-linear", {"dense MLP": 3, "routed experts": 6, "shared experts": 6, "attention": 15}),
        (r"model\.layers\.2\..*", {"routed experts": 3, "shared experts": 3, "attention": 5}),
        ([r"model\.layers\.1\.mlp\.experts\.down_proj"], {"routed experts": 1}),
    ],
)
def test_targets_of_a_deepseek_model(targets, expected):
    assert kinds("deepseek_v3", targets) == expected


def test_mixtral_names_of_transformers_4_are_understood():
    assert kinds("mixtral", ["w1", "w2", "w3"]) == {"routed experts": 6}


def test_exclusion_is_taken_away():
    assert kinds("deepseek_v3", ["mlp"], ["dense_mlp"]) == {"routed experts": 6, "shared experts": 6}


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_porj"], r"'q_porj' matches nothing in DeepseekV3ForCausalLM.*shared_experts"),
        (["gate"], r"'gate' names the router"),
        (["gate_proj"], r"layers\.1\.mlp\.experts would get gate_proj without up_proj"),
        (["lm_head"], r"'lm_head' matches nothing"),
        (["("], r"'\(' is neither a name nor a regular expression"),
    ],
)
def test_a_target_that_would_be_skipped_is_refused_by_name(targets, message):
    with pytest.raises(ValueError, match=message):
        resolve_targets(tiny_model("deepseek_v3"), targets)


def test_a_set_that_the_model_lacks_is_refused():
    with pytest.raises(ValueError, match="'experts' matches nothing in LlamaForCausalLM"):
        resolve_targets(tiny_model("llama"), ["experts"])


@pytest.mark.parametrize("option", [{"use_dora": True}, {"bias": "all"}, {"modules_to_save": ["lm_head"]}])
def test_options_that_would_be_ignored_are_refused_by_name(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        inject_lora(tiny_model("mixtral"), LoraConfig(target_modules=["mlp"], **option))


def test_injection_trains_adapters_only_and_reports_the_whole_model():
    model = tiny_model("deepseek_v3")
    report = inject_lora(model, LoraConfig(r=4, lora_alpha=8, target_modules=["mlp"]))
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in trainable)
    assert report.num_trainable == sum(p.numel() for p in trainable.values())
    assert report.num_routers == 2
    assert "8 experts" in report.format() and "frozen" in report.format()


def test_the_start_depends_on_seed_and_path_alone():
    def start(seed):
        model = tiny_model("qwen3_moe")
        inject_lora(model, LoraConfig(r=4, target_modules=["all"]), seed=seed)
        return {n: p for n, p in model.named_parameters() if "lora_A" in n}

    first, again, other = start(1), start(1), start(2)
    assert all((first[name] == again[name]).all() and not (first[name] == other[name]).any() for name in first)
    experts = first["model.layers.0.mlp.experts.lora_A.gate_proj"]
    assert not (experts[0] == experts[1]).any()


def test_disabled_adapters_are_the_base_model_bit_for_bit():
    import torch
    from tiny_models import token_batch

    ids = token_batch()
    base = tiny_model("deepseek_v3")(ids).logits
    model = tiny_model("deepseek_v3")
    inject_lora(model, LoraConfig(r=4, target_modules=["all"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    injected = tiny_model("deepseek_v3")
    inject_lora(injected, LoraConfig(r=4, target_modules=["all"]))
    assert not torch.equal(model(ids).logits, base)
    with adapters_disabled(model):
        off = model(ids).logits
    # grouped GEMM and transformers' own sum in another order: 1e-6 of logits near 10, bit-equal among ourselves
    torch.testing.assert_close(off, base, rtol=1e-5, atol=1e-5)
    with adapters_disabled(injected):
        assert torch.equal(off, injected(ids).logits)
    assert all(p.requires_grad == ("lora_" in name) for name, p in model.named_parameters())
