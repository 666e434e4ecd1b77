"""Frozen weights that stay in FP8 as the checkpoint has them: half the memory of bf16, and nothing to convert.

    model = build_meta_model(directory, torch.bfloat16)
    ...  # shard it
    report = keep_fp8(model, directory)

It comes before `load_weights`, which then reads values and scales as they are.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from coati_ext.checkpoint_io.checkpoint import Checkpoint, read_checkpoint
from coati_ext.checkpoint_io.fp8_format import DEFAULT_BLOCK, FP8_DTYPES, SCALE_SUFFIX, block_size
from coati_ext.checkpoint_io.fp8_to_bf16 import mtp_tensors
from coati_ext.checkpoint_io.safetensors_file import TensorEntry
from coati_ext.checkpoint_io.weight_names import WeightNames
from coati_ext.models.fp8_linear import Fp8Linear
from coati_ext.moe.experts import MoeExperts
from coati_ext.utils.kept_dtypes import FP8


@dataclass(frozen=True, kw_only=True)
class KeptReport:
    """Weights of this rank."""

    num_kept: int
    num_elements: int
    dequantized: tuple[str, ...]
    """Are FP8 in the checkpoint and no layer of a kind that computes with FP8."""
    fp8_compute: bool

    def format(self) -> str:
        line = f"kept in FP8: {self.num_kept} weights of {self.num_elements:,} parameters on this rank"
        if self.fp8_compute:
            line += "; forward products round their rows to FP8, 128 columns to a scale (--fp8_compute)"
        if self.dequantized:
            more = f" and {len(self.dequantized) - 1} others" if len(self.dequantized) > 1 else ""
            line += f"; dequantised: {self.dequantized[0]}{more}"
        return line


def keep_fp8(model: PreTrainedModel, directory: str | Path, *, fp8_compute: bool = False) -> KeptReport:
    """Have the decoder layers' linear layers and experts take what is FP8 in the checkpoint, in place.

    Args:
        model: on the meta device, sharded, without LoRA so far.
        fp8_compute: whether their forward products are of rows in FP8 too.

    Raises:
        FileNotFoundError: see `read_checkpoint`.
        ValueError: the checkpoint has no FP8 weights, of another block or kind, or some experts of a layer in FP8 and
            others not.
    """
    return keep_weights_fp8(model, _fp8_weights(model, read_checkpoint(directory)), fp8_compute=fp8_compute)


def keep_weights_fp8(model: PreTrainedModel, names: Iterable[str], *, fp8_compute: bool = False) -> KeptReport:
    """The same for these weights of the whole model; those of other pipeline stages are passed by."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    kept, dequantized = [], []
    for name in names:
        path, _, leaf = name.rpartition(".")
        if name not in parameters:
            continue
        module = model.get_submodule(path)
        if isinstance(module, MoeExperts):
            module.keep_fp8(leaf)
        elif type(module) is nn.Linear and any(part.isdigit() for part in path.split(".")):
            module = Fp8Linear(module)
            model.set_submodule(path, module)
        else:
            dequantized.append(name)
            continue
        module.fp8_compute = fp8_compute
        kept.append(parameters[name].numel())
    return KeptReport(
        num_kept=len(kept), num_elements=sum(kept), dequantized=tuple(dequantized), fp8_compute=fp8_compute
    )


def _fp8_weights(model: PreTrainedModel, checkpoint: Checkpoint) -> list[str]:
    """Names in the whole model."""
    if not any(entry.dtype in FP8_DTYPES for entry in checkpoint.tensors.values()):
        raise ValueError(
            f"--frozen_dtype fp8: {checkpoint.directory} has no FP8 weights; make an FP8 checkpoint of it with "
            "applications/bf16_cast_fp8.py, or leave the flag out"
        )
    block = block_size(checkpoint)
    if block != DEFAULT_BLOCK:
        raise ValueError(
            f"--frozen_dtype fp8: {checkpoint.directory} has blocks of {list(block)}; only {list(DEFAULT_BLOCK)} can "
            "be kept. Leave the flag out: the weights are dequantised while they are read"
        )
    names, skipped = WeightNames(model), mtp_tensors(checkpoint)
    found: dict[str, dict[torch.dtype, TensorEntry]] = {}
    for name, entry in checkpoint.tensors.items():
        if name not in skipped and not name.endswith(SCALE_SUFFIX):
            found.setdefault(names.place(name).name, {}).setdefault(entry.dtype, entry)
    for name, entries in found.items():
        odd = next((entry for dtype, entry in entries.items() if dtype != FP8), None)
        if odd is not None and any(dtype in FP8_DTYPES for dtype in entries):
            raise ValueError(
                f"--frozen_dtype fp8: {odd.file}: {odd.name} is {odd.dtype}; all of {name} must be {FP8}. Leave the "
                "flag out: the weights are dequantised while they are read"
            )
    return [name for name, entries in found.items() if FP8 in entries]
