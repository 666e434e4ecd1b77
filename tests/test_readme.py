"""The README's example and commands are true."""

import dataclasses
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import typing
from collections.abc import Sequence
from pathlib import Path

from model_dir import make_model_dir

from applications import benchmark
from coati_ext.cli import parse_config
from coati_ext.config import FinetuneConfig
from coati_ext.grpo_config import GRPOConfig
from coati_ext.models.reward_score import REWARDS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def run_script(
    folder: Path, *launcher: str, code: str, base: Path, arguments: Sequence[str] = ()
) -> subprocess.CompletedProcess:
    (folder / "script.py").write_text(code)
    command = [sys.executable, *launcher, "script.py", str(base), *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)


def test_the_booster_script_runs_as_printed_and_its_adapter_verifies(tmp_path):
    from coati_ext.checkpoint_io.verify import verify_adapter

    (code,) = blocks("python")
    assert "started with: torchrun --nproc_per_node 2 script.py MODEL_DIR" in code
    base, _ = make_model_dir(tmp_path)
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2"]
    launcher += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    process = run_script(tmp_path, *launcher, code=code, base=base)
    assert process.returncode == 0, process.stdout + process.stderr
    report = verify_adapter(base, tmp_path / "adapter")
    assert report.passed, report.format()


def test_a_script_that_does_not_launch_is_told_what_to_do(tmp_path):
    (code,) = blocks("python")
    code = "".join(line for line in code.splitlines(keepends=True) if "launch_from_torch" not in line)
    process = run_script(tmp_path, code=code, base=tmp_path)
    assert process.returncode == 1
    assert "call colossalai.launch_from_torch(seed=42) first" in process.stderr
    assert "torchrun --nproc_per_node N script.py" in process.stderr


def commands_of(application: str) -> list[list[str]]:
    lines = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line.partition(application)[2]) for line in lines if application in line]


def test_the_fine_tuning_commands_parse():
    qwen, deepseek = commands_of("applications/lora_finetune.py")
    assert parse_config(FinetuneConfig, "test", qwen).parallel.ep == 8
    parsed = parse_config(FinetuneConfig, "test", deepseek)
    assert (parsed.parallel.pp, parsed.lora.lora_alpha) == (3, 16)


def test_the_grpo_command_parses():
    (qwen,) = commands_of("applications/train_grpo.py")
    config = parse_config(GRPOConfig, "test", qwen)
    assert (config.parallel.ep, config.output.save_dir) == (8, "runs/qwen3_grpo")


def test_the_grpo_page_names_flags_and_metrics_that_exist():
    page = (ROOT / "docs" / "grpo.md").read_text()
    flags = {f"--{name}" for name in flatten_fields(GRPOConfig)} | {f"--{name}" for name in GRPOConfig.ALIASES}
    lines = page.replace("\\\n", " ").splitlines()
    own = [line for line in lines if not re.search(r"python applications/(?!train_grpo)|torchrun", line)]
    unknown = {flag for line in own for flag in re.findall(r"--[a-z_]+", line)} - flags
    assert not unknown
    measured = [line.split()[2:] for line in page.splitlines() if line.startswith("python applications/benchmark.py")]
    assert [benchmark.parse(line).subject for line in measured] == ["generation"] * 2 + ["grpo"] * 2


def test_the_rewards_of_the_grpo_page_take_the_settings_that_it_names():
    page = (ROOT / "docs" / "grpo.md").read_text().partition("| reward | `gt_answer` | settings")[2]
    rows = [line.split(" | ") for line in page.partition("\n\n")[0].splitlines()[2:]]
    assert len(rows) == 7
    for names, _, settings in rows:
        for reward in re.findall(r"`(\w+)`", names):
            takes = inspect.signature(REWARDS[reward]).parameters
            assert {name for name in re.findall(r"`(\w+)`", settings)} <= takes.keys(), reward


def test_the_grpo_script_runs_as_printed(tmp_path):
    page = (ROOT / "docs" / "grpo.md").read_text()
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "GRPOTrainer" in code)
    base, _ = make_model_dir(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"messages": [{"role": "user", "content": "What" * n}], "gt_answer": "1"} for n in (1, 2, 3, 4)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2"]
    launcher += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    process = run_script(tmp_path, *launcher, code=code, base=base, arguments=[str(prompts)])
    assert process.returncode == 0, process.stdout + process.stderr
    assert set(re.findall(r"episode (\d): '", process.stdout)) == {"1", "2"}
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


def flatten_fields(config_class: type) -> set[str]:
    hints = typing.get_type_hints(config_class)
    nested = {field.name: hints[field.name] for field in dataclasses.fields(config_class)}
    return {
        n for name, hint in nested.items() for n in (flatten_fields(hint) if dataclasses.is_dataclass(hint) else [name])
    }


def test_every_file_that_the_readme_names_exists():
    for name in re.findall(r"`((?:applications|recipes|tests|coati_ext)/[\w./]+)`", README):
        assert (ROOT / name).exists(), name
