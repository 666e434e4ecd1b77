"""FP8 -> BF16 of whole checkpoints through the command, against a dequantisation in float64 and transformers itself."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from fp8_checkpoint import dequantize, make_fp8_dir, save_sharded
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import token_batch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from applications.fp8_cast_bf16 import main
from coati_ext.checkpoint_io.verify_fp8 import errors_in_half_steps

ROOT = Path(__file__).parents[2]
INDEX = "model.safetensors.index.json"
E4M3 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """(directory, its tensors): a tiny DeepSeek-V3 with ragged shapes and an MTP layer."""
    folder = tmp_path_factory.mktemp("fp8") / "model"
    return folder, make_fp8_dir(folder, mtp=True)


def convert(source: Path, output: Path, *flags: str) -> int:
    return main(["--input-fp8-hf-path", str(source), "--output-bf16-hf-path", str(output), *flags])


def load_dir(folder: Path) -> dict[str, torch.Tensor]:
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    files = {file: load_file(folder / file) for file in set(weight_map.values())}
    return {name: files[file][name] for name, file in weight_map.items()}


def copy_of(source: Path, target: Path, **changed_json: dict) -> dict[str, torch.Tensor]:
    """Another directory with the same content, to be damaged; returns its tensors."""
    tensors = load_dir(source)
    save_sharded(tensors, target)
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changed_json))
    return tensors


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(f.relative_to(folder)): (f.read_bytes(), f.stat().st_mtime_ns) for f in folder.rglob("*") if f.is_file()
    }


def test_every_tensor_is_the_rounded_product(source, tmp_path):
    folder, tensors = source
    before = snapshot(folder)
    assert convert(folder, tmp_path / "out") == 0
    made = load_dir(tmp_path / "out")
    assert made.keys() == {name for name in tensors if not name.endswith("_scale_inv")}
    num_fp8 = 0
    for name, value in made.items():
        expected = tensors[name]
        if expected.dtype == E4M3:
            num_fp8 += 1
            expected = dequantize(expected, tensors[name + "_scale_inv"]).float().bfloat16()
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected), name
    assert num_fp8 > 20
    assert snapshot(folder) == before


def test_the_output_is_a_complete_model_directory(source, tmp_path):
    folder, _ = source
    out = tmp_path / "out"
    assert convert(folder, out) == 0
    assert {f.name for f in out.iterdir()} == {f.name for f in folder.iterdir()}
    config, before = (json.loads((d / "config.json").read_text()) for d in (out, folder))
    assert config == {k: v for k, v in before.items() if k != "quantization_config"}
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"  # the second for transformers before 5
    index = json.loads((out / INDEX).read_text())
    made = load_dir(out)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in made.values())
    where = json.loads((folder / INDEX).read_text())["weight_map"]
    assert index["weight_map"] == {name: where[name] for name in sorted(made)}
    for file in set(where.values()):
        with safe_open(out / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        assert (out / file).stat().st_mode & 0o777 == (folder / "config.json").stat().st_mode & 0o777


def loaded_quietly(folder: Path, caplog) -> torch.nn.Module:
    transformers_logging.enable_propagation()
    try:
        with caplog.at_level(logging.WARNING):
            model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    finally:
        transformers_logging.disable_propagation()
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING], caplog.text
    assert not any(info.values()), info
    return model


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "mixtral"])
def test_transformers_loads_it_without_a_warning(family, tmp_path, caplog):
    tensors = make_fp8_dir(tmp_path / "in", family, mtp=family == "deepseek_v3")
    flags = ["--mtp", "drop"] if family == "deepseek_v3" else []
    assert convert(tmp_path / "in", tmp_path / "out", *flags) == 0
    model = loaded_quietly(tmp_path / "out", caplog)
    exact = {
        name: dequantize(value, tensors[name + "_scale_inv"]).bfloat16() if value.dtype == E4M3 else value
        for name, value in tensors.items()
        if not name.endswith("_scale_inv") and not name.startswith("model.layers.2.")
    }
    save_sharded(exact, tmp_path / "exact")
    shutil.copyfile(tmp_path / "out" / "config.json", tmp_path / "exact" / "config.json")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "exact")
    with torch.no_grad():
        assert torch.equal(model.float()(token_batch()).logits, reference.float()(token_batch()).logits)


def test_the_published_mtp_layer_loads_without_a_warning(tmp_path, caplog):
    """transformers expects it at layer 61, where the published model has it."""
    small = dict(
        num_hidden_layers=61, first_k_dense_replace=61, hidden_size=16, intermediate_size=16, q_lora_rank=8,
        kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4, vocab_size=16,
    )  # fmt: skip
    make_fp8_dir(tmp_path / "in", mtp=True, **small)
    assert convert(tmp_path / "in", tmp_path / "out") == 0
    loaded_quietly(tmp_path / "out", caplog)
    assert any(".layers.61." in name for name in load_dir(tmp_path / "out"))


def test_mtp_layers_are_dropped_when_asked(source, tmp_path):
    folder, _ = source
    assert convert(folder, tmp_path / "keep") == 0
    assert convert(folder, tmp_path / "out", "--mtp", "drop", "--verify", "all") == 0
    kept, dropped = load_dir(tmp_path / "keep"), load_dir(tmp_path / "out")
    gone = kept.keys() - dropped.keys()
    assert gone == {name for name in kept if name.startswith("model.layers.2.")}
    assert all(torch.equal(kept[name], value) for name, value in dropped.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_layers_of_a_vision_tower_are_no_mtp_layers(source, tmp_path):
    tensors = copy_of(source[0], tmp_path / "in")
    tensors["vision_tower.encoder.layers.7.weight"] = torch.ones(2, 2)
    save_sharded(tensors, tmp_path / "in")
    assert convert(tmp_path / "in", tmp_path / "out", "--mtp", "drop") == 0
    assert "vision_tower.encoder.layers.7.weight" in load_dir(tmp_path / "out")


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu], ids=str)
def test_other_scales_and_blocks(scale_dtype, tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for i, shape in enumerate([(130, 200), (1, 1), (129, 127), (3, 65, 40), (64, 32)]):
        weight = torch.randn(shape, generator=generator)
        grid = (*shape[:-2], -(-shape[-2] // 64), -(-shape[-1] // 32))
        scale = torch.exp2(torch.randint(-9, 3, grid, generator=generator).float())
        dtype = torch.float8_e5m2 if i % 2 else torch.float8_e4m3fn
        tensors[f"model.layers.0.{i}.weight"] = weight.to(dtype)
        tensors[f"model.layers.0.{i}.weight_scale_inv"] = scale.to(scale_dtype)
    save_sharded(tensors, tmp_path / "in")
    quantization = {"quant_method": "fp8", "weight_block_size": [64, 32]}
    (tmp_path / "in" / "config.json").write_text(json.dumps({"text_config": {"quantization_config": quantization}}))
    assert convert(tmp_path / "in", tmp_path / "out", "--verify", "all") == 0
    for name, value in load_dir(tmp_path / "out").items():
        weights, scales = tensors[name], tensors[name + "_scale_inv"]
        weights, scales = (t if t.dim() == 3 else t[None] for t in (weights, scales))
        expected = torch.stack([dequantize(w, s, (64, 32)) for w, s in zip(weights, scales, strict=True)])
        assert torch.equal(value, expected.float().bfloat16().view(value.shape)), name
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"text_config": {}, "dtype": "bfloat16"}


def test_a_single_file_stays_a_single_file(tmp_path):
    tensors = make_fp8_dir(tmp_path / "in", "mixtral", num_shards=1)
    for file in tmp_path.glob("in/model*"):
        file.unlink()
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    assert convert(tmp_path / "in", tmp_path / "out", "--verify") == 0
    assert not (tmp_path / "out" / INDEX).exists()
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


WEIGHT = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"


def without_scale(tensors, folder):
    del tensors[WEIGHT + "_scale_inv"]
    return f"{WEIGHT} is torch.float8_e4m3fn and {WEIGHT}_scale_inv is nowhere"


def with_short_scale(tensors, folder):
    tensors[WEIGHT + "_scale_inv"] = tensors[WEIGHT + "_scale_inv"][:1].contiguous()
    return f"{WEIGHT}_scale_inv has shape [1, 2], but {WEIGHT} of [192, 256] in blocks of [128, 128] takes [2, 2]"


def with_integer_scale(tensors, folder):
    tensors[WEIGHT + "_scale_inv"] = tensors[WEIGHT + "_scale_inv"].int()
    return f"{WEIGHT}_scale_inv is torch.int32; accepted"


def with_bf16_weight(tensors, folder):
    tensors[WEIGHT] = tensors[WEIGHT].bfloat16()
    return f"{WEIGHT}_scale_inv are scales, but the weight is torch.bfloat16, not FP8"


def without_weight(tensors, folder):
    del tensors[WEIGHT]
    return f"{WEIGHT}_scale_inv are scales, but there is no such weight"


@pytest.mark.parametrize(
    "damage", [without_scale, with_short_scale, with_integer_scale, with_bf16_weight, without_weight]
)
def test_a_wrong_tensor_is_named_before_anything_is_written(damage, source, tmp_path, capsys):
    tensors = copy_of(source[0], tmp_path / "in")
    expected = damage(tensors, tmp_path / "in")
    save_sharded(tensors, tmp_path / "in")
    assert convert(tmp_path / "in", tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert expected in error
    assert ".safetensors" in error
    assert sorted(f.name for f in tmp_path.iterdir()) == ["in"]


@pytest.mark.parametrize(
    "config, expected",
    [
        ({"quantization_config": None}, "has no quantization_config"),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8'; expected a mapping"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method is 'gptq'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size is None"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 0]}},
            "weight_block_size is [128, 0]",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}},
            "activation_scheme 'static' is not supported",
        ),
    ],
)
def test_another_quantisation_is_refused(config, expected, source, tmp_path, capsys):
    copy_of(source[0], tmp_path / "in", **config)
    assert convert(tmp_path / "in", tmp_path / "out") == 1
    assert expected in capsys.readouterr().err


def test_a_shard_cut_short_is_named(source, tmp_path, capsys):
    copy_of(source[0], tmp_path / "in")
    file = sorted((tmp_path / "in").glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-1])
    assert convert(tmp_path / "in", tmp_path / "out") == 1
    assert f"{file} is cut short" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_output_may_not_be_in_the_input(source, capsys):
    folder, _ = source
    before = snapshot(folder)
    for output in (folder, folder / "bf16"):
        assert convert(folder, output, "--overwrite") == 1
        assert "is never written to" in capsys.readouterr().err
    assert snapshot(folder) == before


def test_flags_that_cannot_be_met_are_named(source, tmp_path, capsys):
    assert convert(source[0], tmp_path / "out", "--device", "cuda:9") == 1
    assert "device 'cuda:9' is not here" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        convert(source[0], tmp_path / "out", "--workers", "0")
    assert "--workers: expected 1 or more, got '0'" in capsys.readouterr().err


def test_a_number_of_workers_beyond_all_reason_works(source, tmp_path):
    assert convert(source[0], tmp_path / "out", "--workers", "99999999999999999999") == 0


def test_nothing_to_convert_is_an_error(source, tmp_path, capsys):
    assert convert(source[0], tmp_path / "out") == 0
    config = json.loads((source[0] / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    assert convert(tmp_path / "out", tmp_path / "again") == 1
    assert "has no FP8 tensor: it needs no conversion" in capsys.readouterr().err
    make_fp8_dir(tmp_path / "mixtral", "mixtral")
    assert convert(tmp_path / "mixtral", tmp_path / "again", "--mtp", "drop") == 1
    assert "has no multi-token-prediction layer" in capsys.readouterr().err


# --verify


def test_verify_only_compares_an_output_that_exists(source, tmp_path, capsys):
    assert convert(source[0], tmp_path / "out") == 0
    before = snapshot(tmp_path / "out")
    capsys.readouterr()
    for amount in ("sample", "all"):
        assert convert(source[0], tmp_path / "out", "--verify", amount) == 0
        printed = capsys.readouterr().out
        assert "exists: only comparing it" in printed
        assert "PASS" in printed
    assert snapshot(tmp_path / "out") == before


def set_tensor(folder: Path, name: str, change) -> None:
    where = json.loads((folder / INDEX).read_text())["weight_map"][name]
    tensors = load_file(folder / where)
    tensors[name] = change(tensors[name])
    save_file(tensors, folder / where, metadata={"format": "pt"})


def next_bf16(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value.view(torch.int16)[-1, -1] += 1
    return value


def test_verify_compares_bits():
    """Where a product is zero, or a power of two below which the steps are half as wide."""
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3)[None]
    for scale in (1.0, 0.3, 2.0**-20):
        scales = torch.full((1, 2), scale)
        right = dequantize(codes, scales).float().bfloat16()
        error, num_wrong = errors_in_half_steps(codes, scales, right, (128, 128))
        assert num_wrong == 0 and error < 1.001  # two roundings
        for step in (1, -1):
            wrong = (right.view(torch.int16) + step).view(torch.bfloat16)
            assert errors_in_half_steps(codes, scales, wrong, (128, 128))[1] >= 254  # all but NaN


GATE = "model.layers.1.mlp.gate.weight"


@pytest.mark.parametrize(
    "name, change, expected",
    [
        (WEIGHT, next_bf16, f"{WEIGHT}: 1 elements of rows 0 to 191 are not the rounded product"),
        (GATE, next_bf16, f"{GATE}: differs from the input"),
        (WEIGHT, lambda value: value.float(), f"{WEIGHT} is torch.float32 [192, 256], not torch.bfloat16"),
        (WEIGHT, lambda value: value[1:].contiguous(), f"{WEIGHT} is torch.bfloat16 [191, 256]"),
    ],
    ids=["one_step", "not_fp8", "dtype", "shape"],
)
def test_verify_finds_a_wrong_tensor(name, change, expected, source, tmp_path, capsys):
    assert convert(source[0], tmp_path / "out") == 0
    set_tensor(tmp_path / "out", name, change)
    assert convert(source[0], tmp_path / "out", "--verify", "all") == 1
    printed = capsys.readouterr().out
    assert expected in printed
    assert "PASS" not in printed


def test_verify_finds_a_wrong_directory(source, tmp_path, capsys):
    out = tmp_path / "out"
    assert convert(source[0], out) == 0
    index = json.loads((out / INDEX).read_text())
    index["metadata"]["total_size"] -= 1
    (out / INDEX).write_text(json.dumps(index))
    (out / "config.json").write_text((source[0] / "config.json").read_text())
    assert convert(source[0], out, "--verify") == 1
    printed = capsys.readouterr().out
    assert "total_size" in printed
    assert "still has a quantization_config" in printed


def test_the_sample_has_a_tensor_of_every_shard(tmp_path):
    weight, scale = torch.ones(2, 2).to(E4M3), torch.ones(1, 1)
    tensors = {}
    for i in range(600):  # more than a sample has
        tensors |= {f"{i:04d}.weight": weight.clone(), f"{i:04d}.weight_scale_inv": scale.clone()}
    save_sharded(tensors, tmp_path / "in", 300)
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "in" / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    assert convert(tmp_path / "in", tmp_path / "out") == 0
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    for shard in (shards[7], shards[123], shards[-1]):
        before = shard.read_bytes()
        save_file({n: torch.zeros_like(t) for n, t in load_file(shard).items()}, shard, metadata={"format": "pt"})
        assert convert(tmp_path / "in", tmp_path / "out", "--verify") == 1
        shard.write_bytes(before)
    assert convert(tmp_path / "in", tmp_path / "out", "--verify") == 0


# What transformers makes of the same files


def test_transformers_own_dequantisation_is_wrong_on_ragged_blocks_and_ours_is_not(tmp_path):
    """transformers takes rows // scale rows for the block: of 192 rows and 2 scales, 96. Only this weight is ragged."""
    from transformers import FineGrainedFP8Config

    whole_blocks = dict(
        intermediate_size=256, moe_intermediate_size=128, q_lora_rank=128, qk_nope_head_dim=64, v_head_dim=64
    )  # fmt: skip
    tensors = make_fp8_dir(tmp_path / "in", **whole_blocks)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "in", quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.bfloat16
    )
    assert convert(tmp_path / "in", tmp_path / "out") == 0
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    exact = dequantize(tensors[WEIGHT], tensors[WEIGHT + "_scale_inv"]).bfloat16()
    assert torch.equal(ours.get_parameter(WEIGHT), exact)
    wrong = {n for n, p in theirs.named_parameters() if not torch.equal(p, ours.get_parameter(n))}
    assert wrong == {f"model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight" for i in range(2)}
    assert (theirs.get_parameter(WEIGHT) - exact).abs().max() > 0.01 * exact.abs().max()


def test_transformers_refuses_the_published_shape_and_we_do_not(tmp_path):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = torch.randn(576, 256).to(torch.float8_e4m3fn)
    scale = torch.rand(5, 2)
    with pytest.raises(ValueError, match="not divisible"):
        Fp8Dequantize(None)._dequantize_one(weight, scale)
    save_file({"a.weight": weight, "a.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    out = tmp_path.with_name("out")
    assert convert(tmp_path, out, "--verify", "all") == 0
    assert torch.equal(load_file(out / "model.safetensors")["a.weight"], dequantize(weight, scale).bfloat16())
