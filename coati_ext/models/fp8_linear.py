"""A frozen linear layer whose weight stays in FP8.

Legend: N output and K input width.
"""

import torch
import torch.nn.functional as F
from torch import nn

from coati_ext.kernel.fp8_cast import dequantize_fp8, grid_of_scales
from coati_ext.utils.kept_dtypes import KeepsFp8, fp8_parameters


class Fp8Linear(KeepsFp8, nn.Linear):
    """Dequantised for each product, forward and backward, so that no copy in 16 bits outlives one.

    Attributes:
        weight, weight_scale_inv: (N, K) float8_e4m3fn, and fp32 scales of its blocks of 128 x 128.
        compute_dtype: of the layer that it stands for.
    """

    def __init__(self, linear: nn.Linear) -> None:
        """Without values; on the device of `linear`, whose bias it takes."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.compute_dtype = linear.weight.dtype
        self.weight, self.weight_scale_inv = fp8_parameters(linear.weight, grid_of_scales(linear.weight.shape))
        self.bias = linear.bias
        self.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Product.apply(x, self.weight, self.weight_scale_inv, self.bias)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_NK, scale_IJ, bias):
        ctx.save_for_backward(weight_NK, scale_IJ)
        return F.linear(x, dequantize_fp8(weight_NK, scale_IJ, dtype=x.dtype), bias)

    @staticmethod
    def backward(ctx, grad):
        weight_NK, scale_IJ = ctx.saved_tensors
        weight = dequantize_fp8(weight_NK, scale_IJ, dtype=grad.dtype)
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
        return grad @ weight, None, None, grad_bias
