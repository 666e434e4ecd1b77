"""BF16 -> block-scaled FP8 (e4m3, 128 x 128) for whole checkpoints, in the form that DeepSeek publishes.

Every block is scaled so that its largest element becomes 448, the largest of e4m3. An element then changes by at most
1/16 of itself, or by 2^-10 of the block's scale where it is below 2^-6 of it; see `QuantizationError` for what a run
measures. Going back to BF16 and to FP8 again changes no more than rounding.
"""

import math
import re
import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from coati_ext.checkpoint_io.checkpoint import Checkpoint
from coati_ext.checkpoint_io.fp8_format import (
    DEFAULT_BLOCK,
    FP8_DTYPES,
    SCALE_SUFFIX,
    Block,
    block_size,
    fp8_specs,
    is_power_of_two,
    quantization_of,
    scale_rows_to,
)
from coati_ext.checkpoint_io.hf_directory import CONFIG_NAME
from coati_ext.checkpoint_io.rewrite import WorkOptions, rewrite_checkpoint
from coati_ext.checkpoint_io.safetensors_file import TensorEntry
from coati_ext.checkpoint_io.stream import OutputShard, Strip, TensorSpec, row_spans, rows_of, rows_to
from coati_ext.kernel.fp8_cast import dequantize_fp8, quantize_fp8

ScaleFormat = Literal["float32", "ue8m0"]
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# Modules whose 2-D weight stays as it is: DeepSeek's and Qwen's published FP8 checkpoints leave these out.
_KEPT_MODULES = {
    "embed_tokens", "lm_head", "gate", "router", "shared_expert_gate", "eh_proj", "head", "weights_proj",
}  # fmt: skip
_KEPT_PARTS = {"visual", "vision_tower", "vision_model", "multi_modal_projector", "audio_tower"}


@dataclass(kw_only=True)
class QuantizationError:
    """Of what this run converted: root of sum((w - w')^2) / sum(w^2)."""

    squares: float = 0.0
    error_squares: float = 0.0
    num_elements: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, weight: torch.Tensor, back: torch.Tensor) -> None:
        """Count `weight` and what its quantised form means."""
        difference = back - weight
        error, square = difference.square().sum().item(), weight.square().sum().item()
        with self._lock:
            self.error_squares += error
            self.squares += square
            self.num_elements += weight.numel()

    @property
    def relative_rms(self) -> float:
        return math.sqrt(self.error_squares / self.squares) if self.squares else 0.0

    def format(self) -> str:
        return f"quantised {self.num_elements / 1e6:.1f} M elements, error {self.relative_rms:.2%} of the weights' RMS"


def bf16_to_fp8(
    checkpoint: Checkpoint,
    output: Path,
    *,
    like: Checkpoint | None = None,
    scale_format: ScaleFormat = "float32",
    options: WorkOptions,
) -> QuantizationError:
    """Quantise a checkpoint; see `rewrite_checkpoint` for how, and what it raises.

    Args:
        like: an FP8 checkpoint of the same model; its choice of FP8 weights, block and quantization_config are taken.
            Without it, all linear weights except embeddings, heads, routers and vision are quantised.
        scale_format: "ue8m0" rounds scales up to powers of two (DeepSeek-V3.1 and later); stored as float32 as there.

    Raises:
        ValueError: the checkpoint has FP8 tensors already, or holds nothing to quantise, or is not `like`'s model.
    """
    names, quantization = choose(checkpoint, like, scale_format)
    block = tuple(quantization["weight_block_size"])
    measured = QuantizationError()
    shards = []
    for name, entries in checkpoint.shards.items():
        shard = OutputShard(name=name, metadata={**checkpoint.metadata[name], "format": "pt"})
        for entry in entries:
            if entry.name in names:
                shard.add(*quantized(entry, block, is_power_of_two(quantization), measured))
            else:
                shard.copy(entry)
        shards.append(shard)
    rewrite_checkpoint(
        checkpoint,
        output,
        shards=shards,
        config={**checkpoint.config(), "quantization_config": quantization},
        identity={"tool": "bf16_to_fp8", "quantization": quantization, "tensors": len(names)},
        options=options,
        inputs=[] if like is None else [like.directory],
    )
    return measured


def choose(
    checkpoint: Checkpoint, like: Checkpoint | None, scale_format: ScaleFormat
) -> tuple[set[str], dict[str, Any]]:
    """(Names of the weights to quantise, the `quantization_config` of the output)."""
    for entry in checkpoint.tensors.values():
        if entry.dtype in FP8_DTYPES:
            raise ValueError(f"{entry.file}: {entry.name} is {entry.dtype} already")
    for entry in checkpoint.tensors.values():
        if entry.name.endswith(SCALE_SUFFIX):
            raise ValueError(f"{entry.file}: {entry.name} is left from an FP8 checkpoint; remove it")
    found = quantization_of(checkpoint.config())
    if found is not None:
        raise ValueError(
            f"{checkpoint.directory / CONFIG_NAME} has a quantization_config ({found}); expected a model in BF16"
        )
    if like is not None:
        return _chosen_by(checkpoint, like)
    names = {entry.name for entry in checkpoint.tensors.values() if is_quantised_by_default(entry)}
    if not names:
        raise ValueError(
            f"{checkpoint.directory} has no linear weight to quantise (2-D 'X.weight' in bf16, fp16, fp32)"
        )
    linears = {e.name for e in checkpoint.tensors.values() if len(e.shape) == 2 and e.name.endswith(".weight")}
    kept = sorted(name.removesuffix(".weight") for name in linears - names if not name.endswith("embed_tokens.weight"))
    quantization: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(DEFAULT_BLOCK),
        "modules_to_not_convert": kept,
    }
    if scale_format == "ue8m0":
        quantization["scale_fmt"] = "ue8m0"
    return names, quantization


def is_quantised_by_default(entry: TensorEntry) -> bool:
    """Whether a tensor is a linear weight of the language model other than embedding, head and router."""
    path = entry.name.split(".")
    return (
        len(entry.shape) == 2
        and entry.dtype in FLOATS
        and len(path) > 1
        and path[-1] == "weight"
        and path[-2] not in _KEPT_MODULES
        and not re.search(r"norm|embed", path[-2])
        and _KEPT_PARTS.isdisjoint(path)
    )


def quantized(
    entry: TensorEntry, block: Block, power_of_two: bool, measured: QuantizationError
) -> tuple[list[TensorSpec], list[Strip]]:
    """A weight in e4m3 and its float32 scales, and the strips that make both."""
    weight, scale = fp8_specs(entry.name, entry.shape, block)
    strips = [
        Strip(
            sources=(rows_of(entry, matrix, start, stop),),
            targets=(rows_to(weight, matrix, start, stop), scale_rows_to(scale, matrix, start, stop, block)),
            convert=partial(_quantize, block=block, power_of_two=power_of_two, measured=measured, name=entry.name),
        )
        for matrix in range(math.prod(entry.shape[:-2]))
        for start, stop in row_spans(*entry.shape[-2:], multiple=block[0])
    ]
    return [weight, scale], strips


def quantize_named(
    weight: torch.Tensor, *, block: Block, power_of_two: bool, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_fp8`, whose error for a weight that is not finite then has the tensor's name."""
    try:
        return quantize_fp8(weight, block_size=block, power_of_two_scales=power_of_two)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _quantize(
    sources: list[torch.Tensor],
    targets: list[torch.Tensor],
    *,
    block: Block,
    power_of_two: bool,
    measured: QuantizationError,
    name: str,
) -> None:
    (weight,) = sources
    for target, value in zip(
        targets, quantize_named(weight, block=block, power_of_two=power_of_two, name=name), strict=True
    ):
        target.copy_(value)
    back = dequantize_fp8(*targets, block_size=block, dtype=torch.float32)
    measured.add(weight.float(), back)


def _chosen_by(checkpoint: Checkpoint, like: Checkpoint) -> tuple[set[str], dict[str, Any]]:
    block_size(like)  # refuses what is not block-scaled FP8
    quantization = quantization_of(like.config())
    names = {name for name, entry in like.tensors.items() if entry.dtype in FP8_DTYPES}
    for name in sorted(names):
        ours, theirs = checkpoint.tensors.get(name), like.tensors[name]
        if ours is None and _is_left_out(name, checkpoint):
            continue
        if ours is None:
            raise ValueError(f"{like.directory} has {name} in FP8, and {checkpoint.directory} has no such tensor")
        if ours.shape != theirs.shape or ours.dtype not in FLOATS:
            raise ValueError(
                f"{ours.file}: {name} is {ours.dtype} {list(ours.shape)}; for {like.directory}'s FP8 form expected "
                f"{list(theirs.shape)} in bf16, fp16 or fp32"
            )
    return names & checkpoint.tensors.keys(), quantization


def _is_left_out(name: str, checkpoint: Checkpoint) -> bool:
    """Whether the whole layer of the tensor is not in the checkpoint, as after `--mtp drop`."""
    layer = re.match(r"(.*\blayers\.\d+\.|mtp\.)", name)
    return layer is not None and not any(other.startswith(layer[1]) for other in checkpoint.tensors)
