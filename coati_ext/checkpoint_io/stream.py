"""Make one checkpoint from another, strip by strip: read, convert and write overlap, and memory stays bounded.

The output is planned first, from headers alone: every output file is a list of tensors and of strips, each strip with
the byte ranges it is made of and the places it fills. Workers then take strip after strip; each reads, converts,
checksums and writes one, so with several of them the disk reads, the device computes and the disk writes at the same
time, and the memory in use is that of one strip for each worker, whatever the size of a tensor, a shard or the whole.

A worker holds its inputs, its outputs and what `convert` allocates. For FP8 -> BF16 that is 3 bytes for each of
STRIP_ELEMENTS elements, 48 MiB: 16 workers hold 0.8 GB of host memory and, with GPUs, as much of device memory.
"""

import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from coati_ext.checkpoint_io.resumable import ResumableDirectory
from coati_ext.checkpoint_io.safetensors_file import TensorEntry, make_header, num_bytes, read_exactly, write_exactly
from coati_ext.checkpoint_io.workers import Source, Worker, bytes_of, run_tasks
from coati_ext.utils.sizes import format_bytes

# One expert projection of DeepSeek-V3 (2048 x 7168) fits. With its scales a strip of FP8 stays within 16 MiB, the
# granule of a worker's buffers.
STRIP_ELEMENTS = (16 << 20) - (64 << 10)
_SHARDS_AT_ONCE = 2  # writes to one file wait for each other
_PART = ".part"


@dataclass(frozen=True, kw_only=True)
class Target:
    """Consecutive elements of an output tensor, seen as `shape`; `start` counts bytes from the tensor's first."""

    name: str
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


# Given the sources' tensors and the targets' tensors, on the worker's device: fills the targets.
Convert = Callable[[list[torch.Tensor], list[torch.Tensor]], None]


@dataclass(frozen=True, kw_only=True)
class Strip:
    """One unit of work; without `convert` the one source is copied to the one target, byte for byte."""

    sources: tuple[Source, ...]
    targets: tuple[Target, ...]
    convert: Convert | None = None


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A tensor to write."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(kw_only=True)
class OutputShard:
    """A file to write: its tensors, and the strips that fill them."""

    name: str
    tensors: list[TensorSpec] = field(default_factory=list)
    strips: list[Strip] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=lambda: {"format": "pt"})
    header: tuple[bytes, dict[str, int]] | None = None
    """The bytes before the tensors and each tensor's offset, where they are given; default `make_header`."""

    def add(self, tensors: Sequence[TensorSpec], strips: Sequence[Strip]) -> None:
        """Add tensors with the strips that fill them."""
        self.tensors += tensors
        self.strips += strips

    def copy(self, entry: TensorEntry) -> None:
        """Add a tensor of the input as it is."""
        strips = [
            Strip(
                sources=(Source(file=entry.file, start=entry.start + a, dtype=torch.uint8, shape=(b - a,)),),
                targets=(Target(name=entry.name, start=a, dtype=torch.uint8, shape=(b - a,)),),
            )
            for a, b in spans(entry.nbytes, step=2 * STRIP_ELEMENTS)
        ]
        self.add([TensorSpec(name=entry.name, dtype=entry.dtype, shape=entry.shape)], strips)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, header aside."""
        return sum(num_bytes(tensor.dtype, tensor.shape) for tensor in self.tensors)


def rows_of(entry: TensorEntry, matrix: int, start: int, stop: int) -> Source:
    """Rows start:stop of one matrix of a tensor (..., N, M), the leading dims flattened."""
    *_, num_rows, num_columns = entry.shape
    row_bytes = num_bytes(entry.dtype, (num_columns,))
    first = entry.start + (matrix * num_rows + start) * row_bytes
    return Source(file=entry.file, start=first, dtype=entry.dtype, shape=(stop - start, num_columns))


def rows_to(spec: TensorSpec, matrix: int, start: int, stop: int) -> Target:
    """The same rows of an output tensor."""
    *_, num_rows, num_columns = spec.shape
    first = (matrix * num_rows + start) * num_bytes(spec.dtype, (num_columns,))
    return Target(name=spec.name, start=first, dtype=spec.dtype, shape=(stop - start, num_columns))


def row_spans(num_rows: int, num_columns: int, *, multiple: int = 1) -> list[tuple[int, int]]:
    """(start, stop) of strips of rows, each a multiple of `multiple` rows (the last may have fewer).

    Example:
        >>> row_spans(300, STRIP_ELEMENTS // 128, multiple=128)
        [(0, 128), (128, 256), (256, 300)]
    """
    rows = STRIP_ELEMENTS // max(num_columns, 1) // multiple * multiple
    return list(spans(num_rows, step=max(rows, multiple)))


def spans(total: int, *, step: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive pieces of at most `step`."""
    return ((start, min(start + step, total)) for start in range(0, total, step))


def run(
    shards: Sequence[OutputShard],
    directory: ResumableDirectory,
    *,
    devices: Sequence[torch.device],
    num_workers: int | None = None,
    extra_bytes: int = 0,
    progress: Callable[[int], Any] = lambda nbytes: None,
) -> None:
    """Write the shards that `directory` does not hold yet, whole and with the checksum that its journal has.

    Args:
        devices: where strips are converted; the workers are spread over them.
        num_workers: default `workers.default_num_workers()`.
        extra_bytes: what the caller will write beside the shards; must fit the disk too.
        progress: called with the output bytes of each strip written or shard found finished, one call at a time.

    Raises:
        OSError: not enough disk, before anything is written; or a file cannot be read or written. Finished shards stay.
        ValueError: from `convert`, or an input file that became shorter.
    """
    jobs = [_ShardJob(shard, directory) for shard in shards]
    unfinished = _unfinished(jobs, num_workers, progress)
    for leftover in directory.path.glob(f"*{_PART}"):
        leftover.unlink()
    check_disk(directory.path, sum(job.nbytes for job in unfinished) + extra_bytes)
    for job in (job for job in unfinished if not job.strips):
        job.finish()
    tasks = (partial(job.make, index) for job, index in _interleaved(unfinished))
    try:
        run_tasks(tasks, devices=devices, num_workers=num_workers, on_done=progress)
    finally:
        for job in unfinished:
            job.abandon()


def _unfinished(jobs: list["_ShardJob"], num_workers: int | None, progress: Callable[[int], Any]) -> list["_ShardJob"]:
    finished: set[str] = set()

    def check(job: _ShardJob, worker: Worker) -> int:
        if not job.is_finished():
            return 0
        finished.add(job.name)
        return job.nbytes

    candidates = [job for job in jobs if job.has_been_recorded()]
    tasks = (partial(check, job) for job in candidates)
    run_tasks(tasks, devices=[torch.device("cpu")], num_workers=num_workers, on_done=progress)
    return [job for job in jobs if job.name not in finished]


def _interleaved(jobs: list["_ShardJob"]) -> Iterator[tuple["_ShardJob", int]]:
    """(Job, strip index), in turn from `_SHARDS_AT_ONCE` jobs until one is through, then the next job steps in."""
    waiting = iter(jobs)
    active = [(job, iter(range(len(job.strips)))) for job in islice(waiting, _SHARDS_AT_ONCE)]
    while active:
        for place, (job, indices) in enumerate(active):
            index = next(indices, None)
            if index is not None:
                yield job, index
                continue
            following = next(waiting, None)
            if following is None:
                del active[place]
                break
            active[place] = (following, iter(range(len(following.strips))))


def check_disk(directory: Path, needed_bytes: int) -> None:
    """OSError unless the disk of `directory` has `needed_bytes` free."""
    free = shutil.disk_usage(directory).free
    if free < needed_bytes:
        raise OSError(
            f"{directory} has {format_bytes(free)} free and {format_bytes(needed_bytes)} are needed; free some space "
            "or choose another output"
        )


class _ShardJob:
    """One output file while it is written; its strips may come in any order and from any thread."""

    def __init__(self, shard: OutputShard, directory: ResumableDirectory) -> None:
        self.name, self.strips, self.nbytes = shard.name, shard.strips, shard.nbytes
        self._directory = directory
        self._path = directory.path / shard.name
        self._part = self._path.with_name(shard.name + _PART)
        # Wide types first: every tensor begins at a multiple of its element size, as readers need it.
        tensors = sorted(shard.tensors, key=lambda tensor: -tensor.dtype.itemsize)
        made = shard.header or make_header([(t.name, t.dtype, t.shape) for t in tensors], shard.metadata)
        self._header, offsets = made
        self._ranges = [
            [(offsets[t.name] + t.start, num_bytes(t.dtype, t.shape)) for t in strip.targets] for strip in self.strips
        ]
        _check_cover(shard, sorted(piece for pieces in self._ranges for piece in pieces), len(self._header))
        self._crcs: list[list[int] | None] = [None] * len(self.strips)
        self._num_left = len(self.strips)
        self._descriptor: int | None = None
        self._lock = threading.Lock()

    def make(self, index: int, worker: Worker) -> int:
        """Read, convert and write one strip; the last one completes the file. Returns the bytes written."""
        strip = self.strips[index]
        sources = worker.read(strip.sources)
        targets = sources
        if strip.convert is not None:
            targets = worker.buffers("out", [(target.dtype, target.shape) for target in strip.targets])
            worker.convert(strip.convert, sources, targets)
        outputs = [bytes_of(tensor) for tensor in targets]
        with self._lock:
            if self._descriptor is None:
                self._open()
        for (start, _), output in zip(self._ranges[index], outputs, strict=True):
            try:
                write_exactly(self._descriptor, output, start)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._part)) from error
        self._crcs[index] = [zlib.crc32(output) for output in outputs]
        with self._lock:
            self._num_left -= 1
            last = self._num_left == 0
        if last:
            self.finish()
        return sum(output.nbytes for output in outputs)

    def finish(self) -> None:
        """Give the file its name, and its checksum to the journal."""
        if self._descriptor is None:
            self._open()
        os.close(self._descriptor)
        self._descriptor = None
        self._part.replace(self._path)
        self._directory.record(self._path.name, self._checksum(self._crcs))

    def abandon(self) -> None:
        """Delete the file if it is not finished."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            self._part.unlink(missing_ok=True)

    def has_been_recorded(self) -> bool:
        """Whether an earlier run noted the file as finished."""
        return self.name in self._directory.finished

    def is_finished(self) -> bool:
        """Whether the file's bytes have the checksum that the earlier run noted."""
        if not self._path.is_file() or self._path.stat().st_size != len(self._header) + self.nbytes:
            return False
        buffer = memoryview(bytearray(max((n for pieces in self._ranges for _, n in pieces), default=0)))
        with self._path.open("rb") as file:
            if file.read(len(self._header)) != self._header:
                return False
            crcs = []
            for pieces in self._ranges:
                crcs.append([])
                for start, nbytes in pieces:
                    read_exactly(file.fileno(), buffer[:nbytes], start, self._path)
                    crcs[-1].append(zlib.crc32(buffer[:nbytes]))
        return self._checksum(crcs) == self._directory.finished[self.name]

    def _checksum(self, crcs: list[list[int] | None]) -> str:
        return sha256(self._header + repr(crcs).encode()).hexdigest()

    def _open(self) -> None:
        self._descriptor = os.open(self._part, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o666)
        write_exactly(self._descriptor, memoryview(self._header), 0)
        os.ftruncate(self._descriptor, len(self._header) + self.nbytes)


def _check_cover(shard: OutputShard, pieces: list[tuple[int, int]], start: int) -> None:
    """Every byte of every tensor belongs to one target."""
    for begin, nbytes in pieces:
        assert begin == start, f"{shard.name}: the plan leaves a hole or an overlap at byte {start}"
        start += nbytes
    assert start == pieces[0][0] + shard.nbytes if pieces else shard.nbytes == 0, f"{shard.name}: the plan is short"
