"""Modules with weights that no cast touches."""

from collections.abc import Callable

import torch
from torch import nn

FP8 = torch.float8_e4m3fn
SCALE_SUFFIX = "_scale_inv"  # of a block-scaled FP8 weight's scales, as in checkpoints


class KeepsFp8(nn.Module):
    """Its own FP8 weights and their scales move with `.to(device)`, and stay what they are under `.to(dtype)`: wrappers
    cast whole models, and FP8 without its scales is noise."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        own = dict(self.named_parameters(recurse=False))
        kept = [p for name, p in own.items() if p.dtype == FP8 or name.endswith(SCALE_SUFFIX)]

        def spared(tensor: torch.Tensor) -> torch.Tensor:
            if not any(tensor is p for p in kept):
                return fn(tensor)
            as_numbers = torch.uint8 if tensor.dtype == FP8 else torch.int32  # which casts to a float dtype leave alone
            return fn(tensor.view(as_numbers)).view(tensor.dtype)

        return super()._apply(spared, recurse)


def fp8_parameters(weight: torch.Tensor, scale_shape: tuple[int, ...]) -> tuple[nn.Parameter, nn.Parameter]:
    """Room for a frozen FP8 weight of this shape and its fp32 scales, on the same device."""
    values = torch.empty_like(weight, dtype=FP8)
    scales = torch.empty(scale_shape, dtype=torch.float32, device=weight.device)
    return nn.Parameter(values, requires_grad=False), nn.Parameter(scales, requires_grad=False)
