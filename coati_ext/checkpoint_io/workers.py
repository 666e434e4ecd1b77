"""Threads that each read byte ranges into buffers of their own and compute on a device: reading, computing and writing
overlap because different threads are at different steps.

Memory is that of one task's buffers for each worker, on the host (page-locked where there is a GPU) and on the device.
"""

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from coati_ext.checkpoint_io.safetensors_file import num_bytes, read_exactly

MAX_WORKERS = 16
_ALIGNMENT = 512  # of each tensor within a worker's buffers
_GRANULE = 16 << 20  # of a buffer's size: they grow once, if at all, and allocators keep no outgrown ones
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Consecutive elements of a tensor on disk, seen as `shape`; `start` is their absolute offset in `file`."""

    file: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Worker:
    """Buffers of one thread, and its device. What a buffer holds lives until the thread's next task."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def read(self, sources: Sequence[Source]) -> list[torch.Tensor]:
        """The sources' tensors, in host memory."""
        tensors = self.buffers("in", [(source.dtype, source.shape) for source in sources])
        for source, tensor in zip(sources, tensors, strict=True):
            descriptor = os.open(source.file, os.O_RDONLY)
            try:
                read_exactly(descriptor, bytes_of(tensor), source.start, source.file)
            finally:
                os.close(descriptor)
        return tensors

    def to_device(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of host tensors on the worker's device; themselves where that is the CPU. Call it in `on_device`."""
        if self._stream is None:
            return tensors
        return [
            there.copy_(tensor, non_blocking=True)
            for there, tensor in zip(self._on_device("operands", tensors), tensors, strict=True)
        ]

    def convert(
        self,
        convert: Callable[[list[torch.Tensor], list[torch.Tensor]], None],
        sources: list[torch.Tensor],
        targets: list[torch.Tensor],
    ) -> None:
        """Fill the host tensors `targets` with what `convert` makes of `sources`, computed on the device."""
        if self._stream is None:
            convert(sources, targets)
            return
        with self.on_device():
            results = self._on_device("results", targets)
            convert(self.to_device(sources), results)
            for target, result in zip(targets, results, strict=True):
                target.copy_(result, non_blocking=True)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Make the worker's device and stream current; all is computed when the block ends."""
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            yield
            if self._stream is not None:
                self._stream.synchronize()

    def buffers(self, name: str, tensors: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> list[torch.Tensor]:
        """Host tensors of these dtypes and shapes, in the worker's buffer of that name."""
        return self._views(name, tensors, pin_memory=self._stream is not None)

    def _on_device(self, name: str, like: list[torch.Tensor]) -> list[torch.Tensor]:
        return self._views(name, [(tensor.dtype, tensor.shape) for tensor in like], device=self._device)

    def _views(
        self, name: str, tensors: Sequence[tuple[torch.dtype, tuple[int, ...]]], **where: Any
    ) -> list[torch.Tensor]:
        sizes = [num_bytes(dtype, shape) for dtype, shape in tensors]
        steps = [math.ceil(size / _ALIGNMENT) * _ALIGNMENT for size in sizes]
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < sum(steps):
            self._buffers.pop(name, None)
            size = math.ceil(sum(steps) / _GRANULE) * _GRANULE
            buffer = torch.empty(size, dtype=torch.uint8, **where)
            self._buffers[name] = buffer
        views, start = [], 0
        for (dtype, shape), nbytes, step in zip(tensors, sizes, steps, strict=True):
            views.append(buffer[start : start + nbytes].view(dtype).view(shape))
            start += step
        return views


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


def default_num_workers() -> int:
    """One a CPU core of this process, at least 2 so that reading and writing overlap."""
    return max(2, min(len(os.sched_getaffinity(0)), MAX_WORKERS))


def run_tasks(
    tasks: Iterable[Callable[[Worker], Result]],
    *,
    devices: Sequence[torch.device],
    num_workers: int | None = None,
    on_done: Callable[[Result], Any] = lambda result: None,
) -> None:
    """Run the tasks in their order on `num_workers` threads, no more than tasks, spread over the devices.

    Args:
        on_done: called with each task's result, one call at a time, in the order they end.

    Raises: what a task raises; no further task is begun then, and those in work are waited for.
    """
    tasks = list(tasks)
    num_workers = max(min(num_workers or default_num_workers(), len(tasks)), 1)
    local, lock = threading.local(), threading.Lock()
    devices_left = iter([devices[i % len(devices)] for i in range(num_workers)])

    def start_worker() -> None:
        with lock:
            local.worker = Worker(next(devices_left))

    def run(task: Callable[[Worker], Result]) -> None:
        result = task(local.worker)
        with lock:
            on_done(result)

    with _one_thread_per_operation(), ThreadPoolExecutor(num_workers, initializer=start_worker) as pool:
        futures = [pool.submit(run, task) for task in tasks]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            pool.shutdown(cancel_futures=True)
    for future in done:
        future.result()


@contextmanager
def _one_thread_per_operation() -> Iterator[None]:
    """The workers are the parallelism; torch's own threads would compete with them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
