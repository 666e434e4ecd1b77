"""The README's example and commands are true."""

import re
import shlex
from pathlib import Path

from distributed import pool
from model_dir import make_model_dir

from coati_ext.cli import parse_config
from coati_ext.config import FinetuneConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def run_example(code: str, base: str, directory: str) -> float:
    """Execute the README's lines on this rank, as a script that has loaded a batch would."""
    import os

    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM

    os.chdir(directory)
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
    scope = {"torch": torch, "LoraConfig": LoraConfig, "AutoModelForCausalLM": AutoModelForCausalLM}
    scope.update(base=base, ids=ids)
    exec(code, scope)
    return scope["optimizer"].get_grad_norm()


def test_the_booster_example_runs_as_printed_and_its_adapter_verifies(tmp_path):
    from coati_ext.checkpoint_io.verify import verify_adapter

    (code,) = blocks("python")
    assert len(code.strip().splitlines()) <= 14
    base, _ = make_model_dir(tmp_path)
    norms = pool(2).run(run_example, code, str(base), str(tmp_path))
    assert norms[0] == norms[1] > 0
    report = verify_adapter(base, tmp_path / "adapter")
    assert report.passed, report.format()


def commands_of(application: str) -> list[list[str]]:
    lines = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line.partition(application)[2]) for line in lines if application in line]


def test_the_fine_tuning_commands_parse():
    qwen, deepseek = commands_of("applications/lora_finetune.py")
    assert parse_config(FinetuneConfig, "test", qwen).parallel.ep == 8
    parsed = parse_config(FinetuneConfig, "test", deepseek)
    assert (parsed.parallel.pp, parsed.lora.lora_alpha) == (3, 16)


def test_every_file_that_the_readme_names_exists():
    for name in re.findall(r"`((?:applications|recipes|tests|coati_ext)/[\w./]+)`", README):
        assert (ROOT / name).exists(), name
