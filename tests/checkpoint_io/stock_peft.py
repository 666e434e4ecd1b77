"""Adapters that stock PEFT made with `target_parameters`, and their conversion, for the tests of it."""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny_models import tiny_model, token_batch

from coati_ext.checkpoint_io.convert_adapter import convert_adapter
from tests.checkpoint_io.adapters import WEIGHTS, edit_config

BOTH = ["experts.gate_up_proj", "experts.down_proj"]


def stock_adapter(directory: Path, base: str, *, family: str, model_config: dict | None = None, **options):
    """An adapter that stock PEFT made, all of it random: (directory, its logits)."""
    model = tiny_model(family, **(model_config or {}))
    defaults = {"r": 4, "lora_alpha": 12, "target_modules": ["o_proj"], "target_parameters": BOTH}
    peft_model = get_peft_model(model, LoraConfig(**{**defaults, **options}))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in peft_model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.1, generator=generator)
    peft_model.save_pretrained(directory)
    edit_config(directory, base_model_name_or_path=base)
    return directory, peft_model.eval()(token_batch()).logits.detach()


def convert(adapter: Path, to: str, **options) -> Path:
    """The converted directory, beside the adapter."""
    output = adapter.with_name(f"{adapter.name}-{to}")
    convert_adapter(adapter, output, to=to, **options)
    return output


def same_bits(one: Path, other: Path) -> bool:
    a, b = load_file(one / WEIGHTS), load_file(other / WEIGHTS)
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)
