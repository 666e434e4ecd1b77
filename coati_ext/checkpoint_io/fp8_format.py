"""Block-scaled FP8 checkpoints as DeepSeek publishes them: which tensor scales which, checked before any work.

`X.weight` is FP8 of shape (..., N, M), `X.weight_scale_inv` its scales of shape (..., ceil(N/bn), ceil(M/bm)), with
(bn, bm) from `quantization_config.weight_block_size`. The value is the product, in spite of the name. Blocks are
counted from the first row and column; the last ones may be ragged, so the block is never guessed from shapes.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from coati_ext.checkpoint_io.checkpoint import Checkpoint
from coati_ext.checkpoint_io.hf_directory import CONFIG_NAME
from coati_ext.checkpoint_io.safetensors_file import TensorEntry
from coati_ext.checkpoint_io.stream import Target, TensorSpec, rows_of, rows_to
from coati_ext.checkpoint_io.workers import Source
from coati_ext.utils.kept_dtypes import SCALE_SUFFIX

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
DEFAULT_BLOCK = (128, 128)
Block = tuple[int, int]


def quantization_of(config: dict[str, Any]) -> dict[str, Any] | None:
    """The `quantization_config` of a model config, also where it stands in a part of it (`text_config`)."""
    found = config.get("quantization_config")
    parts = (value for value in config.values() if isinstance(value, dict))
    return found if found is not None else next((p["quantization_config"] for p in parts if _has_quantization(p)), None)


def without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the same model with its weights in bf16."""
    parts = {key: without_quantization(part) if isinstance(part, dict) else part for key, part in config.items()}
    parts.pop("quantization_config", None)
    if "torch_dtype" in parts:
        parts["torch_dtype"] = parts["dtype"] = "bfloat16"  # torch_dtype: the name before transformers 5
    elif "dtype" in parts:
        parts["dtype"] = "bfloat16"
    return parts


def block_size(checkpoint: Checkpoint) -> Block:
    """Rows and columns that share a scale.

    Raises:
        ValueError: `config.json` has no quantization_config, or one of another scheme.
    """
    file = checkpoint.directory / CONFIG_NAME
    found = quantization_of(checkpoint.config())
    if found is not None and not isinstance(found, dict):
        raise ValueError(f"{file}: quantization_config is {found!r}; expected a mapping")
    if found is None:
        raise ValueError(f"{file} has no quantization_config, so nothing says that the model is FP8, or of which block")
    method, block = found.get("quant_method"), found.get("weight_block_size")
    if method != "fp8":
        raise ValueError(
            f"{file}: quant_method is {method!r}; accepted: 'fp8' (block-scaled, as DeepSeek publishes it)"
        )
    if found.get("activation_scheme", "dynamic") != "dynamic":
        raise ValueError(
            f"{file}: activation_scheme {found['activation_scheme']!r} is not supported; accepted: 'dynamic'"
        )
    whole = isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
    if not whole:
        raise ValueError(f"{file}: weight_block_size is {block!r}; expected two positive numbers, as [128, 128]")
    return block[0], block[1]


def scales_of(checkpoint: Checkpoint, block: Block) -> dict[str, TensorEntry]:
    """FP8 weight -> its scales, for every FP8 weight of the checkpoint.

    Raises:
        ValueError: a weight without scales, scales without an FP8 weight, or scales of another shape or dtype than the
            weight and the block demand; names the tensor and its file.
    """
    scales = {}
    for name, weight in checkpoint.tensors.items():
        if weight.dtype in FP8_DTYPES:
            scales[name] = _checked_scale(weight, checkpoint.tensors.get(name + SCALE_SUFFIX), block)
    for name, entry in checkpoint.tensors.items():
        if name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) not in scales:
            weight = checkpoint.tensors.get(name.removesuffix(SCALE_SUFFIX))
            what = "there is no such weight" if weight is None else f"the weight is {weight.dtype}, not FP8"
            raise ValueError(f"{entry.file}: {name} are scales, but {what}; was the checkpoint converted in part?")
    return scales


def grid(shape: Sequence[int], block: Block) -> tuple[int, ...]:
    """Shape of the scales of a weight (..., N, M).

    Example:
        >>> grid((576, 7168), (128, 128))
        (5, 56)
    """
    return (*shape[:-2], math.ceil(shape[-2] / block[0]), math.ceil(shape[-1] / block[1]))


def scale_rows_of(scale: TensorEntry, matrix: int, start: int, stop: int, block: Block) -> Source:
    """The scales of rows start:stop of one matrix; `start` is a multiple of the block."""
    return rows_of(scale, matrix, start // block[0], math.ceil(stop / block[0]))


def scale_rows_to(scale: TensorSpec, matrix: int, start: int, stop: int, block: Block) -> Target:
    """Where the scales of rows start:stop go in an output; `start` is a multiple of the block."""
    return rows_to(scale, matrix, start // block[0], math.ceil(stop / block[0]))


def fp8_specs(
    name: str, shape: tuple[int, ...], block: Block, scale_dtype: torch.dtype = torch.float32
) -> tuple[TensorSpec, TensorSpec]:
    """(Weight, scales) as they stand in an output."""
    weight = TensorSpec(name=name, dtype=torch.float8_e4m3fn, shape=shape)
    return weight, TensorSpec(name=name + SCALE_SUFFIX, dtype=scale_dtype, shape=grid(shape, block))


def is_power_of_two(quantization: dict[str, Any]) -> bool:
    """Whether the scales of this `quantization_config` are powers of two."""
    return quantization.get("scale_fmt") == "ue8m0"


def _checked_scale(weight: TensorEntry, scale: TensorEntry | None, block: Block) -> TensorEntry:
    if scale is None:
        raise ValueError(f"{weight.file}: {weight.name} is {weight.dtype} and {weight.name}{SCALE_SUFFIX} is nowhere")
    if len(weight.shape) < 2:
        raise ValueError(f"{weight.file}: {weight.name} is FP8 of shape {list(weight.shape)}; expected 2 dims or more")
    if scale.dtype not in SCALE_DTYPES:
        raise ValueError(f"{scale.file}: {scale.name} is {scale.dtype}; accepted: {', '.join(map(str, SCALE_DTYPES))}")
    expected = grid(weight.shape, block)
    if scale.shape != expected:
        raise ValueError(
            f"{scale.file}: {scale.name} has shape {list(scale.shape)}, but {weight.name} of {list(weight.shape)} in "
            f"blocks of {list(block)} takes {list(expected)}"
        )
    return scale


def _has_quantization(part: dict[str, Any]) -> bool:
    return part.get("quantization_config") is not None
