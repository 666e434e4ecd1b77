import pytest

from applications.benchmark import main
from coati_ext.benchmark import generation


@pytest.mark.parametrize(("flags", "kind"), [([], ""), (["--num_experts", "4"], "4 experts, ")])
def test_a_cpu_is_measured_without_graphs(monkeypatch, capsys, flags, kind):
    small = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    monkeypatch.setattr(generation, "_SHAPE", {**small, "num_key_value_heads": 1, "max_position_embeddings": 256})
    assert main(["generation", "--num_prompts", "2", "--num_generations", "3", "--max_seq_len", "5", *flags]) == 0
    title, rate = capsys.readouterr().out.splitlines()
    assert title.startswith(f"2 prompts x 3 completions of 5 tokens, {kind}torch.float32, CPU")
    assert rate.startswith("without CUDA graphs: ") and float(rate.split()[3].replace(",", "")) > 0


@pytest.mark.parametrize("flag", ["num_prompts", "num_generations", "max_seq_len"])
def test_numbers_below_1_are_refused_by_their_flag(flag, capsys):
    assert main(["generation", f"--{flag}", "0"]) == 1
    assert f"--{flag} must be at least 1, got 0" in capsys.readouterr().err


def test_one_expert_is_refused(capsys):
    assert main(["generation", "--num_experts", "1"]) == 1
    assert "--num_experts must be 0 (dense) or at least 2, got 1" in capsys.readouterr().err
