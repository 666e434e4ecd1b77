"""The GRPO command: what a run leaves, and what it says when something is wrong."""

import json
import math
import subprocess
import sys

import pytest
from grpo_command import ROOT, end, lines_of, make_inputs, start, write_prompts
from model_dir import CHATS
from safetensors.torch import load_file

# Of every episode in which something was learnt; others depend on flags.
METRICS = {
    "reward", "reward_std", "accuracy", "unscored", "format", "zero_variance", "group_reward_std", "kept",
    "length/mean", "length/max", "length/truncated", "reasons/correct", "reasons/wrong", "ratio", "ratio_max",
    "clip_low", "clip_high", "mismatch_kl", "mismatch_kl_max", "policy_loss", "entropy", "loss", "grad_norm",
    "skipped", "signals", "learning_rate", "temperature", "memory_gb", "seconds/generate", "seconds/reward",
    "seconds/log_probs", "seconds/train", "tokens_per_s/generate", "tokens_per_s/train",
    "expert_load/model.layers.0.mlp.experts", "expert_load/model.layers.1.mlp.experts",
}  # fmt: skip
EVALUATED = {f"eval/{name}" for name in ("accuracy", "reward", "length", "truncated", "pass@3", "mean@3")}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def finished(inputs, tmp_path_factory):
    """(Its directory, what it printed) of a run with everything on, by `colossalai run` on two processes."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    write_prompts(inputs / "held_out.jsonl", CHATS[:1])  # fewer than ranks
    flags = [
        "--ep", "2", "-n", "4", "--kl_coef", "0.1", "--num_update_steps", "2", "--final_temperature", "0.7",
        "--ptx_dataset", str(inputs / "chats.jsonl"), "--ptx_coef", "0.1", "--ptx_batch_size", "2",
        "--eval_dataset", str(inputs / "held_out.jsonl"), "--eval_interval", "2", "--eval_samples", "3",
        "--log_samples_interval", "2", "--train_batch_size", "3",
    ]  # fmt: skip
    out, err = end(start(inputs, run_dir, *flags, processes=2))
    return run_dir, out, err


def test_a_run_writes_all_of_its_metrics_and_they_are_finite(finished):
    rows = lines_of(finished[0] / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    for row in rows[1:]:
        assert METRICS | {"kl", "ptx_loss"} <= row.keys(), METRICS - row.keys()
    for row in rows:
        assert (row.keys() >= EVALUATED) == (row["step"] in (0, 2, 4)), row["step"]
    assert [row["temperature"] for row in rows[1:]] == pytest.approx([1, 0.9, 0.8, 0.7])
    assert all(row["mismatch_kl_max"] < 1e-6 for row in rows[1:])
    assert rows[1]["kl"] < rows[4]["kl"]


def test_a_run_leaves_an_adapter_that_stock_peft_loads_with_its_logits(finished, inputs):
    run_dir, out, _ = finished
    command = [sys.executable, "applications/verify_adapter.py", "--pretrained", str(inputs / "base")]
    checked = subprocess.run([*command, "--adapter", str(run_dir / "lora")], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0 and "PASS" in checked.stdout, checked.stdout + checked.stderr
    assert f"adapter saved in {run_dir / 'lora'}; check it with" in out
    tensors = load_file(run_dir / "lora" / "adapter_model.safetensors")
    assert any(tensor.any() for name, tensor in tensors.items() if "lora_B" in name)
    card = (run_dir / "lora" / "README.md").read_text()
    assert "- Method: grpo, rewards tiny_rewards:by_chance" in card and "4 episodes, 8 optimizer steps" in card
    assert "- Held out: accuracy " in card


def test_a_run_leaves_samples_a_summary_a_report_and_its_config(finished):
    run_dir, out, _ = finished
    samples = lines_of(run_dir / "samples.jsonl")
    assert [row["step"] for row in samples] == [1] * 8 + [2] * 8 + [4] * 8  # the first; rank 0's: 2 prompts of 4
    assert {"prompt", "completion", "gold", "reward", "accuracy", "reason", "length", "truncated"} <= samples[0].keys()
    assert all(row["length"] <= 8 and row["reward"] in (0, 1) for row in samples)
    summary = json.loads((run_dir / "summary.json").read_text())
    rows = lines_of(run_dir / "metrics.jsonl")
    assert (summary["episodes"], summary["steps"], summary["skipped"]) == (4, 8, [])
    assert (summary["reward_first"], summary["reward_last"]) == (rows[1]["reward"], rows[4]["reward"])
    assert (summary["eval_before"], summary["eval_after"]) == (rows[0]["eval/accuracy"], rows[4]["eval/accuracy"])
    assert "<table" in (run_dir / "report.html").read_text() and any((run_dir / "tensorboard").iterdir())
    saved = json.loads((run_dir / "training_config.json").read_text())
    assert (saved["num_generations"], saved["mixed_precision"], saved["final_temperature"]) == (4, "fp32", 0.7)
    for shown in ("12 lines -> 12 prompts", "first prompt, as the model meets it:", "on 1 held-out prompts"):
        assert shown in out


def test_what_a_run_prints_once_is_not_printed_by_every_rank(finished):
    _, out, err = finished
    assert out.count("before training: ") == 1 and out.count("4 episodes in ") == 1
    assert "Warning" not in err.replace("SyntaxWarning", ""), err


def test_the_saved_config_taken_back_gives_the_same_run(inputs, tmp_path):
    end(start(inputs, tmp_path / "one", "-n", "2", "--seed", "3"))
    config = tmp_path / "one" / "training_config.json"
    flags = ["--config", str(config), "--tensorboard_dir", str(tmp_path / "two" / "tensorboard")]
    end(start(inputs, tmp_path / "two", *flags))
    one, two = (lines_of(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert [row["reward"] for row in one] == [row["reward"] for row in two]
    assert [row["loss"] for row in one] == [row["loss"] for row in two]


def test_full_fine_tuning_writes_a_model(inputs, tmp_path):
    flags = ["--lora_rank", "0", "--plugin", "zero2", "--lr", "1e-3", "-n", "2", "--log_samples_interval", "0"]
    out, _ = end(start(inputs, tmp_path / "run", *flags))
    assert "full fine-tuning: all " in out and not (tmp_path / "run" / "samples.jsonl").exists()
    base = load_file(inputs / "base" / "model.safetensors")
    trained = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert trained.keys() == base.keys()
    assert any((trained[name] != base[name]).any() for name in base)
    assert (tmp_path / "run" / "model" / "tokenizer.json").is_file()


# --- what is wrong is told before any long work


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max_tokens_thinking", "8"], "--max_tokens_thinking: ending a thought"),
        (["--plugin", "gemini"], "--plugin gemini shares out every weight"),
        (["--lora_config", "no/such.json"], "--lora_config no/such.json: "),
        (["--prompt_dataset", "no/such.jsonl"], "--prompt_dataset no/such.jsonl: no such file"),
        (["--eval_dataset", "no/such.jsonl"], "--eval_dataset no/such.jsonl: no such file"),
        (["--ptx_dataset", "no/such.jsonl", "--ptx_coef", "0.1"], "--ptx_dataset no/such.jsonl: no such file"),
        (["--rm_pretrain", "no/such"], "--rm_pretrain no/such: no directory of a model"),
        (["--tokenizer_dir", "no/such"], "--tokenizer_dir no/such: no such directory"),
        (["--conversation_template_config", "no/such.json"], "--conversation_template_config no/such.json"),
        (["--reward_functions", "nubmer"], "--reward_functions: "),
        (["--reward_functions", "tiny_rewards:nothing"], "--reward_functions: "),
        (["--reward_functions", "number"], "number cannot read the gt_answer of 12 of the first 12 prompts ("),
        (["--reward_options", "form_score=1"], "--reward_functions: no reward of tiny_rewards:by_chance takes 'form_"),
        (["--max_length", "65"], "--max_length 65 is more than the model's 64 positions"),
        (["--experience_batch_size", "13"], "--prompt_dataset and --experience_batch_size: a step takes 13 prompts"),
        (["--lora_targets", "q_porj"], "--lora_targets: 'q_porj' matches nothing"),
        (["--max_length", "20"], "prompts.jsonl"),  # all prompts are longer than the 12 tokens that are left
    ],
)
def test_a_wrong_flag_ends_with_one_line(inputs, tmp_path, flags, message):
    out, err = end(start(inputs, tmp_path / "run", *flags), status=1)
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert message in line and "Traceback" not in err, err
    assert "loading" not in err and "LoRA on" not in out  # no weight was read
    assert not (tmp_path / "run" / "training_config.json").exists()


def test_a_broken_line_of_prompts_is_named(inputs, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text((inputs / "prompts.jsonl").read_text() + '{"messages": [{"role": "user", "content": "?"}]}\n')
    _, err = end(start(inputs, tmp_path / "run", "--prompt_dataset", str(broken)), status=1)
    assert f"{broken}:13: " in err and "no 'gt_answer'" in err and "Traceback" not in err
    out, _ = end(start(inputs, tmp_path / "run", "--prompt_dataset", str(broken), "--skip_bad_lines", "-n", "1"))
    assert "1 bad" in out


def test_a_reward_that_fails_on_one_rank_ends_both(inputs, tmp_path):
    flags = ["--reward_functions", "tiny_rewards:raising_on_rank_1", "--ep", "2"]
    _, err = end(start(inputs, tmp_path / "run", *flags, processes=2), status=1, timeout=60)
    where = f"sample 0 ({inputs / 'prompts.jsonl'}:"
    assert f"reward tiny_rewards:raising_on_rank_1 failed on {where}" in err
    assert ": ZeroDivisionError: a reward with a fault" in err
    assert not (tmp_path / "run" / "lora").exists()


# --- rewards that never differ


@pytest.mark.parametrize("kl_coef", ["0", "0.1"])
def test_rewards_that_never_differ_are_told_of_and_end_the_run(inputs, tmp_path, kl_coef):
    flags = ["--reward_functions", "tiny_rewards:constant", "-n", "12", "--kl_coef", kl_coef]
    out, err = end(start(inputs, tmp_path / "run", *flags), status=1)
    assert out.count("warning: episode ") == 9 and "episode 9: no group had completions of different reward" in out
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: episode 10: no group had") and "as in all 10 episodes so far" in line
    assert "(mean 0; unjudged 100%; 0% unscored; " in line and "Look at samples.jsonl" in line
    assert not (tmp_path / "run" / "lora").exists() and "Warning" not in err.replace("SyntaxWarning", "")


@pytest.mark.parametrize("reward", ["constant", "none"])
def test_a_short_run_without_a_signal_saves_nothing_and_says_why(inputs, tmp_path, reward):
    flags = ["--reward_functions", f"tiny_rewards:{reward}", "-n", "2"]
    _, err = end(start(inputs, tmp_path / "run", *flags), status=1)
    assert "none of the 2 steps was taken: 2 had no two completions of a prompt with different rewards" in err
    assert not (tmp_path / "run" / "lora").exists()


def test_conversations_are_trained_on_where_no_completion_could_be_scored(inputs, tmp_path):
    flags = ["--reward_functions", "tiny_rewards:none", "--ptx_dataset", str(inputs / "chats.jsonl")]
    out, _ = end(start(inputs, tmp_path / "run", *flags, "--ptx_coef", "0.5", "-n", "2"))
    assert out.count("warning: episode ") == 2 and "2 episodes in " in out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["reward_first"] is None and (tmp_path / "run" / "lora").exists()
    losses = [row["ptx_loss"] for row in lines_of(tmp_path / "run" / "metrics.jsonl")]
    assert len(losses) == 2 and all(loss > 0 for loss in losses)
