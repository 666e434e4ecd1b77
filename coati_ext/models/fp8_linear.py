"""A frozen linear layer whose weight stays in FP8.

Legend: N output and K input width.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from coati_ext.kernel.fp8_cast import dequantize_fp8, grid_of_scales
from coati_ext.kernel.fp8_gemm import dequantize_rows, fp8_rows_by_fp8, has_fp8_kernels, quantize_rows, rows_by_fp8
from coati_ext.kernel.row_groups import RowGroups
from coati_ext.utils.kept_dtypes import KeepsFp8, fp8_parameters

FEW_ROWS = 256
"""Up to which the weight is dequantised inside the product. Not timed on this layer: with many rows torch's product is
the faster by more than the copy takes, going by the rates of the two kernels (`fp8_gemm_triton.TILES`)."""


class Fp8Linear(KeepsFp8, nn.Linear):
    """Dequantised for each product, forward and backward, so that no copy in 16 bits outlives one.

    A forward of few rows, as in decoding, needs no copy where there is a kernel.

    Attributes:
        weight, weight_scale_inv: (N, K) float8_e4m3fn, and fp32 scales of its blocks of 128 x 128.
        compute_dtype: of the layer that it stands for.
        fp8_compute: whether forward products are of rows in FP8 too.
    """

    def __init__(self, linear: nn.Linear) -> None:
        """Without values; on the device of `linear`, whose bias it takes."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.compute_dtype = linear.weight.dtype
        self.weight, self.weight_scale_inv = fp8_parameters(linear.weight, grid_of_scales(linear.weight.shape))
        self.bias = linear.bias
        self.fp8_compute = False
        self.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Product.apply(x, self.weight, self.weight_scale_inv, self.bias, self.fp8_compute)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_NK, scale_IJ, bias, fp8_compute):
        ctx.save_for_backward(weight_NK, scale_IJ)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        in_one = 0 < len(rows) <= (math.inf if fp8_compute else FEW_ROWS) and has_fp8_kernels(x, weight_NK[None])
        if fp8_compute:
            codes, scale_RJ = quantize_rows(rows)
        if in_one:
            groups = RowGroups(torch.full((1,), len(rows), dtype=torch.int32, device=x.device), len(rows))
            weight = weight_NK[None], scale_IJ[None]
            if fp8_compute:
                out = fp8_rows_by_fp8(codes, scale_RJ, *weight, groups, dtype=x.dtype)
            else:
                out = rows_by_fp8(rows, *weight, groups, transposed=False)
            out = out.view(*x.shape[:-1], -1)
            return out if bias is None else out + bias
        if fp8_compute:
            x = dequantize_rows(codes, scale_RJ, dtype=x.dtype).view_as(x)
        return F.linear(x, dequantize_fp8(weight_NK, scale_IJ, dtype=x.dtype), bias)

    @staticmethod
    def backward(ctx, grad):
        weight_NK, scale_IJ = ctx.saved_tensors
        weight = dequantize_fp8(weight_NK, scale_IJ, dtype=grad.dtype)
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
        return grad @ weight, None, None, grad_bias, None
