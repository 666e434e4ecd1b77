"""The table of adapter names: inverse in both directions, and the same as transformers' own conversion mapping."""

import pytest
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from coati_ext.checkpoint_io.names import (
    EXPERT_NAMES,
    LoraTensor,
    expert_names,
    from_disk,
    rewritten_targets,
    shortest_selectors,
    to_disk,
)

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
EXPERTS = "model.layers.3.mlp.experts"


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("factor", ["lora_A", "lora_B"])
def test_expert_names_round_trip(model_type, projection, factor):
    tensor = LoraTensor(path=EXPERTS, projection=projection, expert=11, factor=factor)
    assert from_disk(to_disk(tensor, model_type)) == tensor


@pytest.mark.parametrize("path", ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.shared_experts.gate_proj"])
def test_module_names_round_trip(path):
    tensor = LoraTensor(path=path, factor="lora_B")
    assert to_disk(tensor, "deepseek_v3") == f"base_model.model.{path}.lora_B.weight"
    assert from_disk(to_disk(tensor, "deepseek_v3")) == tensor


def test_mixtral_names_are_those_of_its_checkpoint():
    keys = [
        to_disk(LoraTensor(path=EXPERTS, projection=p, expert=0), "mixtral")
        for p in ("gate_proj", "up_proj", "down_proj")
    ]
    assert [key.split(".")[-5:-2] for key in keys] == [["experts", "0", w] for w in ("w1", "w3", "w2")]
    assert all(".layers.3.block_sparse_moe.experts." in key for key in keys)


@pytest.mark.parametrize("model_type", ["mixtral", "minimax_m2", "qwen3_moe", "deepseek_v3", "glm4_moe", "dots1"])
def test_the_table_agrees_with_transformers(model_type):
    names = expert_names(model_type)
    sources = {}
    for conversion in get_checkpoint_conversion_mapping(model_type):
        for target in conversion.target_patterns:
            sources[target.rpartition(".")[2]] = [pattern.split(".")[-2] for pattern in conversion.source_patterns]
    assert sources["gate_up_proj"] == [names.gate_proj, names.up_proj]  # in the order in which they are stacked
    assert sources["down_proj"] == [names.down_proj]


@pytest.mark.parametrize("model_type", ["nemotron_h", "gpt_oss", "llama"])
def test_a_family_whose_experts_peft_would_drop_is_refused_by_name(model_type):
    with pytest.raises(ValueError, match=f"'{model_type}'.*would drop.*deepseek_v3"):
        to_disk(LoraTensor(path=EXPERTS, projection="up_proj", expert=0), model_type)


def test_experts_at_a_path_that_peft_does_not_convert_are_refused():
    with pytest.raises(ValueError, match=r"feed_forward\.experts"):
        to_disk(LoraTensor(path="model.layers.0.feed_forward.experts", projection="up_proj", expert=0), "deepseek_v3")


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("base_model.model.model.layers.0.mlp.experts.lora_A.weight", "fused"),
        ("base_model.model.model.layers.0.mlp.experts.base_layer.lora_B.weight", "fused"),
        ("base_model.model.model.layers.0.mlp.experts.0.w1.lora_A.weight", "unknown name"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", "no LoRA weight"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", "no LoRA weight"),
    ],
)
def test_other_forms_of_keys_are_refused_with_the_key(key, reason):
    with pytest.raises(ValueError, match=reason) as error:
        from_disk(key)
    assert key in str(error.value)


def test_rewritten_targets_are_the_names_that_peft_takes_for_experts():
    assert {"gate_proj", "up_proj", "down_proj"} <= rewritten_targets("deepseek_v3")
    assert rewritten_targets("llama") == set()
    assert "gate_proj" not in rewritten_targets("mixtral")


def test_every_row_has_distinct_names():
    on_disk = [
        (row.block, leaf) for row in EXPERT_NAMES.values() for leaf in (row.gate_proj, row.up_proj, row.down_proj)
    ]
    assert len(set(on_disk)) == len(on_disk)  # or from_disk could not tell


UNIVERSE = [f"model.layers.{i}.{name}" for i in range(12) for name in ("attn.q", "attn.o", "mlp.up", "mlp.shared.up")]


@pytest.mark.parametrize(
    ("targets", "selectors"),
    [
        ([p for p in UNIVERSE if p.endswith(".q")], ["q"]),
        ([p for p in UNIVERSE if p.endswith("up")], ["up"]),
        ([p for p in UNIVERSE if p.endswith("mlp.up")], ["mlp.up"]),
        ([p for p in UNIVERSE if p.endswith("shared.up")], ["shared.up"]),
        (["model.layers.1.attn.q"], ["layers.1.attn.q"]),  # not layers.11
        (["model.layers.1.attn.q", "model.layers.2.attn.q"], ["layers.1.attn.q", "layers.2.attn.q"]),
        ([], []),
    ],
)
def test_shortest_selectors_select_exactly_the_targets(targets, selectors):
    assert shortest_selectors(targets, UNIVERSE) == selectors
    matched = {p for p in UNIVERSE for s in selectors if p == s or p.endswith(f".{s}")}  # as PEFT matches
    assert matched == set(targets)
