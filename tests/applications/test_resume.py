"""Interrupted and uninterrupted runs of the command: the same adapter, whatever ends a run and however often."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from model_dir import make_model_dir
from safetensors.torch import load_file

from coati_ext.trainer.sft import cosine_with_warmup

ROOT = Path(__file__).parents[2]
STEPS = 60


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_model_dir(tmp_path_factory.mktemp("inputs"))


def command_of(inputs, run_dir, *extra, processes=1):
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--rdzv_backend", "c10d"]
    launcher += ["--rdzv_endpoint", "localhost:0"]
    return [
        sys.executable, *(launcher if processes > 1 else []), "applications/lora_finetune.py",
        "--pretrained", str(inputs[0]), "--dataset", str(inputs[1]), "--plugin", "moe", "--lora_rank", "4",
        "--lora_dropout", "0.1", "--lr", "1e-2", "--num_epochs", "20", "--max_steps", str(STEPS),
        "--save_dir", str(run_dir), *extra,
    ]  # fmt: skip


def start(*args, **kwargs) -> subprocess.Popen:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        command_of(*args, **kwargs),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(*args, **kwargs) -> str:
    process = start(*args, **kwargs)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, out + err
    return out


def steps_of(run_dir) -> list[dict]:
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def adapter_of(run_dir) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "lora" / "adapter_model.safetensors")


def assert_same_run(run_dir, reference) -> None:
    """Bit for bit: every tensor of the adapter, and every loss in its order."""
    ours, expected = adapter_of(run_dir), adapter_of(reference)
    assert ours.keys() == expected.keys() and all(torch.equal(ours[key], expected[key]) for key in expected)
    rows, wanted = steps_of(run_dir), steps_of(reference)
    assert [(row["step"], row["loss"]) for row in rows] == [(row["step"], row["loss"]) for row in wanted]


@pytest.fixture(scope="module")
def uninterrupted(inputs, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "one"
    finish(inputs, run_dir, "--batch_size", "4")
    assert len(steps_of(run_dir)) == STEPS
    return run_dir


def kill_after_progress(process, run_dir, done: int, delay_s: float) -> None:
    """SIGKILL the whole process group once a step past `done` is on record, and a moment later."""
    deadline = time.monotonic() + 120
    while process.poll() is None and len(steps_of(run_dir)) <= done:
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.005)
    time.sleep(delay_s)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    out, err = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), out + err


def test_a_run_killed_20_times_gives_the_same_adapter_bit_for_bit(inputs, uninterrupted, tmp_path):
    run_dir, chance, killed = tmp_path / "run", random.Random(0), 0
    arguments = (inputs, run_dir, "--batch_size", "4", "--save_interval", "1", "--resume", "latest")
    while killed < 20:
        process = start(*arguments)
        # Each time a little further: the steps must last for 20 kills.
        done = max((row["step"] for row in steps_of(run_dir)), default=0)
        kill_after_progress(process, run_dir, min(done, STEPS - 10), chance.uniform(0, 0.03))
        killed += 1
        if (run_dir / "lora").exists():
            break
    assert killed >= 10, "the run ended before it could be killed often enough"
    while not (run_dir / "lora").exists():
        finish(*arguments)
    assert_same_run(run_dir, uninterrupted)


def test_a_damaged_state_is_passed_over_with_a_message(inputs, uninterrupted, tmp_path):
    run_dir = tmp_path / "run"
    saving = (inputs, run_dir, "--batch_size", "4", "--save_interval", "5", "--keep_last", "2")
    finish(*saving, "--max_steps", "12")
    newest = run_dir / "checkpoints" / "step-00000010"
    file = newest / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    shown = finish(*saving, "--resume", "latest")
    assert "step-00000010 is damaged (" in shown and "going on from step-00000005" in shown, shown
    assert "resumed with other flags than saved: --max_steps 12 -> 60" in shown


def preempt(process, run_dir, step: int) -> tuple[str, str]:
    """SIGTERM once a step past `step` is on record; what was printed."""
    while len(steps_of(run_dir)) <= step:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    return process.communicate(timeout=60)


def test_sigterm_saves_and_ends_well_and_other_layouts_go_on_with_the_same_trajectory(inputs, tmp_path):
    """One process, then two with ep 2 (the launcher is preempted), then a pipeline of two; the global batch stays."""
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    plain = ("--lora_dropout", "0", "--lr", "1e-3")
    finish(inputs, whole, "--batch_size", "4", *plain)
    process = start(inputs, run_dir, "--batch_size", "4", *plain)
    out, err = preempt(process, run_dir, 3)
    assert process.returncode == 0, out + err
    assert "stopped by SIGTERM after" in out and "--resume latest" in out
    assert not (run_dir / "lora").exists()
    done = len(steps_of(run_dir))
    ep = ("--batch_size", "2", "--ep", "2", "--resume", "latest")
    out, err = preempt(start(inputs, run_dir, *ep, *plain, processes=2), run_dir, done + 3)
    assert f"{done} steps are done, of {STEPS} steps" in out and "stopped by" in out, out + err
    done = len(steps_of(run_dir))
    assert done < STEPS - 5
    out = finish(inputs, run_dir, "--batch_size", "4", "--pp", "2", "--resume", "latest", *plain, processes=2)
    assert f"{done} steps are done, of {STEPS} steps" in out
    losses, expected = ([row["loss"] for row in steps_of(run)] for run in (run_dir, whole))
    assert losses == pytest.approx(expected, rel=1e-4)
    for key, tensor in adapter_of(whole).items():
        assert (adapter_of(run_dir)[key] - tensor).norm() <= 1e-3 * tensor.norm(), key


def test_a_resume_under_zero2_warns_of_nothing(inputs, tmp_path):
    flags = ("--plugin", "zero2", "--save_interval", "1")
    for extra in (("--max_steps", "2"), ("--max_steps", "4", "--resume", "latest")):
        process = start(inputs, tmp_path, *flags, *extra, processes=2)
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0 and "Warning" not in err.replace("SyntaxWarning", ""), out + err
    rates = [row["learning_rate"] for row in steps_of(tmp_path)]
    factors = [cosine_with_warmup(4, 1)(step) for step in (2, 3)]  # of the second run's schedule
    assert rates[2:] == [pytest.approx(1e-2 * factor) for factor in factors]


def test_a_rank_killed_under_expert_parallelism_resumes_to_the_same_adapter(inputs, tmp_path):
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    flags = ("--batch_size", "2", "--ep", "2", "--save_interval", "3")
    finish(inputs, whole, *flags, processes=2)
    process = start(inputs, run_dir, *flags, processes=2)
    while len(steps_of(run_dir)) < 8:
        assert process.poll() is None
        time.sleep(0.005)
    ranks = psutil.Process(process.pid).children()
    next(rank for rank in ranks if rank.environ()["RANK"] == "1").kill()
    process.communicate(timeout=60)
    assert process.returncode != 0
    finish(inputs, run_dir, *flags, "--resume", "latest", processes=2)
    assert_same_run(run_dir, whole)


def test_a_finished_run_resumes_to_its_own_result_and_not_to_less(inputs, tmp_path):
    run_dir = tmp_path / "run"
    flags = ("--batch_size", "4", "--max_steps", "3", "--save_interval", "1")
    first = finish(inputs, run_dir, *flags)
    again = finish(inputs, run_dir, *flags, "--resume", "latest")
    loss = next(line for line in first.splitlines() if "steps in" in line).partition("loss ")[2].partition(",")[0]
    assert f"loss {loss}" in again
    for extra, message in (
        (("--max_steps", "2", "--resume", "latest"), "3 steps are done, and this run ends after 2"),
        ((), "has states of an earlier run (step-00000003): go on with --resume latest"),
        (("--seed", "7", "--resume", "latest"), "was saved with seed 42, this run has 7"),
        (("--max_length", "29", "--resume", "latest"), "was saved with other samples"),
    ):
        process = start(inputs, run_dir, *flags, *extra)
        out, err = process.communicate(timeout=100)
        assert process.returncode == 1 and message in err and "Traceback" not in err, out + err


def test_what_does_not_fit_is_refused_by_name(inputs, uninterrupted, tmp_path):
    run_dir = tmp_path / "run"
    finish(inputs, run_dir, "--batch_size", "4", "--max_steps", "2", "--save_interval", "1")
    state = str(run_dir / "checkpoints" / "step-00000002")
    for flags, message in (
        (["--batch_size", "2"], "global batch 4, this run has 2"),
        (["--batch_size", "4", "--lora_rank", "8"], "lora_A"),
        (["--batch_size", "4", "--lora_targets", "all"], "has no master of"),
    ):
        process = start(inputs, tmp_path / "other", *flags, "--resume", state)
        out, err = process.communicate(timeout=100)
        assert process.returncode == 1 and message in err and "Traceback" not in err, out + err
