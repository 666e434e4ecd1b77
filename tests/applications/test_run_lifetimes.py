"""Runs of the command that follow, meet or interrupt each other in one directory."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from model_dir import make_model_dir

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_model_dir(tmp_path_factory.mktemp("inputs"))


def start(inputs, run_dir, *flags, processes=1) -> subprocess.Popen:
    launcher = []
    if processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        launcher = ["-m", "coati_ext.compat.launcher", "run", "--nproc_per_node", str(processes), "--master_port", port]
    command = [
        sys.executable, *launcher, "applications/lora_finetune.py",
        "--pretrained", str(inputs[0]), "--dataset", str(inputs[1]), "--plugin", "moe", "--lora_rank", "4",
        "--save_dir", str(run_dir), *flags,
    ]  # fmt: skip
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen, status: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=200)
    assert process.returncode == status, out + err
    return out, err


def steps_of(run_dir) -> list[int]:
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def wait_for_steps(process: subprocess.Popen, run_dir, number: int = 2) -> None:
    deadline = time.monotonic() + 120
    while len(steps_of(run_dir)) < number:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)


def contents(run_dir) -> set[str]:
    return {entry.name for entry in run_dir.iterdir()}


def test_a_finished_adapter_is_replaced_on_request_and_stays_until_the_new_one_is_complete(inputs, tmp_path):
    end(start(inputs, tmp_path, "--max_steps", "3"))
    left, adapter = contents(tmp_path), (tmp_path / "lora" / "adapter_model.safetensors").read_bytes()
    assert left == {"lora", "metrics.jsonl", "tensorboard", "training_config.json", ".lock"}
    _, err = end(start(inputs, tmp_path, "--max_steps", "2"), status=1)
    assert err.startswith(f"error: --save_dir {tmp_path} has the finished lora/") and err.count("\n") == 1
    assert contents(tmp_path) == left and steps_of(tmp_path) == [1, 2, 3]

    killed = start(inputs, tmp_path, "--num_epochs", "5000", "--overwrite", "--lora_alpha", "9")
    wait_for_steps(killed, tmp_path)  # of the old run until they are set aside
    while not (tmp_path / "previous").exists():
        time.sleep(0.01)
    wait_for_steps(killed, tmp_path)
    killed.kill()
    killed.communicate()
    assert steps_of(tmp_path / "previous") == [1, 2, 3]
    assert (tmp_path / "lora" / "adapter_model.safetensors").read_bytes() == adapter

    end(start(inputs, tmp_path, "--max_steps", "2", "--overwrite", "--lora_alpha", "9"))
    assert contents(tmp_path) == left and steps_of(tmp_path) == [1, 2]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    assert (tmp_path / "lora" / "adapter_model.safetensors").read_bytes() != adapter
    saved = json.loads((tmp_path / "training_config.json").read_text())
    assert (saved["lora_alpha"], saved["overwrite"]) == (9, False)


def test_a_second_run_at_the_same_time_ends_with_one_line_and_the_first_goes_on(inputs, tmp_path):
    first = start(inputs, tmp_path, "--num_epochs", "5000")
    wait_for_steps(first, tmp_path, 1)
    _, err = end(start(inputs, tmp_path, "--ep", "2", processes=2), status=1)
    message, last = err.splitlines()
    assert message.startswith(f"error: --save_dir {tmp_path}: another run is in it (process {first.pid} on ")
    assert last.startswith("rank 0 ")
    wait_for_steps(first, tmp_path, len(steps_of(tmp_path)) + 1)
    first.terminate()
    out, _ = end(first)
    assert "stopped by SIGTERM" in out


def test_sigterm_to_the_launcher_saves_a_state_that_the_same_command_goes_on_from(inputs, tmp_path):
    flags = ("--ep", "2", "--batch_size", "2", "--num_epochs", "20")
    launcher = start(inputs, tmp_path, *flags, processes=2)
    wait_for_steps(launcher, tmp_path)
    launcher.terminate()
    out, err = end(launcher, status=128 + signal.SIGTERM)
    assert "stopped by SIGTERM after" in out and "Traceback" not in err and not (tmp_path / "lora").exists()
    out, _ = end(start(inputs, tmp_path, *flags, "--resume", "latest", processes=2))
    assert "60 steps in" in out and steps_of(tmp_path) == list(range(1, 61))


def test_ctrl_c_ends_a_training_with_one_line_and_saves_nothing(inputs, tmp_path):
    launcher = start(inputs, tmp_path, "--ep", "2", "--num_epochs", "5000", processes=2)
    wait_for_steps(launcher, tmp_path)
    os.killpg(launcher.pid, signal.SIGINT)
    _, err = end(launcher, status=128 + signal.SIGINT)
    assert err.endswith("\ninterrupted\n") and err.count("interrupted") == 1
    assert "Traceback" not in err and "gloo" not in err
    assert contents(tmp_path) == {"metrics.jsonl", "tensorboard", "training_config.json", ".lock"}
