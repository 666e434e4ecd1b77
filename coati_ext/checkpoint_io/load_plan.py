"""What a rank reads to fill its model, and where it goes: planned and checked from headers alone.

`reshard.plan` says which slices a rank holds, `weight_names` what they are called in the model. Every slice must have a
weight, every weight all of its slices, and shapes and dtypes must fit, or the error names the tensor and its file.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from coati_ext.checkpoint_io.checkpoint import Checkpoint
from coati_ext.checkpoint_io.fp8_format import (
    FP8_DTYPES,
    SCALE_DTYPES,
    SCALE_SUFFIX,
    Block,
    block_size,
    quantization_of,
    scales_of,
)
from coati_ext.checkpoint_io.fp8_to_bf16 import mtp_tensors
from coati_ext.checkpoint_io.layout import Layout
from coati_ext.checkpoint_io.reshard import Piece, plan
from coati_ext.checkpoint_io.safetensors_file import TensorEntry
from coati_ext.checkpoint_io.weight_names import Place, WeightNames, of_expert
from coati_ext.moe.experts import MoeExperts, is_experts_module

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_COMPUTED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")  # a buffer that older checkpoints have too


@dataclass(frozen=True, kw_only=True)
class Region:
    """Consecutive elements, from `start` on, of the weight `name` of the model."""

    name: str
    start: int


@dataclass(frozen=True, kw_only=True)
class Read:
    """A slice of a tensor, with its scales if it is FP8, and the region that it fills, or is the same as.

    `equals`: another tensor of the checkpoint fills the region, for the model ties the two weights.
    """

    entry: TensorEntry
    scale: TensorEntry | None
    piece: Piece
    region: Region
    equals: TensorEntry | None = None


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """All reads of a rank, and the FP8 block if the checkpoint has one."""

    reads: list[Read]
    block: Block | None
    num_skipped: int


def plan_reads(model: PreTrainedModel, checkpoint: Checkpoint, layout: Layout, rank: int) -> LoadPlan:
    """Every slice that the rank holds, except for what no model has: multi-token prediction and rotary frequencies.

    Raises:
        ValueError: a tensor without a weight, a weight without a tensor, another shape or dtype, FP8 without scales,
            another quantisation, a layout that the model cannot have.
    """
    config = checkpoint.config()
    has_fp8 = any(entry.dtype in FP8_DTYPES for entry in checkpoint.tensors.values())
    block = block_size(checkpoint) if has_fp8 or quantization_of(config) is not None else None
    scales = scales_of(checkpoint, block) if block is not None else {}
    _check_layer_count(checkpoint)
    skipped = mtp_tensors(checkpoint) | {name for name in checkpoint.tensors if _COMPUTED.search(name)}
    tensors = {name: entry for name, entry in checkpoint.tensors.items() if name not in skipped}
    scale_names = {scale.name for scale in scales.values()}  # read with their weights
    pieces = {piece.name: piece for piece in plan(config, tensors, layout).pieces(rank)}
    names, weights = WeightNames(model), _Weights(model, checkpoint.directory)
    places = {name: names.place(name) for name in pieces if name not in scale_names}
    in_file = {place.name for place in places.values()}
    for name, place in places.items():
        scale = scales.get(name)
        if scale is not None and weights.keep_fp8(place.name):
            weights.take(pieces[name], place, tensors[name], None, in_file)
            of_scale = replace(place, name=place.name + SCALE_SUFFIX)
            weights.take(pieces[scale.name], of_scale, scale, None, in_file)
        else:
            weights.take(pieces[name], place, tensors[name], scale, in_file)
    weights.check_all_taken()
    return LoadPlan(reads=weights.reads, block=block, num_skipped=len(skipped))


@dataclass(kw_only=True)
class _Weight:
    """A parameter or persistent buffer to fill."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    experts: tuple[int, int] | None
    """Of stacked experts: the model-wide numbers (first, stop) of those in dim 0."""
    taken: dict[int, TensorEntry] = field(default_factory=dict)
    """Start of a region -> what fills it."""
    num_taken: int = 0


class _Weights:
    """The weights of a model, and the reads that fill them."""

    def __init__(self, model: PreTrainedModel, directory: Path) -> None:
        self.reads: list[Read] = []
        self._directory = directory
        self._tied = list((getattr(model, "all_tied_weights_keys", None) or {}).items())
        self._weights: dict[str, _Weight] = {}
        same: dict[int, _Weight] = {}
        for name, module, leaf in named_weights(model):
            tensor = getattr(module, leaf)
            weight = _Weight(shape=tuple(tensor.shape), dtype=tensor.dtype, experts=_experts_of(module))
            self._weights[name] = same.setdefault(id(tensor), weight)

    def take(
        self, piece: Piece, place: Place, entry: TensorEntry, scale: TensorEntry | None, in_file: set[str]
    ) -> None:
        """Plan to read a slice of a tensor; `in_file` has the weights that tensors of the checkpoint are named for.

        It also fills weights that are tied to its own and in no file, or a tied one alone where its own is on another
        stage. What a tied weight's tensor has filled is compared instead.
        """
        partners = [name for pair in self._tied if place.name in pair for name in pair if name in self._weights]
        here = place.name in self._weights
        takers = [place.name] if here else []
        takers += [name for name in partners if name != place.name and not (here and name in in_file)]
        if not takers:
            raise ValueError(
                f"{entry.file}: no weight of the model takes {entry.name} (in transformers' names {place.name}); is it "
                "another model's checkpoint, or is the model sharded by another layout?"
            )
        for name in {id(self._weights[name]): name for name in reversed(takers)}.values():  # each parameter once
            weight = self._weights[name]
            self._check_dtype(weight, name, entry)
            start = self._start(weight, place, piece, entry)
            equals = weight.taken.get(start) if partners else None
            if equals is None:
                self._mark(weight, start, math.prod(piece.shape), entry)
            region = Region(name=name, start=start)
            self.reads.append(Read(entry=entry, scale=scale, piece=piece, region=region, equals=equals))

    def keep_fp8(self, name: str) -> bool:
        """Whether the model keeps this weight in FP8, with its scales, instead of their product."""
        return name in self._weights and self._weights[name].dtype in FP8_DTYPES

    def check_all_taken(self) -> None:
        """ValueError for the first weight that lacks a tensor."""
        for name, weight in self._weights.items():
            missing = math.prod(weight.shape) - weight.num_taken
            if missing:
                raise ValueError(
                    f"{self._directory}: no file has {_first_missing(name, weight)}, which the model needs; "
                    "copy the whole checkpoint again, or shard the model by the layout that it is loaded with"
                )

    def _start(self, weight: _Weight, place: Place, piece: Piece, entry: TensorEntry) -> int:
        """Where in the weight the slice begins, its shape and experts checked."""
        if place.expert is None:
            fits = piece.shape == weight.shape and (weight.experts is None or piece.spans[0] == (weight.experts,))
            start, shape = 0, weight.shape
        else:
            first, stop = weight.experts or (0, 0)
            rows = weight.shape[-2] // place.num_parts if weight.experts else 0
            shape = (rows, *weight.shape[2:])
            fits = piece.shape == shape and first <= place.expert < stop and rows * place.num_parts == weight.shape[-2]
            start = ((place.expert - first) * place.num_parts + place.part) * math.prod(shape)
        if not fits:
            held = f", of which this rank holds {list(piece.shape)}" if piece.shape != entry.shape else ""
            if held and weight.experts and place.expert is None:
                held += f" of experts {_range(*piece.spans[0][0])}"
            takes = f"{list(shape)} of experts {_range(*weight.experts)}" if weight.experts else str(list(shape))
            raise ValueError(
                f"{entry.file}: {entry.name} has shape {list(entry.shape)}{held}, but the model's {place.name} takes "
                f"{takes}; are the model and the layout those of the checkpoint?"
            )
        return start

    def _check_dtype(self, weight: _Weight, name: str, entry: TensorEntry) -> None:
        accepted = (*_FLOATS, *FP8_DTYPES) if weight.dtype in _FLOATS else (weight.dtype,)
        accepted = SCALE_DTYPES if name.endswith(SCALE_SUFFIX) else accepted
        if entry.dtype not in accepted:
            raise ValueError(f"{entry.file}: {entry.name} is {entry.dtype}; the model's {name} is {weight.dtype}")

    def _mark(self, weight: _Weight, start: int, size: int, entry: TensorEntry) -> None:
        weight.num_taken += size
        other = weight.taken.get(start)
        if other is None and weight.num_taken > math.prod(weight.shape):
            other = next(iter(weight.taken.values()))
        if other is not None:
            raise ValueError(f"{entry.file}: {entry.name} is the same weight as {other.name} in {other.file.name}")
        weight.taken[start] = entry


def named_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """What a checkpoint holds of a model, parameters and persistent buffers: name, module and the name in it."""
    for path, module in model.named_modules(remove_duplicate=False):
        leaves = [leaf for leaf, _ in module.named_parameters(recurse=False, remove_duplicate=False)]
        leaves += [leaf for leaf, _ in module.named_buffers(recurse=False) if is_persistent(module, leaf)]
        yield from ((f"{path}.{leaf}" if path else leaf, module, leaf) for leaf in leaves)


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Whether checkpoints hold this buffer of the module."""
    return buffer not in module._non_persistent_buffers_set


def _experts_of(module: nn.Module) -> tuple[int, int] | None:
    """The model's experts, (first, stop), of a module with stacked experts."""
    if isinstance(module, MoeExperts):
        return module.first_expert, module.first_expert + module.num_local_experts
    return (0, module.down_proj.shape[0]) if is_experts_module(module) else None


def _range(start: int, stop: int) -> str:
    return f"{start}..{stop - 1}"


def _first_missing(name: str, weight: _Weight) -> str:
    """The name that the first missing tensor of a weight would have."""
    if weight.experts is None or not weight.taken:
        return name
    first, stop = weight.experts
    per_expert = math.prod(weight.shape[1:])
    for expert in range(first, stop):
        for start, entry in weight.taken.items():
            if (expert - first) * per_expert + start % per_expert not in weight.taken:
                return of_expert(entry.name, expert)
    return f"all parts of {name} (found {next(iter(weight.taken.values())).name} and its like)"


def _check_layer_count(checkpoint: Checkpoint) -> None:
    """Layers past `num_hidden_layers` are multi-token prediction where the config says so, and else a wrong config."""
    config = checkpoint.config()
    text = config.get("text_config") or config
    num_layers, num_extra = text.get("num_hidden_layers"), text.get("num_nextn_predict_layers") or 0
    if not isinstance(num_layers, int):
        raise ValueError(
            f"{checkpoint.directory}: num_hidden_layers in config.json is {num_layers!r}; expected a number of layers "
            "(families that call it otherwise are not supported)"
        )
    for name, entry in checkpoint.tensors.items():
        layer = re.match(r"(?:model\.|language_model\.)*layers\.(\d+)\.", name)
        if layer is not None and int(layer[1]) >= num_layers + num_extra:
            raise ValueError(
                f"{entry.file}: {name} is of a layer past the {num_layers} of config.json (and {num_extra} for "
                "multi-token prediction): num_hidden_layers there is wrong, or the checkpoint is of another model"
            )
