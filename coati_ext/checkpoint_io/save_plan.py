"""What a rank writes of a fully fine-tuned model, and where it goes: planned and checked from headers alone.

`plan_reads` says which tensor of the base each part of the model came from; here the same table is read backwards. Of
the ranks that hold the same slice, the first writes it, so that each byte of the output is written once.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from transformers import PreTrainedModel

from coati_ext.checkpoint_io.checkpoint import Checkpoint
from coati_ext.checkpoint_io.fp8_format import FP8_DTYPES, SCALE_SUFFIX, scales_of
from coati_ext.checkpoint_io.fp8_to_bf16 import dequantized, mtp_tensors
from coati_ext.checkpoint_io.hf_directory import SINGLE_NAME
from coati_ext.checkpoint_io.layout import Layout
from coati_ext.checkpoint_io.load_plan import LoadPlan, Read, named_weights, plan_reads
from coati_ext.checkpoint_io.reshard import Spans, plan
from coati_ext.checkpoint_io.safetensors_file import TensorEntry, make_header, num_bytes
from coati_ext.checkpoint_io.slices import cut_strips
from coati_ext.checkpoint_io.stream import OutputShard, Strip, TensorSpec

_ROTARY = "rotary_emb.inv_freq"  # beside multi-token prediction, what `plan_reads` skips


@dataclass(frozen=True, kw_only=True)
class Write:
    """Rows of the model's part of a tensor; `start` is where, in the file, the first of these rows of the whole begins.

    `place.file` is the file's name alone. `columns`: those of the tensor that `values` are.
    """

    place: TensorEntry
    start: int
    values: torch.Tensor
    columns: Spans

    @property
    def nbytes(self) -> int:
        return num_bytes(self.place.dtype, self.values.shape)

    def ranges(self, content: memoryview) -> Iterator[tuple[int, memoryview]]:
        """(Place in the file, bytes): whole rows are one range, of columns each row has its own."""
        width = self.place.shape[-1] if len(self.place.shape) > 1 else 1
        if self.columns == ((0, width),):
            yield self.start, content
            return
        itemsize, done = self.place.dtype.itemsize, 0
        for row in range(len(self.values)):
            for start, stop in self.columns:
                nbytes = (stop - start) * itemsize
                yield self.start + (row * width + start) * itemsize, content[done : done + nbytes]
                done += nbytes


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A strip of a tensor of the base that the model has not."""

    place: TensorEntry
    strip: Strip

    @property
    def start(self) -> int:
        return self.place.start + self.strip.targets[0].start

    @property
    def nbytes(self) -> int:
        [target] = self.strip.targets
        return num_bytes(target.dtype, target.shape)


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """The files of the output, the same on every rank, and what this rank writes to them."""

    shards: list[OutputShard]
    """Their tensors and headers."""
    writes: list[Write]
    copies: list[Copy]

    @property
    def nbytes_total(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    @property
    def nbytes(self) -> int:
        """What this rank writes."""
        return sum(one.nbytes for one in (*self.writes, *self.copies))

    def digest(self) -> str:
        """Equal for equal files."""
        digest = sha256()
        for shard in self.shards:
            digest.update(shard.name.encode() + shard.header[0])
        return digest.hexdigest()


def plan_save(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    layout: Layout,
    rank: int,
    *,
    dtype: torch.dtype | None,
    max_shard_size: int,
) -> SavePlan:
    """The output's files and the rank's share of them; arguments as in `save_model`.

    Raises:
        ValueError: see `plan_reads`; or weights that are one tensor of the base and were trained apart.
    """
    planned = plan_reads(model, checkpoint, layout, rank)
    left_out = mtp_tensors(checkpoint) | {name for name in checkpoint.tensors if name.endswith(_ROTARY)}
    assert len(left_out) == planned.num_skipped, "save_model leaves out other tensors than load_weights"
    specs = _specs(model, checkpoint, left_out, dtype)
    shards = _shards(specs, max_shard_size)
    places = _places(shards)
    weights = {name: getattr(module, leaf).detach() for name, module, leaf in named_weights(model)}
    owners = plan(checkpoint.config(), {spec.name: spec for spec in specs if spec.name not in left_out}, layout).owners
    own: dict[str, Read] = {}
    for read in planned.reads:
        name, first = read.entry.name, tuple(spans[0][0] for spans in read.piece.spans)
        if owners(name, first)[0] == rank:
            _check_tied(own.setdefault(name, read), read, weights)
    copied = [name for name in places if name in left_out][rank :: layout.world_size]
    return SavePlan(
        shards=shards,
        writes=[write for name, read in own.items() for write in _writes(read, places[name], weights)],
        copies=list(_copies(checkpoint, planned, copied, places)),
    )


# --- the output


def _specs(
    model: PreTrainedModel, checkpoint: Checkpoint, left_out: set[str], dtype: torch.dtype | None
) -> list[TensorSpec]:
    """The tensors of the output, in the base's order."""
    entries = [entry for entry in checkpoint.tensors.values() if not entry.name.endswith(SCALE_SUFFIX)]
    num_elements = Counter()
    for entry in entries:
        num_elements[_unquantised(entry.dtype)] += math.prod(entry.shape)
    [(usual, _)] = num_elements.most_common(1)
    in_fp32 = [pattern.replace("*", ".*") for pattern in model._keep_in_fp32_modules_strict or ()]
    specs = []
    for entry in entries:
        own = _unquantised(entry.dtype)
        is_kept = entry.name in left_out or own != usual or any(re.search(pattern, entry.name) for pattern in in_fp32)
        specs.append(TensorSpec(name=entry.name, dtype=own if is_kept else dtype or own, shape=entry.shape))
    return specs


def _unquantised(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype in FP8_DTYPES else dtype


def _shards(specs: list[TensorSpec], max_shard_size: int) -> list[OutputShard]:
    """Files of at most `max_shard_size`, named as transformers names them."""
    groups: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        nbytes = num_bytes(spec.dtype, spec.shape)
        if not groups or nbytes > room:
            groups.append([])
            room = max_shard_size
        groups[-1].append(spec)
        room -= nbytes
    shards = []
    for i, group in enumerate(groups, 1):
        name = SINGLE_NAME if len(groups) == 1 else f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        shard = OutputShard(name=name, tensors=sorted(group, key=lambda spec: -spec.dtype.itemsize))
        shard.header = make_header([(spec.name, spec.dtype, spec.shape) for spec in shard.tensors], shard.metadata)
        shards.append(shard)
    return shards


def _places(shards: list[OutputShard]) -> dict[str, TensorEntry]:
    places = {}
    for shard in shards:
        _, offsets = shard.header
        for spec in shard.tensors:
            places[spec.name] = TensorEntry(
                name=spec.name, file=Path(shard.name), dtype=spec.dtype, shape=spec.shape, start=offsets[spec.name]
            )
    return places


# --- the rank's share


def _check_tied(one: Read, other: Read, weights: dict[str, torch.Tensor]) -> None:
    """Tied weights may be two parameters of a sharded model and one tensor of the base."""
    if one is not other and not torch.equal(_values(one, weights), _values(other, weights)):
        raise ValueError(
            f"{one.entry.name} of the base is both {one.region.name} and {other.region.name} of the model, but these "
            "differ: tied weights must be trained as one"
        )


def _values(read: Read, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """The slice of a tensor, flat, as the model has it."""
    start = read.region.start
    return weights[read.region.name].reshape(-1)[start : start + math.prod(read.piece.shape)]


def _writes(read: Read, place: TensorEntry, weights: dict[str, torch.Tensor]) -> Iterator[Write]:
    """The strips that would cut the slice out of the output, turned round."""
    flat, spec = _values(read, weights), TensorSpec(name=place.name, dtype=place.dtype, shape=read.piece.shape)
    columns = read.piece.spans[-1] if len(place.shape) > 1 else ((0, 1),)
    for strip in cut_strips(place, spec, read.piece.spans):
        [source], [target] = strip.sources, strip.targets
        first = target.start // place.dtype.itemsize
        values = flat[first : first + math.prod(target.shape)].view(target.shape)
        yield Write(place=place, start=source.start, values=values, columns=columns)


def _copies(
    checkpoint: Checkpoint, planned: LoadPlan, names: list[str], places: dict[str, TensorEntry]
) -> Iterator[Copy]:
    """FP8 is dequantised."""
    scales = scales_of(checkpoint, planned.block) if planned.block is not None else {}
    for name in names:
        made = OutputShard(name=places[name].file.name)
        if name in scales:
            made.add(*dequantized(checkpoint.tensors[name], scales[name], planned.block))
        else:
            made.copy(checkpoint.tensors[name])
        yield from (Copy(place=places[name], strip=strip) for strip in made.strips)
