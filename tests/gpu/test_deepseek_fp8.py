"""DeepSeek-V3's published form at its true widths, few layers, random weights: load FP8, train, die, resume, export."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from gpu.share_gpu import two_ranks
from model_dir import make_model_dir
from safetensors import safe_open

from coati_ext.benchmark.synthetic import write_checkpoint

ROOT = Path(__file__).parents[2]
STEPS = 8


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """(15 GB of FP8 in memory: one dense layer and one with 240 experts, JSONL of conversations)."""
    shared = Path("/dev/shm")
    if shutil.disk_usage(shared).free < 24e9:
        pytest.skip("needs 24 GB in /dev/shm")
    folder = tmp_path_factory.mktemp("inputs")
    tokenizer, data = make_model_dir(folder)
    directory = shared / f"coati_ext-fp8-{os.getpid()}"
    shutil.rmtree(directory, ignore_errors=True)
    write_checkpoint(directory, 15_000_000_000)
    for file in tokenizer.iterdir():
        if file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copy(file, directory)
    yield directory, data
    shutil.rmtree(directory)


def start(inputs, run_dir, processes: int, *flags) -> subprocess.Popen:
    command = [
        *(two_ranks() if processes == 2 else [sys.executable]), "applications/lora_finetune.py",
        "--pretrained", str(inputs[0]), "--dataset", str(inputs[1]), "--plugin", "moe", "--ep", str(processes),
        "--batch_size", str(4 // processes), "--lora_rank", "8", "--lora_alpha", "16", "--lr", "1e-4", "-g",
        "--num_epochs", "9", "--max_steps", str(STEPS), "--save_interval", "2", "--resume", "latest",
        "--save_dir", str(run_dir), *flags,
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(
        command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def finish(*args) -> str:
    process = start(*args)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    return out


def losses_of(run_dir) -> list[float]:
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.parametrize(
    "processes", [pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.multigpu)]
)
def test_it_loads_trains_is_killed_resumes_and_exports(inputs, processes, tmp_path):
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    out = finish(inputs, whole, processes)
    print(*(line for line in out.splitlines() if "weights:" in line or "steps in" in line), sep="\n")
    process = start(inputs, run_dir, processes)
    while len(losses_of(run_dir)) < 5:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    for member in [*psutil.Process(process.pid).children(recursive=True), process]:  # ranks have sessions of their own
        member.kill()
    process.communicate()
    assert not (run_dir / "lora").exists()
    out = finish(inputs, run_dir, processes)
    assert f"are done, of {STEPS} steps" in out, out
    losses, expected = losses_of(run_dir), losses_of(whole)
    print("losses", [round(loss, 4) for loss in expected])
    assert losses == pytest.approx(expected, rel=2e-3)  # kernels with atomics do not repeat themselves to the bit
    with safe_open(run_dir / "lora" / "adapter_model.safetensors", framework="pt") as adapter:
        keys = set(adapter.keys())
        assert all(adapter.get_tensor(key).isfinite().all() for key in keys)
    num_experts = json.loads((inputs[0] / "config.json").read_text())["n_routed_experts"]
    assert len(keys) == 2 * 3 * (num_experts + 1 + 1)  # A and B of gate, up, down: routed, shared, dense
