"""BF16 -> FP8 of whole checkpoints: which weights, how exact, and that the way back is the other converter's."""

import json
from pathlib import Path

import pytest
import torch
from fp8_checkpoint import dequantize, make_fp8_dir, quantize
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from applications import bf16_cast_fp8, fp8_cast_bf16

INDEX = "model.safetensors.index.json"
E4M3 = torch.float8_e4m3fn


def to_fp8(source: Path, output: Path, *flags: str) -> int:
    return bf16_cast_fp8.main(["--input-bf16-hf-path", str(source), "--output-fp8-hf-path", str(output), *flags])


def to_bf16(source: Path, output: Path, *flags: str) -> int:
    return fp8_cast_bf16.main(["--input-fp8-hf-path", str(source), "--output-bf16-hf-path", str(output), *flags])


def load_dir(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp8")
    return folder / "in", make_fp8_dir(folder / "in", mtp=True)


@pytest.fixture(scope="module")
def bf16(fp8):
    output = fp8[0].with_name("bf16")
    assert to_bf16(fp8[0], output) == 0
    return output


@pytest.mark.parametrize("like", [True, False])
def test_the_published_weights_are_quantised_and_no_others(like, fp8, bf16, tmp_path):
    folder, before = fp8
    assert to_fp8(bf16, tmp_path / "out", *(["--like", str(folder)] if like else [])) == 0
    after = load_dir(tmp_path / "out")
    assert {n: (t.dtype, t.shape) for n, t in before.items()} == {n: (t.dtype, t.shape) for n, t in after.items()}
    found, published = (json.loads((d / "config.json").read_text()) for d in (tmp_path / "out", folder))
    if like:
        assert found["quantization_config"] == published["quantization_config"]
    else:
        kept = found["quantization_config"].pop("modules_to_not_convert")
        assert found["quantization_config"] == published["quantization_config"]
        assert {"lm_head", "model.layers.1.mlp.gate", "model.layers.2.eh_proj"} <= set(kept)
        assert not any("experts" in name or "self_attn" in name for name in kept)


def test_values_and_scales_are_the_plain_loop_s(fp8, bf16, tmp_path, capsys):
    assert to_fp8(bf16, tmp_path / "out") == 0
    after, weights = load_dir(tmp_path / "out"), load_dir(bf16)
    errors, squares = 0.0, 0.0
    for name, value in after.items():
        if value.dtype != E4M3:
            continue
        quantised, scale = quantize(weights[name])
        assert torch.equal(after[name + "_scale_inv"], scale), name
        assert torch.equal(value.view(torch.uint8), quantised.view(torch.uint8)), name
        exact = weights[name].double()
        error = dequantize(value, scale) - exact
        assert (error.abs() <= exact.abs() / 16 + scale.max() * 2**-10).all()
        errors, squares = errors + error.square().sum(), squares + exact.square().sum()
    assert f"error {(errors / squares).sqrt():.2%} of the weights' RMS" in capsys.readouterr().out
    assert (errors / squares).sqrt() < 0.03


def test_back_and_forth_stays_where_it_is(fp8, bf16, tmp_path):
    """bf16 -> FP8 -> bf16 -> FP8: what was quantised once stays, for powers of two are exact in bf16."""
    assert to_fp8(bf16, tmp_path / "one", "--scale_fmt", "ue8m0") == 0
    assert to_bf16(tmp_path / "one", tmp_path / "two", "--verify", "all") == 0
    assert to_fp8(tmp_path / "two", tmp_path / "three", "--scale_fmt", "ue8m0") == 0
    one, three = load_dir(tmp_path / "one"), load_dir(tmp_path / "three")
    for name, value in one.items():
        if value.dtype == E4M3:  # powers of two are exact in bf16
            assert torch.equal(
                dequantize(value, one[name + "_scale_inv"]), dequantize(three[name], three[name + "_scale_inv"])
            ), name
    scale = one["model.layers.0.mlp.down_proj.weight_scale_inv"]
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))


def test_a_checkpoint_without_its_mtp_layer_is_quantised_like_the_published_one(fp8, tmp_path):
    assert to_bf16(fp8[0], tmp_path / "bf16", "--mtp", "drop") == 0
    assert to_fp8(tmp_path / "bf16", tmp_path / "out", "--like", str(fp8[0])) == 0
    assert load_dir(tmp_path / "out").keys() == {n for n in fp8[1] if not n.startswith("model.layers.2.")}


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_transformers_knows_the_form(family, tmp_path):
    """It builds FP8 linears for exactly the weights that are FP8 in the files."""
    shapes = dict(hidden_size=128, intermediate_size=128)
    if family == "qwen3_moe":
        shapes |= dict(moe_intermediate_size=128, head_dim=32)
    make_fp8_dir(tmp_path / "in", family, **shapes)
    assert to_bf16(tmp_path / "in", tmp_path / "bf16") == 0
    assert to_fp8(tmp_path / "bf16", tmp_path / "out") == 0
    config = AutoConfig.from_pretrained(tmp_path / "out").quantization_config
    assert config["weight_block_size"] == [128, 128]
    assert {n for n, t in load_dir(tmp_path / "out").items() if t.dtype == E4M3} == {
        n for n, t in load_dir(tmp_path / "in").items() if t.dtype == E4M3
    }
    from transformers import FineGrainedFP8Config

    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.bfloat16
    )
    assert to_bf16(tmp_path / "out", tmp_path / "back") == 0
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, ours.get_parameter(name)), name


def test_what_cannot_be_quantised_is_named(fp8, bf16, tmp_path, capsys):
    assert to_fp8(fp8[0], tmp_path / "out") == 1
    assert "is torch.float8_e4m3fn already" in capsys.readouterr().err
    make_fp8_dir(tmp_path / "other", "mixtral")
    assert to_fp8(bf16, tmp_path / "out", "--like", str(tmp_path / "other")) == 1
    assert "in FP8, and" in capsys.readouterr().err
    assert to_fp8(bf16, tmp_path / "out", "--like", str(bf16)) == 1
    assert "has no quantization_config" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        to_fp8(bf16, tmp_path / "out", "--like", str(fp8[0]), "--scale_fmt", "ue8m0")


def test_a_weight_that_is_not_finite_is_named(bf16, tmp_path, capsys):
    from fp8_checkpoint import save_sharded

    tensors = load_dir(bf16)
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors[name][5, 5] = float("inf")
    save_sharded(tensors, tmp_path / "in")
    (tmp_path / "in" / "config.json").write_text((bf16 / "config.json").read_text())
    assert to_fp8(tmp_path / "in", tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert name in error
    assert "NaN or infinity" in error
    assert not (tmp_path / "out").exists()
