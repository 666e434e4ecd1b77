"""`applications/train_grpo.py` as a user starts it, on a tiny model with rewards from a file beside its prompts."""

import json
import os
import subprocess
import sys
from pathlib import Path

from distributed import free_port
from model_dir import CHATS, make_model_dir

ROOT = Path(__file__).parents[1]
REWARDS = '''
import os, signal, zlib

calls = 0

def by_chance(completion, gold):
    """Ends the process with KILL_SIGNAL at its KILL_AT-th completion, if told so."""
    global calls
    calls += 1
    if calls == int(os.environ.get("KILL_AT", "0")):
        os.kill(os.getpid(), int(os.environ["KILL_SIGNAL"]))
    return zlib.crc32(completion.encode()) % 3 > 0

def constant(completion, gold):
    return 0.0

def none(completion, gold):
    return None

def raising_on_rank_1(completion, gold):
    if os.environ["RANK"] == "1":
        raise ZeroDivisionError("a reward with a fault")
    return by_chance(completion, gold)
'''


def make_inputs(folder: Path, family: str = "mixtral") -> Path:
    """A folder of base/, chats.jsonl, prompts.jsonl of 12 prompts, and the module tiny_rewards."""
    make_model_dir(folder, family)
    write_prompts(folder / "prompts.jsonl", CHATS)
    (folder / "tiny_rewards.py").write_text(REWARDS)
    return folder


def write_prompts(file: Path, chats: list[tuple[str, str]]) -> None:
    lines = [{"messages": [{"role": "user", "content": question}], "gt_answer": gold} for question, gold in chats]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def start(
    inputs: Path,
    run_dir: Path,
    *flags: str,
    processes: int = 1,
    launcher: list[str] | None = None,
    environment: dict | None = None,
):
    """The running command: 2 prompts of 4 completions a collection, of at most 8 tokens; without GPUs.

    Args:
        launcher: of several processes; default `coati_ext run`.
        environment: added to that of the command.
    """
    launcher = launcher or []
    if processes > 1 and not launcher:
        port = str(free_port())
        launcher = ["-m", "coati_ext.compat.launcher", "run", "--nproc_per_node", str(processes), "--master_port", port]
    command = [
        sys.executable, *launcher, "applications/train_grpo.py",
        "--pretrain", str(inputs / "base"), "--prompt_dataset", str(inputs / "prompts.jsonl"),
        "--reward_functions", "tiny_rewards:by_chance", "--plugin", "moe", "--lora_rank", "4", "--lr", "1e-2",
        "--experience_batch_size", "2", "--num_generations", "4", "--max_length", "48", "--max_seq_len", "8",
        "--stop_strings", *"aeiouns", "--save_dir", str(run_dir), *flags,
    ]  # fmt: skip
    path = os.pathsep.join([str(inputs), os.environ["PYTHONPATH"]])
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen, status: int = 0, timeout: float = 120) -> tuple[str, str]:
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == status, out + err
    return out, err


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]
