"""Random states, streams and memory queries of colossalai's accelerator on a CPU.

Fault: colossalai/accelerator/cpu_accelerator.py raises "this method is not supported for cpu accelerator" from methods
that colossalai calls on every device (ZeRO's streams, `load_optimizer`'s synchronize, the seeds of tensor parallelism,
the count of devices in fp16's loss scaler) and `get_rng_state` passes a device to a function without arguments. ZeRO
then gives the stream to `Tensor.record_stream` (colossalai/zero/low_level/low_level_optim.py), which takes no CPU
stream.

Mend: torch's own CPU versions of those calls, which exist for device-agnostic code and do nothing; memory is the
process's resident memory in bytes.
"""

import functools
import resource
from collections.abc import Callable
from typing import Any

import psutil
import torch

REFUSAL = "this method is not supported for cpu accelerator"


def mend() -> str | None:
    """Give `CpuAccelerator` the refused methods; returns the fault, or None with a GPU or nothing to mend."""
    from colossalai.accelerator import get_accelerator
    from colossalai.accelerator.cpu_accelerator import CpuAccelerator

    if get_accelerator().name != "cpu":
        return None
    broken = [name for name in _METHODS if REFUSAL in getattr(CpuAccelerator, name).__code__.co_consts]
    if _get_rng_state_fails(CpuAccelerator()):
        broken.append("get_rng_state")
    for name in broken:
        setattr(CpuAccelerator, name, {**_METHODS, "get_rng_state": _get_rng_state}[name])
    if not broken:
        return None
    _accept_cpu_streams()
    return f"colossalai's CpuAccelerator refuses {', '.join(broken)}"


def _get_rng_state_fails(accelerator: Any) -> bool:
    try:
        accelerator.get_rng_state()
    except TypeError:
        return True
    return False


def _accept_cpu_streams() -> None:
    real = torch.Tensor.record_stream

    @functools.wraps(real)
    def record_stream(self: torch.Tensor, stream: Any) -> None:
        if not isinstance(stream, torch.cpu.Stream):
            real(self, stream)

    torch.Tensor.record_stream = record_stream


def _get_rng_state(self: Any, device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def _manual_seed(self: Any, seed: int) -> None:
    torch.manual_seed(seed)


def _current_device(self: Any) -> torch.device:
    return torch.device("cpu")


def _device_count(self: Any) -> int:
    return 1


def _new_stream(self: Any, device: Any = None, priority: int = 0, **kwargs: Any) -> torch.cpu.Stream:
    return torch.cpu.Stream()


def _current_stream(self: Any, device: Any = None) -> torch.cpu.Stream:
    return torch.cpu.current_stream()


def _stream_context(self: Any, stream_: torch.cpu.Stream) -> torch.cpu.StreamContext:
    return torch.cpu.stream(stream_)


def _resident_bytes(self: Any, device: Any = None) -> int:
    return psutil.Process().memory_info().rss


def _peak_resident_bytes(self: Any, device: Any = None) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def _nothing(self: Any, device: Any = None) -> None:
    """For what a CPU has no need of: there is nothing to wait for, to free or to reset."""


_METHODS: dict[str, Callable] = {
    "current_device": _current_device,
    "device_count": _device_count,
    "synchronize": _nothing,
    "manual_seed": _manual_seed,
    "manual_seed_all": _manual_seed,
    "Stream": _new_stream,
    "current_stream": _current_stream,
    "default_stream": _current_stream,
    "stream": _stream_context,
    "empty_cache": _nothing,
    "memory_allocated": _resident_bytes,
    "max_memory_allocated": _peak_resident_bytes,
    "reset_peak_memory_stats": _nothing,
    "reset_max_memory_allocated": _nothing,
    "reset_max_memory_cached": _nothing,
}
