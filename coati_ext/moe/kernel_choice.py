"""Which kernels the experts of a model go through, in a line for the user."""

import torch
from torch import nn

from coati_ext.kernel.moe_rows import has_kernels
from coati_ext.moe.experts import MoeExperts

GROUPED_GEMM_SINCE = (9, 0)  # compute capability; torch's grouped_mm is a loop over the groups below


def describe_kernels(model: nn.Module) -> str | None:
    """None for a model without experts on this rank.

    Example:
        >>> describe_kernels(nn.Linear(2, 2)) is None
        True
    """
    experts = next((module for module in model.modules() if isinstance(module, MoeExperts)), None)
    if experts is None:
        return None
    weight = experts.gate_up_proj
    on_gpu = weight.device.type == "cuda"
    where = torch.cuda.get_device_name(weight.device) if on_gpu else "the CPU"
    rows = torch.empty(0, dtype=experts.compute_dtype, device=weight.device)
    if not has_kernels(rows):
        dtype = str(rows.dtype).removeprefix("torch.")
        return f"experts: plain torch, {dtype} on {where} (the Triton kernels are for bf16 and fp16 on NVIDIA GPUs)"
    slow = on_gpu and torch.cuda.get_device_capability(weight.device) < GROUPED_GEMM_SINCE
    loop = ", which loops over experts below compute capability 9.0" if slow else ""
    if (reason := experts.parts_because(training=True)) is not None:
        return f"experts: differentiable parts and torch's grouped GEMM{loop} on {where}, because {reason}"
    return f"experts: Triton kernels around torch's grouped GEMM{loop} on {where}"
