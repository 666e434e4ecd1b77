"""What the loader plans from headers alone: the names of weights, and what is refused before anything is read."""

import json
import os

import pytest
import torch
from fp8_checkpoint import make_fp8_dir, save_sharded
from tiny_models import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from coati_ext.checkpoint_io import load
from coati_ext.checkpoint_io.layout import Layout
from coati_ext.checkpoint_io.load import build_meta_model, load_weights
from coati_ext.checkpoint_io.weight_names import Place, WeightNames
from tests.checkpoint_io.meta_models import CPU, ONE, edit, loaded, save_model, shard

FP32 = torch.float32
EXPERT = "model.layers.0.mlp.experts.{}.{}_proj.weight".format
LAYER = "model.layers.1."
PLACES = [
    ("mixtral", "block_sparse_moe.gate.weight", dict(name="mlp.gate.weight")),
    ("mixtral", "block_sparse_moe.experts.3.w3.weight", dict(name="mlp.experts.gate_up_proj", expert=3, part=1)),
    ("qwen3_moe", "mlp.experts.7.gate_proj.weight", dict(name="mlp.experts.gate_up_proj", expert=7, part=0)),
    ("deepseek_v3", "mlp.experts.7.down_proj.weight", dict(name="mlp.experts.down_proj", expert=7)),
    ("deepseek_v3", "mlp.experts.down_proj", dict(name="mlp.experts.down_proj")),
    ("deepseek_v3", "mlp.shared_experts.up_proj.weight", dict(name="mlp.shared_experts.up_proj.weight")),
    ("llama", "mlp.up_proj.weight", dict(name="mlp.up_proj.weight")),
]


@pytest.mark.parametrize("family, name, place", PLACES, ids=str)
def test_a_tensor_has_its_place(family, name, place):
    expected = Place(**place | dict(name=LAYER + place["name"], num_parts=2 if "part" in place else 1))
    assert WeightNames(tiny_model(family)).place(LAYER + name) == expected


def test_a_conversion_that_is_no_merge_of_experts_is_refused():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("hrm_text", num_hidden_layers=2))
    with pytest.raises(ValueError, match=r"layers.0.mlp.gate_up_proj.weight: .*'hrm_text' from it by Chunk"):
        WeightNames(model).place("model.layers.0.mlp.gate_up_proj.weight")


# --- refused before anything is read


def without(name: str):
    return lambda tensors: tensors.pop(name)


def with_one(name: str, tensor: torch.Tensor):
    return lambda tensors: tensors.update({name: tensor})


UP = EXPERT(2, "up")
REFUSED = {
    "missing": (without("model.norm.weight"), "no file has model.norm.weight, which the model needs"),
    "missing expert": (without(UP), f"no file has {UP}"),
    "missing part": (
        lambda tensors: [tensors.pop(EXPERT(i, "up")) for i in range(8)],
        "no file has all parts of model.layers.0.mlp.experts.gate_up_proj",
    ),
    "extra": (with_one("model.norm.bias", torch.ones(32)), "no weight of the model takes model.norm.bias"),
    "shape": (with_one("model.norm.weight", torch.ones(31)), "safetensors: model.norm.weight has shape [31], but"),
    "expert's shape": (with_one(UP, torch.ones(32, 24)), f"model.safetensors: {UP} has shape [32, 24]"),
    "dtype": (
        with_one("model.norm.weight", torch.ones(32).int()),
        "tensors: model.norm.weight is torch.int32; the",
    ),
    "twice": (with_one("model.layers.0.mlp.experts.gate_up_proj", torch.ones(8, 48, 32)), "is the same weight as"),
    "FP8 without config": (with_one(UP, torch.ones(24, 32).to(torch.float8_e4m3fn)), "has no quantization_config"),
}


@pytest.fixture
def no_reads(monkeypatch):
    monkeypatch.setattr(load, "run_tasks", lambda *args, **kwargs: pytest.fail("read before all was checked"))


@pytest.mark.parametrize("change, message", REFUSED.values(), ids=REFUSED)
def test_is_refused_by_name(change, message, tmp_path, no_reads):
    save_model(tmp_path, "qwen3_moe")
    edit(tmp_path, change)
    with pytest.raises(ValueError) as error:
        loaded(tmp_path)
    assert message in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_another_layout_than_the_model_s_is_refused(tmp_path, no_reads):
    save_model(tmp_path, "qwen3_moe", save_original_format=False)
    model = build_meta_model(tmp_path, FP32)
    shard(model, Layout(ep=2), 0)
    other = r"down_proj has shape \[8, 32, 24\], of which .* experts 4\.\.7, but .* experts 0\.\.3;"
    with pytest.raises(ValueError, match=other):
        load_weights(model, tmp_path, Layout(ep=2), 1, device=CPU)


def test_fp8_without_scales_is_refused(tmp_path, no_reads):
    tensors = make_fp8_dir(tmp_path / "in")
    tensors.pop("model.layers.0.mlp.up_proj.weight_scale_inv")
    save_sharded(tensors, tmp_path / "in")
    with pytest.raises(ValueError, match=r"safetensors: model.layers.0.mlp.up_proj.weight is torch.float8_e4m3fn and"):
        loaded(tmp_path / "in")


def test_another_quantisation_is_refused(tmp_path, no_reads):
    save_model(tmp_path, "llama")
    model = build_meta_model(tmp_path, FP32)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for call in (lambda: build_meta_model(tmp_path, FP32), lambda: load_weights(model, tmp_path, *ONE, device=CPU)):
        with pytest.raises(ValueError, match=r"config.json: quant_method is 'gptq'; accepted: 'fp8'"):
            call()


def test_a_file_cut_short_is_refused(tmp_path, no_reads):
    save_model(tmp_path, "llama")
    os.truncate(tmp_path / "model.safetensors", (tmp_path / "model.safetensors").stat().st_size - 1)
    with pytest.raises(ValueError, match=r"model.safetensors is cut short"):
        loaded(tmp_path)


def test_a_model_that_build_meta_model_did_not_make_is_refused(tmp_path, no_reads):
    save_model(tmp_path, "llama")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    with pytest.raises(ValueError, match=r"rotary_emb\.\w+ is in no checkpoint and on the meta device; use build_meta"):
        load_weights(model, tmp_path, *ONE, device=CPU)


def test_frequencies_of_older_checkpoints_are_left_out(tmp_path):
    save_model(tmp_path, "llama")
    edit(tmp_path, with_one("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4)))
    assert loaded(tmp_path)[1].num_skipped == 1
