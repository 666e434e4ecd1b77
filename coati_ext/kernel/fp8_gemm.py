"""Products of rows sorted by group with frozen FP8 weights.

Legend: R rows, L groups (experts of this rank), N and K the output and input width of a weight, q columns of a factor.
"""

import torch

from coati_ext.kernel.fp8_cast import dequantize_fp8
from coati_ext.kernel.grouped_gemm import rows_by_weights
from coati_ext.kernel.row_groups import RowGroups

BLOCK = (128, 128)


def rows_by_fp8(
    x: torch.Tensor,
    weight_LNK: torch.Tensor,
    scale_LIJ: torch.Tensor,
    groups: RowGroups,
    *,
    transposed: bool = False,
    low: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """x · W' of each group, (R, N), or x · W, (R, K), if `transposed`.

    Args:
        weight_LNK, scale_LIJ: float8_e4m3fn, and the scales of its blocks of 128 x 128.
        low: (R, q) and (L, q, width of the result), whose product is added.
    """
    weight = dequantize_fp8(weight_LNK, scale_LIJ, block_size=BLOCK, dtype=x.dtype)
    out = rows_by_weights(x, weight if transposed else weight.transpose(1, 2), groups.offs_E)
    if low is None:
        return out
    low_Rq, factor_LqN = low
    return out + rows_by_weights(low_Rq, factor_LqN, groups.offs_E)
