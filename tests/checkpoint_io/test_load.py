"""The streaming loader: what `from_pretrained` loads, or the rank's slices of it, and nothing else is read."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import pool
from fp8_checkpoint import dequantize, make_fp8_dir, quantize, save_sharded
from tiny_models import CONFIGS, tiny_model, token_batch
from transformers import AutoModelForCausalLM, PreTrainedModel

from applications.fp8_cast_bf16 import main as fp8_cast_bf16
from coati_ext.checkpoint_io import stream
from coati_ext.checkpoint_io.checkpoint import read_checkpoint
from coati_ext.checkpoint_io.layout import Layout
from coati_ext.checkpoint_io.load import LoadReport, build_meta_model, load_weights
from coati_ext.checkpoint_io.load_plan import named_weights
from coati_ext.moe.experts import MoeExperts, is_experts_module
from coati_ext.utils.preflight import MOE_FAMILIES
from tests.checkpoint_io.meta_models import CPU, ONE, cut, edit, loaded, num_readers, save_model, shard

FP32, BF16 = torch.float32, torch.bfloat16


def tensors_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


def check_equal(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    found, expected = tensors_of(model), tensors_of(reference)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].device) == (tensor.dtype, tensor.device), name
        assert torch.equal(found[name], tensor), name
        # from_pretrained makes parameters trainable that their class froze (correction biases of two families)
        assert found[name].requires_grad == tensor.requires_grad or name.endswith(("correction_bias", "expert_bias")), (
            name
        )


FAMILIES = [name for name in CONFIGS if name == "llama" or CONFIGS[name]().model_type in MOE_FAMILIES]


# --- one rank


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("stacked", [False, True], ids=["per_expert", "stacked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_the_one_that_from_pretrained_loads(family, stacked, dtype, tmp_path):
    save_model(tmp_path, family, save_original_format=not stacked)
    names = read_checkpoint(tmp_path).tensors
    assert any(name.endswith("experts.gate_up_proj") for name in names) == (stacked and family != "llama")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    model, report = loaded(tmp_path, dtype)
    check_equal(model, reference)
    assert report == LoadReport(
        nbytes_read=sum(entry.nbytes for entry in names.values()),
        nbytes_total=sum(entry.nbytes for entry in names.values()),
        num_tensors=len(names),
        num_skipped=0,
    )
    assert (model.training, model.config.use_cache, model.name_or_path) == (False, False, str(tmp_path))
    assert model.config._attn_implementation == reference.config._attn_implementation
    if dtype == FP32:
        for parameter in (*model.parameters(), *reference.parameters()):
            parameter.data = parameter.data.clone()  # begins where torch begins: the last bit of products hangs on it
        assert torch.equal(model(token_batch()).logits, reference(token_batch()).logits)


def test_many_shards_and_strips_make_the_same_model(tmp_path, monkeypatch):
    save_model(tmp_path, "mixtral", max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 4
    monkeypatch.setattr(stream, "STRIP_ELEMENTS", 100)  # some 3 rows
    model, _ = loaded(tmp_path, num_workers=3)
    check_equal(model, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=FP32))


def test_a_meta_model_has_no_weights_but_its_computed_buffers(tmp_path):
    tiny_model("deepseek_v3").save_pretrained(tmp_path)
    model = build_meta_model(tmp_path, BF16)
    assert all(getattr(module, leaf).is_meta for _, module, leaf in named_weights(model))
    assert not model.model.rotary_emb.inv_freq.is_meta
    assert model.model.layers[1].mlp.gate.e_score_correction_bias.dtype == FP32  # what the class keeps so
    assert model.lm_head.weight.dtype == BF16


def test_scaled_rotary_frequencies_are_those_of_from_pretrained(tmp_path):
    scaled = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, rope_theta=5e5)
    save_model(tmp_path, "llama", rope_parameters=scaled | dict(original_max_position_embeddings=16))
    model, _ = loaded(tmp_path)
    check_equal(model, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=FP32))


def test_a_buffer_that_nothing_computes_is_refused(tmp_path, monkeypatch):
    save_model(tmp_path, "llama")
    monkeypatch.setattr(PreTrainedModel, "_init_weights", lambda self, module: None)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM: model.rotary_emb.\w+ is in no checkpoint, and _init_"):
        build_meta_model(tmp_path, FP32)


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight", "both"])
def test_tied_weights_are_one_parameter(kept, tmp_path):
    save_model(tmp_path, "llama", tie_word_embeddings=True)

    def change(tensors):
        weight = tensors.pop("model.embed_tokens.weight")
        both = ("model.embed_tokens.weight", "lm_head.weight")
        tensors |= {name: weight.clone() for name in (both if kept == "both" else (kept,))}

    edit(tmp_path, change)
    model, report = loaded(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    check_equal(model, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=FP32))
    assert report.nbytes_read == report.nbytes_total


def test_a_tied_weight_that_sharding_made_a_parameter_of_its_own_is_filled(tmp_path):
    save_model(tmp_path, "llama", tie_word_embeddings=True)
    model = build_meta_model(tmp_path, FP32)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    load_weights(model, tmp_path, *ONE, device=CPU)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    check_equal(model, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=FP32))


def test_tied_weights_that_differ_are_refused(tmp_path):
    save_model(tmp_path, "llama", tie_word_embeddings=True)
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}))
    with pytest.raises(ValueError, match=r"model.safetensors: \S+ differs from \S+weight, but config.json ties"):
        loaded(tmp_path)


def test_parameters_stay_frozen_and_marked(tmp_path):
    save_model(tmp_path, "llama")
    model = build_meta_model(tmp_path, FP32)
    model.lm_head.weight.requires_grad_(False).mark = 7
    load_weights(model, tmp_path, *ONE, device=CPU)
    assert (model.lm_head.weight.requires_grad, model.lm_head.weight.mark) == (False, 7)
    assert model.model.norm.weight.requires_grad


def test_generation_settings_are_those_of_the_directory(tmp_path):
    save_model(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6}')
    assert build_meta_model(tmp_path, FP32).generation_config.temperature == 0.6


def test_a_report_is_one_line():
    report = LoadReport(nbytes_read=12_345_678_901, nbytes_total=689 * 10**9, num_tensors=9, num_skipped=0)
    assert report.format() == "read 12.3 GB of 689.0 GB (1.8%)"
    tiny = LoadReport(nbytes_read=85_056, nbytes_total=170_112, num_tensors=9, num_skipped=0)
    assert tiny.format() == "read 85.1 KB of 170.1 KB (50.0%)"


# --- many ranks

LAYOUTS = {
    "mixtral": [dict(ep=2), dict(ep=4, dp=8), dict(pp=2), dict(tp=2), dict(ep=2, pp=2, tp=2, dp=4)],
    "qwen3_moe": [dict(ep=8), dict(ep=2, pp=2), dict(dp=3)],
    "deepseek_v3": [dict(ep=4, pp=3), dict(pp=2, num_layers_per_stage=(1, 2))],
    "llama": [dict(tp=2, pp=2), dict(dp=2)],
}


@pytest.mark.parametrize("stacked", [False, True], ids=["per_expert", "stacked"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("family, sizes", [(f, s) for f, all_ in LAYOUTS.items() for s in all_], ids=str)
def test_each_rank_reads_its_slices_and_no_more(family, sizes, tied, stacked, tmp_path):
    """The bytes that all ranks read are each tensor's times `num_readers`, and so much for a rank of its slices."""
    save_model(tmp_path, family, tie_word_embeddings=tied, save_original_format=not stacked)
    layout = Layout(**sizes)
    full = tensors_of(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=FP32))
    nbytes, seen = 0, set()
    for rank in range(layout.world_size):
        model = build_meta_model(tmp_path, FP32)
        shard(model, layout, rank)
        nbytes += load_weights(model, tmp_path, layout, rank, device=CPU, num_workers=1).nbytes_read
        for name, module, leaf in named_weights(model):
            expected = cut(name, full[name], layout, layout.coordinates(rank))
            assert torch.equal(getattr(module, leaf), expected), (rank, name)
            seen.add(name)
        assert not any(buffer.is_meta for buffer in model.buffers())
    assert seen == {name for name, tensor in full.items() if "inv_freq" not in name}
    entries = read_checkpoint(tmp_path).tensors.values()
    assert nbytes == sum(entry.nbytes * num_readers(entry.name, layout, tied=tied) for entry in entries)


def logits_of_ep_rank(directory: Path) -> tuple[torch.Tensor, int, bool]:
    model = build_meta_model(directory, FP32)
    for path, module in list(model.named_modules()):
        if is_experts_module(module):
            model.set_submodule(path, MoeExperts(module, ep_group=dist.group.WORLD, name=path))
    report = load_weights(model, directory, Layout(ep=dist.get_world_size()), dist.get_rank(), device=CPU)
    return model(token_batch()).logits.detach(), report.nbytes_read


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_two_ranks_with_half_of_the_experts_are_the_model(family, tmp_path):
    save_model(tmp_path, family)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=FP32)(token_batch()).logits
    for logits, nbytes_read in pool(2).run(logits_of_ep_rank, tmp_path):
        assert torch.allclose(logits, expected, atol=1e-5)  # sums of fp32 in another order
        assert nbytes_read < 0.8 * read_checkpoint(tmp_path).nbytes


# --- FP8


@pytest.mark.parametrize("strip", [stream.STRIP_ELEMENTS, 256 * 128], ids=["whole", "strips"])
def test_fp8_is_what_the_cast_makes_of_it(strip, tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "STRIP_ELEMENTS", strip)
    make_fp8_dir(tmp_path / "fp8", mtp=True)
    arguments = ["--input-fp8-hf-path", tmp_path / "fp8", "--output-bf16-hf-path", tmp_path / "bf16", "--mtp", "drop"]
    assert fp8_cast_bf16([*map(str, arguments)]) == 0
    model, report = loaded(tmp_path / "fp8", BF16)
    check_equal(model, AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=BF16))
    assert not hasattr(model.config, "quantization_config")
    checkpoint = read_checkpoint(tmp_path / "fp8")
    mtp = [entry for name, entry in checkpoint.tensors.items() if name.startswith("model.layers.2.")]
    assert report.nbytes_read == checkpoint.nbytes - sum(entry.nbytes for entry in mtp)
    assert report.num_skipped == len(mtp) > 0
    assert f"left out {len(mtp)} tensors" in report.format()


def test_fp8_for_an_fp32_model_is_rounded_to_fp32_only(tmp_path):
    tensors = make_fp8_dir(tmp_path / "in")
    model, _ = loaded(tmp_path / "in")
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    expected = dequantize(tensors[name], tensors[name + "_scale_inv"]).float()
    assert torch.equal(model.get_parameter(name), expected)


def test_each_ep_rank_dequantises_its_experts(tmp_path):
    tensors = make_fp8_dir(tmp_path / "in")
    layout = Layout(ep=2)
    for rank in range(2):
        model = build_meta_model(tmp_path / "in", FP32)
        shard(model, layout, rank)
        load_weights(model, tmp_path / "in", layout, rank, device=CPU)
        experts = model.model.layers[1].mlp.experts
        for local in range(2):
            names = [f"model.layers.1.mlp.experts.{2 * rank + local}.{p}_proj.weight" for p in ("gate", "up", "down")]
            gate, up, down = (dequantize(tensors[name], tensors[name + "_scale_inv"]).float() for name in names)
            assert torch.equal(experts.gate_up_proj[local], torch.cat([gate, up])), (rank, local)
            assert torch.equal(experts.down_proj[local], down), (rank, local)


def test_stacked_fp8_experts_are_dequantised_one_by_one(tmp_path):
    """Blocks begin anew in each expert, and 2I = 272 rows are no multiple of them."""
    make_fp8_dir(tmp_path / "in")
    weights = tensors_of(loaded(tmp_path / "in")[0])
    config = (tmp_path / "in" / "config.json").read_text()
    tensors, expected = {}, {}
    for name, weight in weights.items():
        if ".experts." in name:
            pairs = [quantize(matrix.detach()) for matrix in weight]
            tensors[name], tensors[name + "_scale_inv"] = (torch.stack(part) for part in zip(*pairs, strict=True))
            expected[name] = torch.stack([dequantize(*pair).float() for pair in pairs])
        elif "inv_freq" not in name:
            tensors[name] = expected[name] = weight.detach()
    save_sharded(tensors, tmp_path / "stacked")
    (tmp_path / "stacked" / "config.json").write_text(config)
    for layout in (Layout(), Layout(ep=2)):
        for rank in range(layout.world_size):
            model = build_meta_model(tmp_path / "stacked", FP32)
            shard(model, layout, rank)
            load_weights(model, tmp_path / "stacked", layout, rank, device=CPU)
            for name, value in expected.items():
                found = tensors_of(model)[name]
                assert torch.equal(found, cut(name, value, layout, layout.coordinates(rank))), name


def test_tp_ranks_dequantise_rows_and_columns(tmp_path):
    sizes = dict(hidden_size=256, intermediate_size=512, num_attention_heads=2, num_key_value_heads=2)
    make_fp8_dir(tmp_path / "in", "llama", **sizes)
    full, layout = tensors_of(loaded(tmp_path / "in")[0]), Layout(tp=2)
    for rank in range(2):
        model = build_meta_model(tmp_path / "in", FP32)
        shard(model, layout, rank)
        load_weights(model, tmp_path / "in", layout, rank, device=CPU)
        for name, tensor in model.named_parameters():
            assert torch.equal(tensor, cut(name, full[name], layout, layout.coordinates(rank))), name


# --- memory

MEMORY = """
import sys
from pathlib import Path
import torch
from coati_ext.checkpoint_io.layout import Layout
from coati_ext.checkpoint_io.load import build_meta_model, load_weights
def resident(what):
    return int(Path("/proc/self/status").read_text().split(what + ":")[1].split()[0]) * 1024
before = resident("VmRSS")
model = build_meta_model(sys.argv[1], torch.float32)
built = resident("VmHWM") - before
load_weights(model, sys.argv[1], Layout(), 0, device="cpu", num_workers=2)
print(built, resident("VmHWM") - before)
"""


def test_memory_is_that_of_the_model_and_of_the_strips(tmp_path):
    sizes = dict(vocab_size=1 << 20, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    tiny_model("llama", **sizes, tie_word_embeddings=True).save_pretrained(tmp_path)
    nbytes = read_checkpoint(tmp_path).nbytes
    result = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    built, grown = map(int, result.stdout.split()[-2:])
    strips = 2 * 64 << 20  # of fp32, a worker
    assert built < 30 << 20 < nbytes / 8
    assert nbytes < grown < nbytes + strips + (60 << 20) < 1.8 * nbytes
