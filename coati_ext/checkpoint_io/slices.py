"""Slices of tensors as byte ranges: the strips that cut them out of a checkpoint, and that put them together again.

A tensor is seen as a matrix: its leading dimensions are rows, the last one is columns. A slice of whole rows is a few
byte ranges, which are copied; where columns are cut, whole rows are read and the columns taken.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from coati_ext.checkpoint_io.reshard import Spans
from coati_ext.checkpoint_io.safetensors_file import TensorEntry
from coati_ext.checkpoint_io.stream import Strip, Target, TensorSpec, row_spans
from coati_ext.checkpoint_io.workers import Source

Slice = tuple[TensorEntry, Sequence[Spans] | None]  # where it is, and what of the tensor it is (None: all)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # elements are moved, never computed with


def cut_strips(entry: TensorEntry, spec: TensorSpec, spans: Sequence[Spans]) -> Iterator[Strip]:
    """Move a slice of `entry`, the product of `spans` (one of each dimension), to the output tensor `spec`."""
    source, target = _matrix(entry.dtype, entry.shape, entry.start), _matrix(spec.dtype, spec.shape)
    columns = _columns(entry.shape, spans)
    whole = columns == ((0, source.num_columns),)
    done = 0
    for start, stop in _rows(entry.shape, spans):
        for a, b in row_spans(stop - start, source.num_columns):
            yield Strip(
                sources=(Source(file=entry.file, **source.at(start + a, start + b)),),
                targets=(Target(name=spec.name, **target.at(done + a, done + b)),),
                convert=None if whole else partial(_take_columns, columns),
            )
        done += stop - start


def join_strips(spec: TensorSpec, slices: Sequence[Slice]) -> Iterator[Strip]:
    """The inverse: put all slices of a tensor where they were. Those of the same rows have different columns."""
    whole = [((0, size),) for size in spec.shape]
    same_rows: dict[tuple, list[tuple[TensorEntry, Spans]]] = {}
    for entry, spans in slices:
        rows = _rows(spec.shape, spans or whole)
        same_rows.setdefault(rows, []).append((entry, _columns(spec.shape, spans or whole)))
    target = _matrix(spec.dtype, spec.shape)
    for rows, group in same_rows.items():
        columns = [spans for _, spans in group]
        convert = None if columns == [((0, target.num_columns),)] else partial(_put_columns, columns)
        done = 0
        for start, stop in rows:
            for a, b in row_spans(stop - start, target.num_columns):
                sources = tuple(
                    Source(file=entry.file, **_matrix(entry.dtype, entry.shape, entry.start).at(done + a, done + b))
                    for entry, _ in group
                )
                targets = (Target(name=spec.name, **target.at(start + a, start + b)),)
                yield Strip(sources=sources, targets=targets, convert=convert)
            done += stop - start


@dataclass(frozen=True, kw_only=True)
class _Matrix:
    """Where the rows of a tensor are in a file or an output; a vector has one element in a row."""

    dtype: torch.dtype
    num_columns: int
    start: int = 0

    def at(self, row: int, stop: int) -> dict[str, Any]:
        """The place of rows row:stop, for a `Source` or `Target`."""
        start = self.start + row * self.num_columns * self.dtype.itemsize
        return {"start": start, "dtype": self.dtype, "shape": (stop - row, self.num_columns)}


def _matrix(dtype: torch.dtype, shape: Sequence[int], start: int = 0) -> _Matrix:
    return _Matrix(dtype=_WORDS[dtype.itemsize], num_columns=shape[-1] if len(shape) > 1 else 1, start=start)


def _rows(shape: Sequence[int], spans: Sequence[Spans]) -> tuple[tuple[int, int], ...]:
    """The runs of rows, in order, of a tensor's slice.

    Example:
        >>> _rows((3, 4, 7), (((1, 3),), ((0, 1), (2, 3)), ((0, 7),)))  # of experts 1 and 2 rows 0 and 2
        ((4, 5), (6, 7), (8, 9), (10, 11))
    """
    runs = [(0, 1)]
    num_rows_dims = len(shape) - (len(shape) > 1)
    for size, span in zip(shape[:num_rows_dims], spans[:num_rows_dims], strict=True):
        if span == ((0, size),):
            runs = [(start * size, stop * size) for start, stop in runs]
        else:
            runs = [(i * size + a, i * size + b) for start, stop in runs for i in range(start, stop) for a, b in span]
    return tuple(run for run in runs if run[0] < run[1])


def _columns(shape: Sequence[int], spans: Sequence[Spans]) -> Spans:
    return spans[-1] if len(shape) > 1 else ((0, 1),)


def _moves(columns: Spans) -> Iterator[tuple[slice, slice]]:
    """(Columns in the whole, columns in the slice)."""
    place = 0
    for start, stop in columns:
        yield slice(start, stop), slice(place, place + stop - start)
        place += stop - start


def _take_columns(columns: Spans, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for whole, own in _moves(columns):
        targets[0][:, own] = sources[0][:, whole]


def _put_columns(columns: list[Spans], sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for source, spans in zip(sources, columns, strict=True):
        for whole, own in _moves(spans):
            targets[0][:, whole] = source[:, own]
