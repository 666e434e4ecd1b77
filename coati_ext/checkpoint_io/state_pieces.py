"""Which part of which tensor a flat array is, and what to copy from some parts to make another: pure functions.

A rank's share of a tensor is cut twice: expert or tensor parallelism takes a slice along one dimension, and ZeRO takes
a range of that slice, flattened. Every element has its row-major index in the whole tensor, by which parts of different
layouts are compared.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What a flat 1-D array holds: elements flat_start:flat_stop of the flattened slice start:stop along `dim`."""

    name: str
    """Of the whole tensor, e.g. "model.layers.3.mlp.experts.lora_A.gate_proj"."""
    kind: str
    """What of it: "master", "exp_avg", "exp_avg_sq" or anything else."""
    shape: tuple[int, ...]
    """Of the whole tensor, over all ranks. A scalar's is (1,)."""
    dim: int
    start: int
    stop: int
    flat_start: int
    flat_stop: int
    """Padding excluded."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if not 0 <= self.dim < len(self.shape):
            raise ValueError(f"{self.title}: dim {self.dim} of a tensor of {len(self.shape)} dimensions")
        if not 0 <= self.start <= self.stop <= self.shape[self.dim]:
            raise ValueError(
                f"{self.title}: {self.start}:{self.stop} along dim {self.dim} of size {self.shape[self.dim]}"
            )
        if not 0 <= self.flat_start <= self.flat_stop <= math.prod(self.local_shape):
            raise ValueError(
                f"{self.title}: elements {self.flat_start}:{self.flat_stop} of a slice of {math.prod(self.local_shape)}"
            )

    @classmethod
    def whole(cls, name: str, kind: str, shape: Sequence[int]) -> "Piece":
        """All of a tensor."""
        shape = tuple(shape)
        numel = math.prod(shape)
        return cls(name=name, kind=kind, shape=shape, dim=0, start=0, stop=shape[0], flat_start=0, flat_stop=numel)

    @property
    def title(self) -> str:
        return f"{self.kind} of {self.name} {self.shape}"

    @property
    def key(self) -> tuple[str, str]:
        """Pieces with the same key are parts of the same tensor."""
        return self.name, self.kind

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of the slice along `dim`."""
        return (*self.shape[: self.dim], self.stop - self.start, *self.shape[self.dim + 1 :])

    @property
    def numel(self) -> int:
        return self.flat_stop - self.flat_start


class Run(NamedTuple):
    """Elements that follow each other both in an array and in the whole tensor."""

    index: int  # of the first one in the whole tensor, row-major
    offset: int  # of the first one in the array
    length: int


class Copy(NamedTuple):
    """destination[destination : destination + length] = source[source : source + length]."""

    source: int
    destination: int
    length: int


def runs(piece: Piece) -> Iterator[Run]:
    """Where a piece's elements are in the whole tensor, ascending.

    Example:
        >>> columns = Piece(name="w", kind="master", shape=(3, 8), dim=1, start=4, stop=6, flat_start=1, flat_stop=6)
        >>> [tuple(run) for run in runs(columns)]
        [(5, 0, 1), (12, 1, 2), (20, 3, 2)]
    """
    if piece.numel == 0:
        return
    inner = math.prod(piece.shape[piece.dim + 1 :])
    row, whole_row = (piece.stop - piece.start) * inner, piece.shape[piece.dim] * inner
    if row == whole_row:  # not cut along dim: one run, however many rows
        yield Run(piece.flat_start, 0, piece.numel)
        return
    for i in range(piece.flat_start // row, math.ceil(piece.flat_stop / row)):
        first, last = max(piece.flat_start, i * row), min(piece.flat_stop, (i + 1) * row)
        yield Run(i * whole_row + piece.start * inner + first - i * row, first - piece.flat_start, last - first)


def overlap(source: Piece, wanted: Piece) -> list[Copy]:
    """What the array of `source` has of the array of `wanted`, ascending; parts of the same tensor.

    Example:
        >>> rows = Piece(name="w", kind="master", shape=(4, 2), dim=0, start=1, stop=4, flat_start=0, flat_stop=6)
        >>> [tuple(copy) for copy in overlap(rows, Piece.whole("w", "master", (4, 2)))]
        [(0, 2, 6)]
    """
    copies: list[Copy] = []
    ours, theirs = runs(source), runs(wanted)
    a, b = next(ours, None), next(theirs, None)
    while a is not None and b is not None:
        first, last = max(a.index, b.index), min(a.index + a.length, b.index + b.length)
        if first < last:
            _append(copies, Copy(a.offset + first - a.index, b.offset + first - b.index, last - first))
        if a.index + a.length <= b.index + b.length:
            a = next(ours, None)
        else:
            b = next(theirs, None)
    return copies


def _append(copies: list[Copy], copy: Copy) -> None:
    """As one with the last where both sides go on: parts that are equal are one copy."""
    if copies:
        last = copies[-1]
        ends = (last.source + last.length, last.destination + last.length)
        if ends == (copy.source, copy.destination):
            copies[-1] = Copy(last.source, last.destination, last.length + copy.length)
            return
    copies.append(copy)


def plan_copies(wanted: Piece, sources: Sequence[Piece]) -> dict[int, list[Copy]]:
    """Index of a source -> what to copy from it, so that `wanted` is filled once. Of replicas any is taken.

    Args:
        sources: of the key of `wanted`.

    Raises:
        ValueError: a source is of a tensor of another shape, or no source has some part.
    """
    for source in sources:
        if source.shape != wanted.shape:
            raise ValueError(f"{wanted.title} is wanted, but what was saved has the shape {source.shape}")
    found = sorted(
        ((copy, i) for i, source in enumerate(sources) for copy in overlap(source, wanted)),
        key=lambda pair: (pair[0].destination, -pair[0].length),
    )
    plan: dict[int, list[Copy]] = {}
    done = 0
    for copy, i in found:
        known = done - copy.destination
        if known < 0:
            break
        if known < copy.length:
            plan.setdefault(i, []).append(Copy(copy.source + known, done, copy.length - known))
            done = copy.destination + copy.length
    if done < wanted.numel:
        gap_stop = min([copy.destination for copy, _ in found if copy.destination > done], default=wanted.numel)
        raise ValueError(
            f"{wanted.title}: elements {wanted.flat_start + done}:{wanted.flat_start + gap_stop} of the slice "
            f"{wanted.start}:{wanted.stop} along dim {wanted.dim} were saved by no rank"
        )
    return plan
