"""The benchmark of whole training steps: both engines train the same model on the same tokens."""

import json

import pytest

from applications import benchmark

TINY = {
    "model_type": "qwen3_moe", "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path / "config.json"


def test_the_engines_begin_with_one_loss_and_ratios_are_told(config, tmp_path, capfd):
    work = ["--batch_size", "2", "--max_length", "9", "--lora_rank", "2", "--steps", "1", "--num_layers", "1"]
    assert benchmark.main(["step", "--model", str(config), *work, "--json", str(tmp_path / "out.json")]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    ours, peft = report["engines"]["ours"], report["engines"]["peft"]
    assert ours["loss"] == pytest.approx(peft["loss"], rel=1e-5)
    assert ours["weight_bytes"] == peft["weight_bytes"] == 4 * (2 * 128 * 32 + 4 * 3 * 16 * 32 + 4 * 32 + 32 * 96 + 112)
    factors = {"attention": 2 * (3 * 32 + 32 + 16 + 16 + 2 * 32), "experts": 4 * 2 * 3 * (32 + 16)}
    assert ours["num_trained_parameters"] == sum(factors.values())
    assert len(ours["losses"]) == 3 and ours["losses"][2] < ours["losses"][0]
    assert report["ratios"]["peft"]["tokens_per_s"] == pytest.approx(ours["tokens_per_s"] / peft["tokens_per_s"])
    assert "ours / peft: " in capfd.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "gpt"], "--model gpt: neither deepseek_v3, qwen3_30b_a3b nor a config.json"),
        (["--num_layers", "49"], "--num_layers 49: the model has 48"),
        (["--engines", "our"], "--engines: unknown our"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--max_length", "1"], "--max_length must be at least 2"),
    ],
)
def test_wrong_flags_are_told(flags, message, capsys):
    assert benchmark.main(["step", *flags]) == 1
    assert message in capsys.readouterr().err
