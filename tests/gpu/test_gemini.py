"""Gemini, static and auto: the losses and the model of ZeRO-2 within bf16 noise. Compiles HybridAdam (minutes)."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from model_dir import make_model_dir

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(shutil.which("nvcc") is None, reason="HybridAdam needs nvcc")]
ROOT = Path(__file__).parents[2]


def finetune(inputs, run_dir, plugin) -> list[float]:
    command = [
        sys.executable, "applications/lora_finetune.py", "--pretrained", str(inputs[0]), "--dataset", str(inputs[1]),
        "--plugin", plugin, "--lora_rank", "0", "--lr", "1e-3", "--batch_size", "2", "--accumulation_steps", "2",
        "--num_epochs", "3", "--save_dir", str(run_dir),
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    inputs = make_model_dir(folder, "llama", hidden_size=64, intermediate_size=128)
    return inputs, folder / "zero2", finetune(inputs, folder / "zero2", "zero2")


@pytest.mark.parametrize("plugin", ["gemini", "gemini_auto"])
def test_gemini_trains_and_saves_what_zero2_does(reference, plugin, tmp_path):
    from transformers import AutoModelForCausalLM

    inputs, run_dir, expected = reference
    losses = finetune(inputs, tmp_path, plugin)
    assert losses == pytest.approx(expected, rel=2e-2) and losses[-1] < losses[0]
    ours, theirs = (AutoModelForCausalLM.from_pretrained(run / "model").state_dict() for run in (tmp_path, run_dir))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].float() - tensor.float()).norm() <= 2e-2 * tensor.float().norm(), name
