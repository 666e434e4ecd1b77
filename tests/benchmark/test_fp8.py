"""The FP8 benchmark runs, and what it converts is a real DeepSeek-V3 checkpoint."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from applications.benchmark import main
from applications.fp8_cast_bf16 import main as fp8_cast_bf16
from coati_ext.benchmark import fp8
from coati_ext.benchmark.synthetic import write_checkpoint

SMALL = dict(
    hidden_size=64, intermediate_size=96, moe_intermediate_size=40, vocab_size=128, num_attention_heads=4,
    num_key_value_heads=4, q_lora_rank=48, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
)  # fmt: skip


@pytest.mark.parametrize("wanted", [1_000_000, 4_000_000])
def test_the_synthetic_checkpoint_loads_in_transformers(wanted, tmp_path):
    written = write_checkpoint(tmp_path / "fp8", wanted, shard_bytes=300_000, **SMALL)
    assert wanted <= written < 1.2 * wanted
    assert len(list((tmp_path / "fp8").glob("*.safetensors"))) > 3
    arguments = ["--input-fp8-hf-path", str(tmp_path / "fp8"), "--output-bf16-hf-path", str(tmp_path / "out")]
    assert fp8_cast_bf16([*arguments, "--verify", "all"]) == 0
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info


def test_the_benchmark_prints_both_tables(tmp_path, capsys, monkeypatch):
    write_checkpoint(tmp_path / "fp8", 1_000_000, shard_bytes=300_000, **SMALL)
    monkeypatch.setattr(fp8, "CPU_SHAPES", ((1, 130, 200),))
    flags = ["--work", str(tmp_path / "work"), "--source", str(tmp_path / "fp8"), "--device", "cpu"]
    assert main(["fp8", *flags]) == 0
    printed = capsys.readouterr().out
    for label in ("[130, 200]", "ours/copy", "copy of the output", "as published", "with sync", "page cache"):
        assert label in printed, label
    assert list((tmp_path / "work").iterdir()) == []
    assert json.loads((tmp_path / "fp8" / "config.json").read_text())["model_type"] == "deepseek_v3"


def test_the_published_way_gives_the_same_weights(tmp_path):
    """The baseline does the whole work, or its time would say nothing."""
    from safetensors.torch import load_file

    write_checkpoint(tmp_path / "fp8", 1_000_000, shard_bytes=300_000, **SMALL)
    arguments = ["--input-fp8-hf-path", str(tmp_path / "fp8"), "--output-bf16-hf-path", str(tmp_path / "out")]
    assert fp8_cast_bf16(arguments) == 0
    fp8._published(tmp_path / "fp8", tmp_path / "published", 10**9, torch.device("cpu"))
    for file in (tmp_path / "out").glob("*.safetensors"):
        ours, theirs = load_file(file), load_file(tmp_path / "published" / file.name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
