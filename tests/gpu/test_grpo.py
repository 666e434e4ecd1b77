"""The GRPO command on a GPU: the CPU's run in fp32, its own run in bf16 with CUDA graphs, and two ranks over NCCL."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from gpu.share_gpu import two_ranks
from grpo_command import ROOT, end, lines_of, make_inputs, start

FLAGS = [
    "-n", "4", "--experience_batch_size", "4", "--train_batch_size", "8", "--kl_coef", "0.05",
    "--log_samples_interval", "1",
]  # fmt: skip
GPUS = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0,1" if torch.cuda.device_count() > 1 else "0")}


@pytest.fixture(scope="module", params=["mixtral", "deepseek_v3"])
def inputs(request, tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"), request.param)


def run(inputs, run_dir, *flags: str, gpu: bool = True, **kwargs) -> tuple[list[dict], list[str], str]:
    """(Metrics of the episodes, completions of rank 0, what was printed)."""
    environment = {**(GPUS if gpu else {}), **kwargs.pop("environment", {})}
    out, err = end(start(inputs, run_dir, *FLAGS, *flags, environment=environment, **kwargs), timeout=240)
    return lines_of(run_dir / "metrics.jsonl"), texts(run_dir), out + err


def texts(run_dir) -> list[str]:
    return [row["completion"] for row in lines_of(run_dir / "samples.jsonl")]


def assert_same_run(found: list[dict], expected: list[dict]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("reward", "length/mean", "zero_variance", "signals"):
            assert ours[name] == theirs[name], (ours["step"], name)
        for name in ("entropy", "grad_norm", "kl"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), (ours["step"], name)


@pytest.mark.gpu
def test_an_fp32_run_is_the_run_of_the_cpu(inputs, tmp_path):
    flags = ["--mixed_precision", "fp32"]
    found, completions, printed = run(inputs, tmp_path / "gpu", *flags)
    expected, on_cpu, _ = run(inputs, tmp_path / "cpu", *flags, gpu=False)
    assert completions == on_cpu
    assert "decoding without CUDA graphs: " in printed and "experts in torch.float32" in printed
    assert_same_run(found, expected)


@pytest.mark.gpu
def test_a_bf16_run_draws_with_cuda_graphs_from_the_policy_that_it_trains(inputs, tmp_path):
    found, _, printed = run(
        inputs, tmp_path / "run", "--max_length", "64", "--max_seq_len", "36", "--stop_strings", "zzz"
    )
    assert "\ndecoding with CUDA graphs\n" in printed and "generation goes on without CUDA graphs" not in printed
    for row in found:
        assert row["ratio"] == row["ratio_max"] == 1  # one step on each experience
        assert 0 <= row["mismatch_kl"] < 1e-3 and row["mismatch_kl_max"] < 0.3, row  # of bf16
        assert row["grad_norm"] > 0 and row["entropy"] > 0
    saved = json.loads((tmp_path / "run" / "training_config.json").read_text())
    assert saved["mixed_precision"] == "bf16"
    command = [sys.executable, "applications/verify_adapter.py", "--pretrained", str(inputs / "base")]
    checked = subprocess.run(
        [*command, "--adapter", str(tmp_path / "run" / "lora")], cwd=ROOT, capture_output=True, text=True
    )
    assert checked.returncode == 0 and "PASS" in checked.stdout, checked.stdout + checked.stderr


@pytest.mark.gpu
def test_a_run_that_a_signal_ended_goes_on_as_if_it_had_not(inputs, tmp_path):
    flags = ["--mixed_precision", "fp32"]
    expected, completions, _ = run(inputs, tmp_path / "whole", *flags)
    killed = {"KILL_AT": "20", "KILL_SIGNAL": str(int(signal.SIGTERM))}
    _, _, printed = run(inputs, tmp_path / "run", *flags, environment=killed)
    assert "stopped by SIGTERM after 1 episode" in printed
    found, again, _ = run(inputs, tmp_path / "run", *flags, "--resume", "latest")
    assert again == completions
    assert_same_run(found, expected)


@pytest.mark.multigpu
def test_ep_2_is_the_run_of_one_gpu(inputs, tmp_path):
    """fp32; rank 0 of 2 has its half of the prompts, whose completions are those of one process."""
    flags = ["--mixed_precision", "fp32"]
    expected, of_one, _ = run(inputs, tmp_path / "one", *flags)
    two = ["--ep", "2", "--experience_batch_size", "2"]
    found, of_rank_0, _ = run(inputs, tmp_path / "two", *flags, *two, launcher=two_ranks()[1:])
    assert set(of_rank_0) <= set(of_one)
    assert_same_run(found, expected)
