"""Pipeline parallelism over gloo.

Fault: colossalai/pipeline/p2p.py `_check_for_nccl_hccl_backend` asks `torch.distributed.is_hccl_available()` and
`Backend.HCCL`, which only an NPU build of torch has: AttributeError for every group that is not NCCL's.

Mend: ask the group for its backend's name.
"""

import torch.distributed as dist


def mend() -> str | None:
    """Mend the backend check of pipeline messages; returns the fault, or None with a GPU or an NPU build of torch."""
    from colossalai.accelerator import get_accelerator
    from colossalai.pipeline import p2p

    if get_accelerator().name != "cpu" or hasattr(dist, "is_hccl_available"):
        return None
    p2p._check_for_nccl_hccl_backend = _is_nccl_or_hccl
    return "colossalai.pipeline.p2p calls torch.distributed.is_hccl_available, which torch does not have"


def _is_nccl_or_hccl(group: dist.ProcessGroup | None) -> bool:
    return dist.get_backend(group) in ("nccl", "hccl")
