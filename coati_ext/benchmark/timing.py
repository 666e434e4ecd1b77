"""Times and peaks of a step, and what the device can do at most, in one run."""

import statistics
import time
from collections.abc import Callable

import torch

WARMUP = 2


def measure(step: Callable[[], None], device: torch.device, steps: int) -> tuple[float, int]:
    """Median milliseconds, and the peak in bytes above what is there before (0 on a CPU).

    Steps are enqueued one after the other and timed by events, as they are in training.
    """
    for _ in range(WARMUP):
        step()
    if device.type == "cpu":
        return statistics.median(_timed(step) for _ in range(steps)), 0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(steps)]
    for start, end in pairs:
        start.record()
        step()
        end.record()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return statistics.median(start.elapsed_time(end) for start, end in pairs), peak


def _timed(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - start)


def matmul_tflops(device: torch.device) -> float:
    """The rate of a large matrix product."""
    n = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(n, n, device=device, dtype=dtype_of(device)) for _ in range(2))
    ms, _ = measure(lambda: a @ b, device, 6)
    return 2e-9 * n**3 / ms


def dtype_of(device: torch.device) -> torch.dtype:
    """That is measured on it."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
