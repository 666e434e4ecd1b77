"""Every plugin and layout of the command trains what one process trains, and exports the same adapter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from model_dir import make_model_dir
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
ULYSSES = ["--enable_sequence_parallelism", "--sp_mode", "all_to_all"]
# name: (family, flags of the run on two processes)
LAYOUTS = {
    "zero2": ("llama", ["--plugin", "zero2", "--accumulation_steps", "2", "--batch_size", "1"]),
    "zero2 of a MoE": ("mixtral", ["--plugin", "zero2", "--batch_size", "2"]),
    "zero2_cpu": ("llama", ["--plugin", "zero2_cpu", "--batch_size", "2"]),
    "ddp": ("llama", ["--plugin", "ddp", "--batch_size", "2"]),
    "3d tp 2": ("llama", ["--plugin", "3d", "--tp", "2", "--batch_size", "4", "--zero_cpu_offload"]),
    "3d tp 2, sequence parallel": (
        "llama",
        ["--plugin", "3d", "--tp", "2", "--batch_size", "4", "--enable_sequence_parallelism"],
    ),
    "3d sp 2": (
        "llama",
        [
            "--plugin",
            "3d",
            "--sp",
            "2",
            "--enable_sequence_parallelism",
            "--sp_mode",
            "all_to_all",
            "--batch_size",
            "4",
        ],
    ),
    "3d pp 2, tied": ("llama_tied", ["--plugin", "3d", "--pp", "2", "--batch_size", "4", "--microbatch_size", "2"]),
    "moe pp 2": ("mixtral", ["--plugin", "moe", "--pp", "2", "--batch_size", "4", "-g"]),
    "moe ep 2, packing": ("mixtral", ["--plugin", "moe", "--ep", "2", "--batch_size", "2", "--packing"]),
}
SETTINGS = {"mixtral": {}, "llama": {}, "llama_tied": {"tie_word_embeddings": True}}


def finetune(inputs, run_dir, *flags, processes=1):
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--rdzv_backend", "c10d"]
    launcher += ["--rdzv_endpoint", "localhost:0"]
    command = [
        sys.executable, *(launcher if processes > 1 else []), "applications/lora_finetune.py",
        "--pretrained", str(inputs[0]), "--dataset", str(inputs[1]), "--lora_rank", "4", "--lora_targets", "all",
        "--lr", "1e-3", "--save_dir", str(run_dir), *flags,
    ]  # fmt: skip
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def losses_of(run_dir) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """name of the model -> (its inputs, the run of one process)."""
    made = {}
    for name, settings in SETTINGS.items():
        folder = tmp_path_factory.mktemp(name)
        inputs = make_model_dir(folder, name.partition("_")[0], **settings)
        finetune(inputs, folder / "run", "--plugin", "moe", "--batch_size", "4")
        made[name] = inputs, folder / "run"
    return made


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_what_one_process_trains(single, layout, tmp_path):
    name, flags = LAYOUTS[layout]
    inputs, reference = single[name]
    finetune(inputs, tmp_path, *flags, processes=2)
    assert losses_of(tmp_path) == pytest.approx(losses_of(reference), rel=1e-5)
    ours, expected = (load_file(run / "lora" / "adapter_model.safetensors") for run in (tmp_path, reference))
    assert ours.keys() == expected.keys()
    for key, tensor in expected.items():  # AdamW's first steps amplify fp32 noise where a gradient is near 0
        assert (ours[key] - tensor).norm() <= 1e-3 * tensor.norm(), key


def test_each_rank_reads_its_own_part_and_says_so(single, tmp_path):
    inputs, _ = single["mixtral"]
    alone = finetune(inputs, tmp_path / "one", "--plugin", "moe", "--max_steps", "1")
    shared = finetune(inputs, tmp_path / "two", "--plugin", "moe", "--ep", "2", "--max_steps", "1", processes=2)
    assert "weights: rank 0 read" in shared and "all 2 ranks" in shared
    percent = [
        float(out.partition("(")[2].partition("%")[0])
        for out in (alone[alone.index("weights:") :], shared[shared.index("weights:") :])
    ]
    assert percent[0] == 100 and percent[1] < 80


def test_an_adapter_is_where_another_run_goes_on(single, tmp_path):
    inputs, reference = single["mixtral"]
    out = finetune(inputs, tmp_path, "--plugin", "moe", "--lora_rank", "0", "--init_adapter", str(reference / "lora"))
    assert "rank 4" in out
    assert losses_of(tmp_path)[0] < losses_of(reference)[0]
    with pytest.raises(AssertionError, match="--lora_alpha is that of --init_adapter"):
        other = ("--init_adapter", str(reference / "lora"), "--lora_alpha", "64")
        finetune(inputs, tmp_path / "other", "--plugin", "moe", *other)


FULL = {  # name: (family, flags of two processes) of full fine-tuning
    "zero2": ("llama", ["--plugin", "zero2", "--batch_size", "2"]),
    "3d tp 2": ("llama", ["--plugin", "3d", "--tp", "2", "--batch_size", "4"]),
    "3d pp 2, tied": ("llama_tied", ["--plugin", "3d", "--pp", "2", "--batch_size", "4"]),
    "moe ep 2": ("mixtral", ["--plugin", "moe", "--ep", "2", "--batch_size", "2"]),
    "moe pp 2": ("mixtral", ["--plugin", "moe", "--pp", "2", "--batch_size", "4", "-g"]),
}


@pytest.fixture(scope="module")
def fully_tuned(single, tmp_path_factory):
    runs = {}
    for name, (inputs, _) in single.items():
        runs[name] = tmp_path_factory.mktemp(f"full_{name}")
        out = finetune(inputs, runs[name], "--plugin", "moe", "--lora_rank", "0", "--batch_size", "4")
        assert "full fine-tuning: all" in out and "model saved in" in out
    return runs


@pytest.mark.parametrize("layout", FULL)
def test_full_fine_tuning_in_a_layout_gives_the_model_of_one_process(single, fully_tuned, layout, tmp_path):
    name, flags = FULL[layout]
    inputs, _ = single[name]
    finetune(inputs, tmp_path, *flags, "--lora_rank", "0", processes=2)
    assert losses_of(tmp_path) == pytest.approx(losses_of(fully_tuned[name]), rel=1e-4)
    ours, expected, before = (load_model(path) for path in (tmp_path / "model", fully_tuned[name] / "model", inputs[0]))
    assert ours.keys() == expected.keys() == before.keys()
    for key, tensor in expected.items():
        moved = (tensor - before[key]).norm()
        assert moved > 0, key
        assert (ours[key] - tensor).norm() <= 0.02 * moved, key  # AdamW amplifies fp32 noise of gradients near 0


def load_model(directory) -> dict:
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(directory, local_files_only=True).named_parameters())
