"""Which kernels the experts of a model go through, in a line for the user."""

import torch
from torch import nn

from coati_ext.kernel.fp8_gemm import has_fp8_kernels
from coati_ext.kernel.moe_rows import has_kernels
from coati_ext.moe.experts import MoeExperts
from coati_ext.utils.kept_dtypes import FP8

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
    return _of_rows(experts, rows, where) + _of_fp8(experts, rows)


def _of_rows(experts: MoeExperts, rows: torch.Tensor, where: str) -> str:
    if not has_kernels(rows):
        dtype = str(rows.dtype).removeprefix("torch.")
        return f"experts: plain torch, {dtype} on {where} (the Triton kernels are for bf16 and fp16 on NVIDIA GPUs)"
    slow = rows.is_cuda and torch.cuda.get_device_capability(rows.device) < GROUPED_GEMM_SINCE
    loop = ", which loops over experts below compute capability 9.0" if slow else ""
    if (reason := experts.parts_because(training=True)) is not None:
        return f"experts: differentiable parts and torch's grouped GEMM{loop} on {where}, because {reason}"
    return f"experts: Triton kernels around torch's grouped GEMM{loop} on {where}"


def _of_fp8(experts: MoeExperts, rows: torch.Tensor) -> str:
    if experts.gate_up_proj.dtype != FP8:
        return ""
    inside = has_fp8_kernels(rows, experts.gate_up_proj, 2) and has_fp8_kernels(rows, experts.down_proj)
    how = "inside their products" if inside else "into a copy for each product"
    if experts.fp8_compute and inside:
        return "; FP8 weights multiplied in FP8 forward, dequantised inside their products backward"
    rounded = " of rows rounded to FP8 (no FP8 products here)" if experts.fp8_compute else ""
    return f"; FP8 weights dequantised {how}{rounded}"
