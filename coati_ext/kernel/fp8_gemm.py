"""Products of rows with the FP8 weight of their group, which no copy of the weight in 16 bits is made for.

Legend: R rows sorted by group, L groups, N and K rows and columns of a weight, I x J its grid of scales, q columns of
the factors, C the contracted width: K, or N if transposed.

`rows_by_fp8` gives what a product with `dequantize_fp8` of the weight would: the same 16-bit numbers go through the
tensor cores, added up in fp32. `fp8_rows_by_fp8` multiplies rows that `quantize_rows` made FP8, at twice the rate: FP8
in 128-deep parts, each added up in fp32 with its scales. Both by Triton on a GPU (`fp8_gemm_triton.py`,
`fp8_rows_triton.py`), and else by the references here.
"""

from functools import cache

import torch

from coati_ext.kernel import moe_rows
from coati_ext.kernel.fp8_cast import E4M3_MAX, dequantize_fp8
from coati_ext.kernel.grouped_gemm import rows_by_weights
from coati_ext.kernel.row_groups import RowGroups

BLOCK = 128


def has_fp8_kernels(x: torch.Tensor, weight_LNK: torch.Tensor, num_parts: int = 1) -> bool:
    """Whether `rows_by_fp8` runs by Triton: 16-bit rows on a Hopper GPU, and one grid of blocks.

    Args:
        num_parts: projections that lie one below the other in the weight, each with a grid of its own.
    """
    uniform = num_parts == 1 or weight_LNK.shape[1] % (num_parts * BLOCK) == 0
    small = weight_LNK.shape[1] * weight_LNK.shape[2] < 2**31
    return uniform and small and moe_rows.has_kernels(x) and _is_hopper(x.device)


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def rows_by_fp8(
    x: torch.Tensor,
    weight_LNK: torch.Tensor,
    scale_LIJ: torch.Tensor,
    groups: RowGroups,
    *,
    transposed: bool,
    low: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """x · W' of the group, (R, N), or x · W, (R, K), if transposed; plus low · factor of the group.

    Args:
        x: (R, C), contiguous rows.
        weight_LNK, scale_LIJ: float8_e4m3fn, and fp32 scales of its blocks of 128 x 128.
        low: (R, q) and the factor, (L, q, N), or (L, q, K) if transposed, of any strides.
    """
    if len(x) and has_fp8_kernels(x, weight_LNK):
        from coati_ext.kernel.fp8_gemm_triton import rows_by_fp8_triton

        return rows_by_fp8_triton(x, weight_LNK, scale_LIJ, groups, transposed=transposed, low=low)
    return rows_by_fp8_reference(x, weight_LNK, scale_LIJ, groups, transposed=transposed, low=low)


def rows_by_fp8_reference(
    x: torch.Tensor,
    weight_LNK: torch.Tensor,
    scale_LIJ: torch.Tensor,
    groups: RowGroups,
    *,
    transposed: bool,
    low: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The same by a copy of the weight in the dtype of x; the low-rank product is added after rounding."""
    weight = dequantize_fp8(weight_LNK, scale_LIJ, dtype=x.dtype)
    out = rows_by_weights(x, weight if transposed else weight.transpose(1, 2), groups.offs_E)
    return out if low is None else out + rows_by_weights(*low, groups.offs_E)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3, (R, C), and fp32 scales to multiply it by, (R, ceil(C / 128)): one for each 128 columns of a row.

    The largest of them becomes 448; 128 zeros have scale 1.
    """
    if len(x) and moe_rows.has_kernels(x) and _is_hopper(x.device):
        from coati_ext.kernel.fp8_rows_triton import quantize_rows_triton

        return quantize_rows_triton(x)
    return quantize_rows_reference(x)


def quantize_rows_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, width = x.shape
    blocks_RJC = x.new_zeros(num_rows, -(-width // BLOCK) * BLOCK, dtype=torch.float32)
    blocks_RJC[:, :width] = x
    blocks_RJC = blocks_RJC.unflatten(1, (-1, BLOCK))
    largest_RJ = blocks_RJC.abs().amax(-1)
    scale_RJ = (
        (largest_RJ / largest_RJ.new_tensor(E4M3_MAX))
        .clamp(min=torch.finfo(torch.float32).tiny)
        .masked_fill(largest_RJ == 0, 1.0)
    )
    codes = (blocks_RJC / scale_RJ.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(1)[:, :width].contiguous(), scale_RJ


def dequantize_rows(x8: torch.Tensor, scale_RJ: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """(R, C): what `quantize_rows` made of the rows."""
    return (x8.float() * scale_RJ.repeat_interleave(BLOCK, 1)[:, : x8.shape[1]]).to(dtype)


def fp8_rows_by_fp8(
    x8: torch.Tensor,
    scale_RJ: torch.Tensor,
    weight_LNK: torch.Tensor,
    scale_LIJ: torch.Tensor,
    groups: RowGroups,
    *,
    dtype: torch.dtype,
    low: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """(R, N) in dtype: x · W' of the group, of quantised rows; plus low · factor of the group.

    Args:
        x8, scale_RJ: as `quantize_rows` makes them.
        low: in dtype, as in `rows_by_fp8`.
    """
    fits = x8.shape[1] % 16 == 0 and x8.is_contiguous() and weight_LNK.is_contiguous()
    if len(x8) and fits and has_fp8_kernels(x8.new_empty(0, dtype=dtype), weight_LNK):
        from coati_ext.kernel.fp8_rows_triton import fp8_rows_by_fp8_triton

        return fp8_rows_by_fp8_triton(x8, scale_RJ, weight_LNK, scale_LIJ, groups, dtype=dtype, low=low)
    x = dequantize_rows(x8, scale_RJ, dtype=dtype)
    return rows_by_fp8_reference(x, weight_LNK, scale_LIJ, groups, transposed=False, low=low)
