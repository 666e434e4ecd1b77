"""FP8 -> BF16 for whole checkpoints: the same shards, the same names, nothing left in FP8.

Against the script that DeepSeek-V3's repository has: scales are found through the index in whatever shard they are and
read alone; a missing one is an error instead of an FP8 tensor in the output; the output is a complete directory.
"""

import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from coati_ext.checkpoint_io.checkpoint import Checkpoint
from coati_ext.checkpoint_io.fp8_format import (
    FP8_DTYPES,
    SCALE_SUFFIX,
    Block,
    block_size,
    scale_rows_of,
    scales_of,
    without_quantization,
)
from coati_ext.checkpoint_io.rewrite import WorkOptions, rewrite_checkpoint
from coati_ext.checkpoint_io.safetensors_file import TensorEntry
from coati_ext.checkpoint_io.stream import OutputShard, Strip, TensorSpec, row_spans, rows_of, rows_to
from coati_ext.kernel.fp8_cast import dequantize_fp8

Mtp = Literal["keep", "drop"]


def fp8_to_bf16(checkpoint: Checkpoint, output: Path, *, mtp: Mtp = "keep", options: WorkOptions) -> None:
    """Convert a checkpoint; see `rewrite_checkpoint` for how, and what it raises.

    Args:
        mtp: "drop" leaves the multi-token-prediction layers out, which training does not use.

    Raises:
        ValueError: see `fp8_format`; or there is nothing in FP8, or nothing to drop.
    """
    config = checkpoint.config()
    shards = plan_fp8_to_bf16(checkpoint, mtp=mtp)
    rewrite_checkpoint(
        checkpoint,
        output,
        shards=shards,
        config=bf16_config(config, mtp=mtp),
        identity={"tool": "fp8_to_bf16", "mtp": mtp},
        options=options,
    )


def plan_fp8_to_bf16(checkpoint: Checkpoint, *, mtp: Mtp = "keep") -> list[OutputShard]:
    """The output's shards, from headers and config alone."""
    block = block_size(checkpoint)
    scales = scales_of(checkpoint, block)
    if not scales:
        raise ValueError(f"{checkpoint.directory} has no FP8 tensor: it needs no conversion")
    dropped = mtp_tensors(checkpoint) if mtp == "drop" else set()
    if mtp == "drop" and not dropped:
        raise ValueError(f"--mtp drop: {checkpoint.directory} has no multi-token-prediction layer; leave the flag out")
    shards = []
    for name, entries in checkpoint.shards.items():
        shard = OutputShard(name=name, metadata={**checkpoint.metadata[name], "format": "pt"})
        for entry in entries:
            if entry.name in dropped or entry.name.endswith(SCALE_SUFFIX):
                continue
            if entry.dtype in FP8_DTYPES:
                shard.add(*dequantized(entry, scales[entry.name], block))
            else:
                shard.copy(entry)
        if shard.tensors:
            shards.append(shard)
    return shards


def dequantized(weight: TensorEntry, scale: TensorEntry, block: Block) -> tuple[list[TensorSpec], list[Strip]]:
    """The weight in BF16, and the strips that make it: whole rows of blocks, each with its own rows of scales."""
    spec = TensorSpec(name=weight.name, dtype=torch.bfloat16, shape=weight.shape)
    strips = [
        Strip(
            sources=(rows_of(weight, matrix, start, stop), scale_rows_of(scale, matrix, start, stop, block)),
            targets=(rows_to(spec, matrix, start, stop),),
            convert=partial(_dequantize, block=block),
        )
        for matrix in range(math.prod(weight.shape[:-2]))
        for start, stop in row_spans(*weight.shape[-2:], multiple=block[0])
    ]
    return [spec], strips


def mtp_tensors(checkpoint: Checkpoint) -> set[str]:
    """Tensors of the layers past `num_hidden_layers` (DeepSeek) or below `mtp` (Qwen)."""
    config = checkpoint.config()
    num_layers = config.get("num_hidden_layers", (config.get("text_config") or {}).get("num_hidden_layers"))
    if not isinstance(num_layers, int):
        raise ValueError(
            f"{checkpoint.directory}: num_hidden_layers in config.json is {num_layers!r}; --mtp drop goes by it"
        )

    def is_mtp(name: str) -> bool:
        layer = re.match(r"(?:model\.|language_model\.)*layers\.(\d+)\.", name)
        return re.search(r"(?:^|\.)mtp\.", name) is not None or (layer is not None and int(layer[1]) >= num_layers)

    return {name for name in checkpoint.tensors if is_mtp(name)}


def bf16_config(config: dict[str, Any], *, mtp: Mtp) -> dict[str, Any]:
    """The output's `config.json`."""
    config = without_quantization(config)
    config.setdefault("dtype", "bfloat16")
    if mtp == "drop":
        for part in (config, *(part for part in config.values() if isinstance(part, dict))):
            for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
                if key in part:
                    part[key] = 0
    return config


def _dequantize(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], *, block: Block) -> None:
    dequantize_fp8(*sources, block_size=block, out=targets[0])
