"""Grouped GEMM over rows sorted by group: the one product that an experts layer is made of.

Legend: R rows, E groups (experts of this rank), K and N the contracted and the output width.

`torch.nn.functional.grouped_mm` is the portable path. It wants 16-byte strides (so LoRA rank 4 fails in bf16), refuses
float64, and its own backward fails when no row arrives or when the incoming gradient is an expanded tensor. The
autograd function here settles these four, pads inside the call, and never forms the gradient of a frozen weight.
"""

import torch
import torch.nn.functional as F

STRIDE_BYTES = 16  # what grouped_mm demands of every leading stride, on CPUs too (torch 2.11 to 2.13)


def grouped_mm_reference(x_RK: torch.Tensor, weight_EKN: torch.Tensor, offs_E: torch.Tensor) -> torch.Tensor:
    """The loop that `grouped_mm` must equal: rows offs[e-1]:offs[e] times weight[e]."""
    bounds = [0, *offs_E.tolist()]
    parts = [x_RK[bounds[e] : bounds[e + 1]] @ weight_EKN[e] for e in range(weight_EKN.shape[0])]
    return torch.cat(parts)


def grouped_mm(x_RK: torch.Tensor, weight_EKN: torch.Tensor, offs_E: torch.Tensor) -> torch.Tensor:
    """Multiply each group of rows by its own matrix; differentiable in both factors.

    Args:
        x_RK: rows sorted by group; every row belongs to a group, that is offs_E[-1] == R (R may be 0).
        weight_EKN: one matrix a group, contiguous or the transposed view of a contiguous tensor. Its gradient is
            formed only if it requires one; a group without rows gets zeros.
        offs_E: int32, the end of each group (cumulative counts), on the device of x.

    Returns:
        (R, N) in the dtype of x.

    Raises:
        ValueError: dtypes differ or offs is not int32.
    """
    if x_RK.dtype != weight_EKN.dtype:
        raise ValueError(f"grouped_mm: rows are {x_RK.dtype} but weights are {weight_EKN.dtype}; cast one of them")
    if offs_E.dtype != torch.int32:
        raise ValueError(f"grouped_mm: offs must be int32, got {offs_E.dtype}")
    return _GroupedMM.apply(x_RK, weight_EKN, offs_E)


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RK, weight_EKN, offs_E):
        ctx.save_for_backward(x_RK if weight_EKN.requires_grad else None, weight_EKN, offs_E)
        ctx.weight_shape = weight_EKN.shape
        return rows_by_weights(x_RK, weight_EKN, offs_E)

    @staticmethod
    def backward(ctx, grad_RN):
        x_RK, weight_EKN, offs_E = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = rows_by_weights(grad_RN, weight_EKN.transpose(-2, -1), offs_E)
        if ctx.needs_input_grad[1]:
            grad_weight = weight_gradient(x_RK, grad_RN, offs_E)
        return grad_x, grad_weight, None


def rows_by_weights(x_RK: torch.Tensor, weight_EKN: torch.Tensor, offs_E: torch.Tensor) -> torch.Tensor:
    num_rows, width = x_RK.shape[0], weight_EKN.shape[-1]
    if num_rows == 0:
        return x_RK.new_zeros(0, width)
    if x_RK.dtype == torch.float64:
        return grouped_mm_reference(x_RK, weight_EKN, offs_E)
    if x_RK.stride(1) != 1 or x_RK.stride(0) < x_RK.shape[1]:  # columns of wider rows need no copy
        x_RK = x_RK.contiguous()
    weight = _pad(weight_EKN, dims=(-1, -2))
    return F.grouped_mm(_pad(x_RK, dims=(-1,)), weight, offs=offs_E)[:, :width]


def weight_gradient(x_RK: torch.Tensor, grad_RN: torch.Tensor, offs_E: torch.Tensor) -> torch.Tensor:
    num_groups, k, n = offs_E.shape[0], x_RK.shape[1], grad_RN.shape[1]
    if x_RK.shape[0] == 0:
        return x_RK.new_zeros(num_groups, k, n)
    if x_RK.dtype == torch.float64:
        bounds = [0, *offs_E.tolist()]
        spans = [slice(bounds[e], bounds[e + 1]) for e in range(num_groups)]
        return torch.stack([x_RK[rows].T @ grad_RN[rows] for rows in spans])
    x, grad = _pad(x_RK.contiguous(), dims=(-1,)), _pad(grad_RN.contiguous(), dims=(-1,))
    return F.grouped_mm(x.transpose(0, 1), grad, offs=offs_E)[:, :k, :n]


def _pad(tensor: torch.Tensor, *, dims: tuple[int, ...]) -> torch.Tensor:
    """Zero-pad the given trailing dims to the stride rule; the tensor itself if it obeys already."""
    multiple = STRIDE_BYTES // tensor.element_size()
    missing = {dim: -tensor.shape[dim] % multiple for dim in dims}
    if not any(missing.values()):
        odd = [stride for stride in tensor.stride() if stride > 1 and stride % multiple]
        return tensor.new_empty(tensor.shape).copy_(tensor) if odd else tensor  # as of one row of a wider tensor
    return F.pad(tensor, (0, missing.get(-1, 0), 0, missing.get(-2, 0)))
