"""Fine-tuning straight from an FP8 checkpoint with ragged blocks: the losses of its BF16 form, and a right export."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fp8_checkpoint import make_fp8_dir
from model_dir import make_model_dir

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """(FP8 directory, the same in BF16, JSONL of conversations), with a tokenizer."""
    folder = tmp_path_factory.mktemp("inputs")
    tokenizer, data = make_model_dir(folder)
    make_fp8_dir(folder / "fp8", vocab_size=json.loads((tokenizer / "config.json").read_text())["vocab_size"])
    for file in tokenizer.iterdir():
        if "token" in file.name or file.name.startswith("chat_template"):
            shutil.copy(file, folder / "fp8")
    paths = ["--input-fp8-hf-path", folder / "fp8", "--output-bf16-hf-path", folder / "bf16"]
    run("applications/fp8_cast_bf16.py", *paths)
    return folder / "fp8", folder / "bf16", data


def run(*command, processes=1):
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--rdzv_backend", "c10d"]
    launcher += ["--rdzv_endpoint", "localhost:0"]
    arguments = [sys.executable, *(launcher if processes > 1 else []), *map(str, command)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def finetune(base, data, run_dir, *flags, processes=1) -> list[float]:
    run(
        "applications/lora_finetune.py", "--pretrained", base, "--dataset", data, "--plugin", "moe", "--lora_rank", "4",
        "--lora_targets", "all", "--max_steps", "3", "--save_dir", run_dir, *flags, processes=processes,
    )  # fmt: skip
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_ragged_fp8_trains_under_expert_and_pipeline_parallelism_and_verifies(inputs, tmp_path):
    fp8, bf16, data = inputs
    reference = finetune(bf16, data, tmp_path / "bf16", "--batch_size", "4")
    ep = finetune(fp8, data, tmp_path / "ep", "--ep", "2", "--batch_size", "2", processes=2)
    pp = finetune(fp8, data, tmp_path / "pp", "--pp", "2", "--batch_size", "4", "--frozen_dtype", "fp8", processes=2)
    # The FP8 values go to fp32 here, through bf16 there.
    assert ep == pytest.approx(reference, rel=2e-3) and pp == pytest.approx(ep, rel=1e-5)
    for adapter in ("ep", "pp"):
        shown = run("applications/verify_adapter.py", "--pretrained", fp8, "--adapter", tmp_path / adapter / "lora")
        assert "PASS" in shown
