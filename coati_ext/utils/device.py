"""The device of this process, through colossalai's accelerator (CUDA, NPU or CPU)."""

import torch


def current_device() -> torch.device:
    from colossalai.accelerator import get_accelerator

    return get_accelerator().get_current_device()


def peak_memory_gb() -> float:
    """Peak device memory in GB (1e9 bytes); on a CPU the process's peak resident memory."""
    from colossalai.accelerator import get_accelerator

    if get_accelerator().name != "cpu":
        return get_accelerator().max_memory_allocated() / 1e9
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
