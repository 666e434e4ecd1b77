"""Stacked adapters of PEFT 0.18 are read as such and said to be; what nothing tells apart is refused."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_model

from applications import convert_adapter as application
from tests.checkpoint_io.adapters import WEIGHTS, edit_config, edit_tensors, lora_model, save_base, saved
from tests.checkpoint_io.stock_peft import convert, same_bits, stock_adapter


@pytest.fixture
def stock(tmp_path):
    """An adapter of a tiny Mixtral as stock PEFT writes it."""
    return stock_adapter(tmp_path / "stock", save_base("mixtral", tmp_path), family="mixtral")[0]


def to_0_18(tensors: dict[str, torch.Tensor], num_experts: int) -> None:
    """Rewrite stacked tensors as PEFT 0.18 has them: dimensions of the parameter taken the other way round."""
    for key in [key for key in tensors if ".experts." in key and "lora_A" in key]:
        lora_A, lora_B = tensors[key], tensors[key.replace("lora_A", "lora_B")]
        A = lora_A.view(num_experts, -1, lora_A.shape[1])
        B = lora_B.view(lora_B.shape[0], -1, num_experts).permute(2, 0, 1)
        tensors[key] = B.transpose(1, 2).reshape(-1, B.shape[1]).contiguous()
        tensors[key.replace("lora_A", "lora_B")] = A.permute(2, 1, 0).reshape(A.shape[2], -1).contiguous()


def in_0_18(adapter: Path, **config) -> Path:
    old = Path(shutil.copytree(adapter, adapter.with_name("old")))
    edit_tensors(old, lambda tensors: to_0_18(tensors, 4))
    edit_config(old, **config)
    return old


@pytest.mark.parametrize(
    ("version", "flags", "reason"),
    [
        ("0.18.1", [], "recorded as peft_version 0.18.1"),
        ("0.18.1.dev0@1f2e3d", [], "recorded as peft_version 0.18.1.dev0@1f2e3d"),
        (None, [], "told by the shapes"),
        ("0.21.2", ["--peft-orientation", "0.18"], "as --peft-orientation 0.18 says"),
    ],
)
@pytest.mark.parametrize("to", ["per-expert", "stacked"])
def test_peft_0_18_is_read_and_told(version, flags, reason, to, stock, capsys):
    old = in_0_18(stock, peft_version=version)
    assert not same_bits(old, stock)
    output = old.with_name("output")
    assert application.main(["--adapter", str(old), "--output", str(output), "--to", to, *flags]) == 0
    assert same_bits(output, convert(stock, to))
    told = capsys.readouterr().out
    assert f"orientation of PEFT 0.18, {reason}: the roles of lora_A and lora_B are swapped back" in told
    assert f"tensors   12 in -> {len(load_file(output / WEIGHTS))} out" in told


@pytest.mark.parametrize(("target", "width"), [("experts.down_proj", 32), ("experts.gate_up_proj", 16)])
def test_equal_dimensions_need_a_version_or_the_flag(target, width, tmp_path):
    size = {"intermediate_size": width}
    tiny_model("mixtral", **size).save_pretrained(tmp_path / "square")
    options = {"family": "mixtral", "model_config": size, "target_parameters": [target]}
    adapter, _ = stock_adapter(tmp_path / "stock", str(tmp_path / "square"), **options)
    old = in_0_18(adapter, peft_version=None)
    with pytest.raises(ValueError, match=r"32 x 32 .* records no peft_version.*--peft-orientation 0\.18 or 0\.19"):
        convert(old, "stacked")
    assert not old.with_name("old-stacked").exists()
    assert same_bits(convert(old, "stacked", peft_orientation="0.18"), adapter)
    assert not same_bits(convert(old, "stacked", peft_orientation="0.19", overwrite=True), adapter)
    edit_config(old, peft_version="0.18.0")
    assert same_bits(convert(old, "stacked", overwrite=True), adapter)


def test_shapes_that_contradict_version_or_flag_are_refused(stock):
    old = in_0_18(stock, peft_version="0.21.2")
    with pytest.raises(ValueError, match=r"peft_version is 0\.21\.2, but the shapes are those of PEFT 0\.18"):
        convert(old, "per-expert")
    with pytest.raises(ValueError, match=r"--peft-orientation 0\.19 does not fit the shapes"):
        convert(old, "per-expert", peft_orientation="0.19")


def test_the_flag_is_refused_where_it_means_nothing(tmp_path):
    adapter = saved(lora_model("mixtral"), tmp_path, save_base("mixtral", tmp_path))
    with pytest.raises(ValueError, match="--peft-orientation is for stacked adapters"):
        convert(adapter, "stacked", peft_orientation="0.18")


def test_the_flag_takes_two_values(stock):
    with pytest.raises(ValueError, match=r"--peft-orientation 0\.20 is unknown; accepted: 0\.19, 0\.18"):
        convert(stock, "per-expert", peft_orientation="0.20")
