"""Adapters of tiny models for the tests of export and verification."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from torch import nn

from coati_ext.checkpoint_io.adapter import save_adapter
from coati_ext.models.lora import inject_lora

WEIGHTS = "adapter_model.safetensors"


def lora_model(family: str, targets: str | list[str] = "all", *, seed: int = 5, ep_group=None, **kwargs) -> nn.Module:
    """A tiny model with LoRA whose A and B are all random: nothing that is dropped or misplaced goes unseen."""
    model = tiny_model(family)
    options = {"r": 4, "lora_alpha": 12, "target_modules": targets, **kwargs}
    inject_lora(model, LoraConfig(**options), ep_group=ep_group)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and ep_group is None:
            generator = torch.Generator().manual_seed(seed + len(name))
            parameter.data.normal_(0, 0.1, generator=generator)
    return model.eval()


def save_base(family: str, directory: Path) -> str:
    """The base on disk, once per directory."""
    path = directory / family
    if not path.exists():
        tiny_model(family).save_pretrained(path)
    return str(path)


def saved(model: nn.Module, directory: Path, base: str | None = None) -> Path:
    path = directory / "adapter"
    save_adapter(model, path, base_model_name_or_path=base)
    return path


def edit_tensors(adapter: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(adapter / WEIGHTS)
    edit(tensors)
    save_file(tensors, adapter / WEIGHTS, metadata={"format": "pt"})


def edit_config(adapter: Path, **changes: object) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
