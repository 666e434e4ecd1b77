"""Measure a function in a process of its own, so that its peak memory is its own."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Most memory that this process has had, in bytes; of its GPUs the one with most, 0 without any."""

    host: int
    device_allocated: int
    device_reserved: int


def own_peaks() -> Peaks:
    """Of this process, since it started."""
    status = Path("/proc/self/status").read_text()  # not getrusage, whose peak is the parent's too
    devices = range(torch.cuda.device_count())
    return Peaks(
        host=1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]),
        device_allocated=max((torch.cuda.max_memory_allocated(i) for i in devices), default=0),
        device_reserved=max((torch.cuda.max_memory_reserved(i) for i in devices), default=0),
    )


def in_own_process(function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns, or raises, in a new process that has nothing of this one.

    Raises:
        BrokenProcessPool: the process was killed, for memory most likely.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()
