"""Export and load: stock PEFT computes what our layers compute, loading is bit-exact, a save is whole or not there."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import pool
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_models import tiny_model, token_batch
from transformers import AutoModelForCausalLM

from coati_ext.checkpoint_io import adapter as adapter_module
from coati_ext.checkpoint_io.adapter import (
    adapter_state_dict,
    frozen_router_hash,
    load_adapter,
    lora_config_from_adapter,
    save_adapter,
)
from coati_ext.models.lora import inject_lora
from tests.checkpoint_io.adapters import WEIGHTS, edit_config, edit_tensors, lora_model, save_base, saved

# PEFT looks for the patterns among its target modules only; it applies them to the target parameters all the same.
pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")

# x·A·B against x·(W+ΔW) in fp32 with logits of about 5: measured up to 3.6e-6. A dropped layer moves them by > 0.5.
ROUNDING = 1e-5

MOE = ["mixtral", "qwen3_moe", "deepseek_v3"]
TARGETS = {
    "mlp": "mlp",
    "all": "all",
    "experts": "experts",
    "attention": "attention",
    "one layer": r"model\.layers\.1\..*",
    "down_proj of experts": r".*\.mlp\.experts\.down_proj",
    "gate and up of experts": [r".*\.mlp\.experts\.gate_proj", r".*\.mlp\.experts\.up_proj"],
    "mixed": [r".*\.(kv_b_proj|k_proj)", r".*layers\.1\.mlp\.experts\..*"],
}
CASES = [(family, name) for family in MOE for name in TARGETS]
CASES += [("deepseek_v3", "shared_experts"), ("deepseek_v3", "dense_mlp"), ("llama", "all"), ("llama", "one layer")]


def peft_logits(base, adapter):
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(adapter))
    return model.eval()(token_batch()).logits.detach()


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return tmp_path_factory.mktemp("bases")


@pytest.fixture
def mixtral(tmp_path):
    """An adapter of a tiny Mixtral: (model, directory)."""
    model = lora_model("mixtral")
    return model, saved(model, tmp_path)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_stock_peft_gives_our_logits(family, name, bases, tmp_path):
    base = save_base(family, bases)
    model = lora_model(family, TARGETS.get(name, name))
    ours = model(token_batch()).logits.detach()
    assert (ours - tiny_model(family)(token_batch()).logits).abs().max() > 0.5
    assert (peft_logits(base, saved(model, tmp_path, base)) - ours).abs().max() <= ROUNDING


@pytest.mark.parametrize(("family", "name"), CASES)
def test_what_is_saved_loads_back_bit_exactly_and_on_the_same_targets(family, name, tmp_path):
    model = lora_model(family, TARGETS.get(name, name))
    directory = saved(model, tmp_path)
    again = tiny_model(family)
    inject_lora(again, lora_config_from_adapter(directory))
    load_adapter(again, directory)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    loaded = {n: p for n, p in again.named_parameters() if p.requires_grad}
    assert trained.keys() == loaded.keys()
    assert all(torch.equal(trained[n], loaded[n]) for n in trained)
    assert torch.equal(again.eval()(token_batch()).logits, model(token_batch()).logits)


def test_rslora_and_dropout_are_folded_away(bases, tmp_path):
    base = save_base("deepseek_v3", bases)
    model = lora_model("deepseek_v3", "all", use_rslora=True, lora_dropout=0.1)
    directory = saved(model, tmp_path, base)
    for config in (directory / "adapter_config.json", directory / "transformers4/adapter_config.json"):
        written = json.loads(config.read_text())
        assert (written["use_rslora"], written["lora_dropout"]) == (False, 0.0)
        assert written["lora_alpha"] == 24  # 12 / sqrt(4) * 4
    assert (peft_logits(base, directory) - model(token_batch()).logits).abs().max() <= ROUNDING


def test_the_transformers_4_form_has_plain_names_and_the_same_weights(tmp_path):
    older = saved(lora_model("deepseek_v3", "all"), tmp_path) / "transformers4"
    config = json.loads((older / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(
        ["gate_proj", "up_proj", "down_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    )
    assert "target_parameters" not in config
    assert os.path.samefile(older / WEIGHTS, older.parent / WEIGHTS) and not (older / WEIGHTS).is_symlink()
    assert lora_config_from_adapter(older).target_modules == lora_config_from_adapter(older.parent).target_modules


def test_the_transformers_4_folder_can_be_copied_alone(tmp_path):
    model = lora_model("mixtral")
    older = Path(shutil.copytree(saved(model, tmp_path) / "transformers4", tmp_path / "alone", symlinks=True))
    assert lora_config_from_adapter(older).r == 4
    assert load_file(older / WEIGHTS).keys() == load_file(tmp_path / "adapter" / WEIGHTS).keys()


def test_weights_are_copied_where_links_are_not_possible(tmp_path, monkeypatch):
    def no_links(*args):
        raise OSError("not supported")

    monkeypatch.setattr(os, "link", no_links)
    directory = saved(lora_model("mixtral"), tmp_path)
    older = directory / "transformers4" / WEIGHTS
    assert not os.path.samefile(older, directory / WEIGHTS)
    assert older.read_bytes() == (directory / WEIGHTS).read_bytes()


def test_an_adapter_of_another_tool_in_plain_form_with_rslora_loads(tmp_path):
    model = lora_model("qwen3_moe", "all", use_rslora=True)
    older = saved(model, tmp_path) / "transformers4"
    edit_config(older, use_rslora=True, lora_alpha=12, lora_dropout=0.05, peft_version="0.13.2")
    again = tiny_model("qwen3_moe")
    inject_lora(again, lora_config_from_adapter(older))
    load_adapter(again, older)
    assert torch.equal(again.eval()(token_batch()).logits, model(token_batch()).logits)


def test_dtype_is_as_trained_or_as_asked(tmp_path):
    model = lora_model("mixtral", "experts").to(torch.bfloat16)
    assert {t.dtype for t in adapter_state_dict(model).values()} == {torch.bfloat16}
    assert {t.dtype for t in adapter_state_dict(model, dtype=torch.float32).values()} == {torch.float32}
    save_adapter(model, tmp_path / "a", base_model_name_or_path=None)
    with safe_open(tmp_path / "a" / WEIGHTS, framework="pt") as opened:
        assert opened.metadata()["format"] == "pt"
        assert opened.metadata()["peft"] == adapter_module.package_versions()["peft"]


# --- expert parallelism, pipeline stages


def _ep_save_and_load(directory):
    group = dist.group.WORLD
    model = lora_model("deepseek_v3", "all", ep_group=group)
    load_adapter(model, directory)
    state = adapter_state_dict(model)
    save_adapter(model, f"{directory}-ep", base_model_name_or_path=None, is_writer=dist.get_rank() == 0, group=group)
    return state is None, sorted(state or ())


def test_experts_split_over_two_ranks_load_and_save_as_in_one_process(tmp_path):
    directory = saved(lora_model("deepseek_v3", "all"), tmp_path)
    (no_state_0, keys), (no_state_1, _) = pool(2).run(_ep_save_and_load, str(directory))
    one, two = load_file(directory / WEIGHTS), load_file(f"{directory}-ep/{WEIGHTS}")
    assert (no_state_0, no_state_1) == (False, True)
    assert keys == sorted(one) == sorted(two)
    assert all(torch.equal(one[key], two[key]) for key in one)


def _slices_of_rank(directory):
    model = lora_model("mixtral", "experts", ep_group=dist.group.WORLD)
    load_adapter(model, directory)
    experts = model.get_submodule("model.layers.1.mlp.experts")
    return experts.first_expert, experts.lora_B["up_proj"].detach().clone()


def test_each_rank_loads_its_own_experts(tmp_path):
    model = lora_model("mixtral", "experts")
    directory = saved(model, tmp_path)
    whole = model.get_submodule("model.layers.1.mlp.experts").lora_B["up_proj"]
    for first, part in pool(2).run(_slices_of_rank, str(directory)):
        assert torch.equal(part, whole[first : first + 2])


def _stage(model):
    """What pipeline parallelism leaves on this rank of a three-layer model: layers 0 and 1, or 2."""
    kept = (0, 1) if dist.get_rank() == 0 else (2,)
    for i in range(3):
        if i not in kept:
            model.model.layers[i] = None


def _save_and_load_stages(directory, targets):
    group = dist.group.WORLD
    model = lora_model("deepseek_v3", targets)
    _stage(model)
    save_adapter(
        model,
        directory,
        base_model_name_or_path=None,
        is_writer=dist.get_rank() == 0,
        group=group,
        pp_group=group,
    )
    trained = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    for name, parameter in model.named_parameters():
        if name in trained:
            parameter.data.zero_()
    load_adapter(model, directory, pp_group=group)
    return all(torch.equal(p, trained[n]) for n, p in model.named_parameters() if n in trained)


@pytest.mark.parametrize("targets", ["all", "attention", "dense_mlp"])  # dense_mlp: stage 1 has no LoRA at all
def test_pipeline_stages_save_and_load_as_in_one_process(targets, tmp_path):
    whole = saved(lora_model("deepseek_v3", targets), tmp_path)
    staged = tmp_path / "staged"
    assert pool(2).run(_save_and_load_stages, str(staged), targets) == [True, True]
    one, two = load_file(whole / WEIGHTS), load_file(staged / WEIGHTS)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)
    for config in ("adapter_config.json", "transformers4/adapter_config.json"):
        assert (whole / config).read_text() == (staged / config).read_text()


def _failing_save(path):
    model = lora_model("mixtral", "experts", ep_group=dist.group.WORLD)
    try:
        save_adapter(model, path, base_model_name_or_path=None, is_writer=dist.get_rank() == 0, group=dist.group.WORLD)
    except ValueError as error:
        return str(error)
    return None


def test_a_failed_write_is_the_same_error_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("x")
    errors = pool(2).run(_failing_save, str(tmp_path / "file"))
    assert all("is a file" in error for error in errors)


# --- whole or not at all


def test_a_path_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "adapter").write_text("precious")
    with pytest.raises(ValueError, match="adapter is a file"):
        saved(lora_model("mixtral"), tmp_path)
    assert (tmp_path / "adapter").read_text() == "precious"


def test_a_save_that_dies_leaves_the_old_adapter_and_no_half_one(tmp_path, monkeypatch):
    directory = saved(lora_model("mixtral"), tmp_path)
    before = {f.name: f.read_bytes() for f in directory.iterdir() if f.is_file()}

    def dies(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(adapter_module, "adapter_card", dies)
    with pytest.raises(KeyboardInterrupt):
        saved(lora_model("mixtral", seed=6), tmp_path)
    assert {f.name: f.read_bytes() for f in directory.iterdir() if f.is_file()} == before
    assert [f.name for f in tmp_path.iterdir()] == ["adapter"]


def test_a_new_adapter_replaces_the_old_one_and_keeps_other_files(tmp_path):
    directory = saved(lora_model("mixtral", "all"), tmp_path)
    (directory / "optimizer").mkdir()
    (directory / "optimizer" / "state.bin").write_text("state")
    (directory / "adapter_model.bin").write_text("stale")
    saved(lora_model("mixtral", "attention"), tmp_path)
    assert (directory / "optimizer" / "state.bin").read_text() == "state"
    assert not (directory / "adapter_model.bin").exists()
    assert all("self_attn" in key for key in load_file(directory / WEIGHTS))
    assert [f.name for f in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.parametrize("killed", ["between the two renames", "while other files were moved"])
def test_what_a_killed_save_left_is_taken_up(killed, tmp_path):
    directory = saved(lora_model("mixtral"), tmp_path)
    (directory / "notes.txt").write_text("mine")
    directory.rename(tmp_path / ".adapter.replaced")
    (tmp_path / ".adapter.incomplete").mkdir()
    if killed == "while other files were moved":
        (tmp_path / ".adapter.incomplete").rename(directory)
    saved(lora_model("mixtral"), tmp_path)
    assert (directory / "notes.txt").read_text() == "mine"
    assert [f.name for f in tmp_path.iterdir()] == ["adapter"]


def test_a_tensor_that_is_not_finite_is_named_and_nothing_is_written(tmp_path):
    model = lora_model("mixtral", "experts")
    model.get_submodule("model.layers.1.mlp.experts").lora_B["up_proj"].data[2, 0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"layers\.1\.block_sparse_moe\.experts\.2\.w3\.lora_B\.weight is not finite"):
        saved(model, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_lora_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no LoRA"):
        saved(tiny_model("mixtral"), tmp_path)


def test_a_family_that_peft_would_drop_is_refused_at_export(tmp_path):
    model = lora_model("mixtral")
    model.config.model_type = "nemotron_h"
    with pytest.raises(ValueError, match="nemotron_h"):
        saved(model, tmp_path)


# --- load refuses


def _first_key(tensors, part):
    return next(key for key in sorted(tensors) if part in key)


def _rename(tensors):
    tensors["base_model.model.model.layers.0.self_attn.q_proj2.lora_A.weight"] = tensors.pop(
        _first_key(tensors, "q_proj")
    )


def _reshape(tensors):
    key = _first_key(tensors, "experts.3.w2.lora_B")
    tensors[key] = tensors[key][:-1].contiguous()


def _spoil(tensors):
    tensors[_first_key(tensors, "experts.3.w2.lora_B")][0, 0] = float("inf")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(_first_key(t, "experts.3.w2.lora_B")), r"misses 1 tensor.*experts\.3\.w2\.lora_B\.weight"),
        (_rename, r"misses 1 tensor.*q_proj\.lora_A\.weight"),
        (lambda t: t.update({"base_model.model.model.norm.lora_A.weight": torch.zeros(4, 2)}), r"unexpectedly.*norm"),
        (_reshape, r"experts\.3\.w2\.lora_B\.weight has shape \(31, 4\).*needs \(32, 4\)"),
        (_spoil, r"experts\.3\.w2\.lora_B\.weight is not finite"),
    ],
)
def test_load_names_the_tensor_and_the_file(edit, message, mixtral):
    model, directory = mixtral
    edit_tensors(directory, edit)
    with pytest.raises(ValueError, match=message) as error:
        load_adapter(model, directory)
    assert str(directory / WEIGHTS) in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 8}, "r is 8, but the tensors have rank 4"),
        ({"rank_pattern": {"q_proj": 8}}, "'q_proj' gives rank 8"),
        ({"alpha_pattern": {"q_proj": 1}}, "'q_proj' gives rank 4 and alpha 1"),
        ({"use_dora": True}, "use_dora"),
        ({"peft_type": "IA3"}, "IA3"),
    ],
)
def test_a_config_that_we_cannot_follow_is_refused(changes, message, mixtral):
    plain = mixtral[1] / "transformers4"
    edit_config(plain, **changes)
    with pytest.raises(ValueError, match=message):
        lora_config_from_adapter(plain)


def test_directories_that_are_no_adapter_are_refused(tmp_path, mixtral):
    _, directory = mixtral
    with pytest.raises(ValueError, match="is not there"):
        lora_config_from_adapter(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is a file"):
        lora_config_from_adapter(directory / WEIGHTS)
    with pytest.raises(ValueError, match=r"adapter_config\.json is not there"):
        lora_config_from_adapter(tmp_path)
    (directory / WEIGHTS).write_bytes((directory / WEIGHTS).read_bytes()[:-8])
    with pytest.raises(ValueError, match="no whole safetensors file"):
        lora_config_from_adapter(directory)
    (directory / WEIGHTS).rename(directory / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"adapter_model\.bin is not read"):
        lora_config_from_adapter(directory)


# --- model card, router


def test_the_model_card_says_what_was_done(tmp_path):
    model = lora_model("deepseek_v3", "mlp")
    directory = tmp_path / "adapter"
    save_adapter(
        model, directory, base_model_name_or_path='org/a "b"', card={"Data": "d.jsonl,\n12 rows", "Loss": "0.25"}
    )
    card = (directory / "README.md").read_text()
    head = card.split("---\n")[1]
    assert 'base_model: "org/a \\"b\\""\nlibrary_name: peft\n' in head
    assert "- mixture-of-experts" in head
    assert "- Data: d.jsonl, 12 rows\n- Loss: 0.25\n" in card
    assert "- Rank: 4\n- Alpha: 12 (scaling 3)\n" in card
    assert "| routed experts | 2 | gate_proj, up_proj, down_proj, 8 experts each | 10,752 |" in card  # 2*8*3*4*(32+24)
    assert "| attention | 0 | not adapted | 0 |" in card
    assert all(name in card for name in ("coati_ext", "torch", "transformers", "peft"))


@pytest.mark.parametrize("family", MOE)
def test_the_router_hash_sees_the_router_and_nothing_else(family):
    model = lora_model(family)
    before = frozen_router_hash(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(1)
    assert frozen_router_hash(model) == before == frozen_router_hash(tiny_model(family))
    gate = model.get_submodule("model.layers.1.mlp.gate")
    gate.weight.data[0, 0] += 1e-3
    changed = frozen_router_hash(model)
    assert changed != before
    if family == "deepseek_v3":
        gate.e_score_correction_bias[1] += 1e-3
        assert frozen_router_hash(model) != changed
