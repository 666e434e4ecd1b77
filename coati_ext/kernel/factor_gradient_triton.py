"""The Triton kernel of `factor_gradient` in `moe_rows.py`: a program sums over all rows of a group.

Legend: R rows sorted by group, E groups, K columns of the rows, q columns of the factors.
"""

import torch
import triton
import triton.language as tl

from coati_ext.kernel.moe_rows_triton import NUM_STAGES, NUM_WARPS, WIDTH, Tiles, factor_block

ROWS = 64  # that a program has at a time


@triton.jit
def _factor_gradient(
    low, x, index, out, start, K, q, low_row, x_row, out_k, out_q,
    INDEXED: tl.constexpr, Q: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    f = tl.program_id(2) * Q + tl.arange(0, Q)
    end = tl.load(start + group + 1)
    acc = tl.zeros((Q, BLOCK), tl.float32)
    for first in range(tl.load(start + group), end, ROWS):
        at = (first + tl.arange(0, ROWS)).to(tl.int64)
        valid = at < end
        row = at
        if INDEXED:
            row = tl.load(index + at, mask=valid, other=0).to(tl.int64)
        left = tl.load(low + at[None, :] * low_row + f[:, None], mask=valid[None, :] & (f < q)[:, None], other=0.0)
        right = tl.load(x + row[:, None] * x_row + k, mask=valid[:, None] & (k < K), other=0.0)
        acc = tl.dot(left, right, acc)
    to = out + group.to(tl.int64) * K * q + f[:, None] * out_q + k[None, :] * out_k
    tl.store(to, acc.to(out.dtype.element_ty), mask=(f < q)[:, None] & (k < K)[None, :])


def factor_gradient_triton(
    low_Rq: torch.Tensor,
    x: torch.Tensor,
    tiles: Tiles,
    *,
    transposed: bool,
    dtype: torch.dtype,
    index_R: torch.Tensor | None,
) -> torch.Tensor:
    q, k, num_groups = low_Rq.shape[1], x.shape[1], tiles.start_E.shape[0] - 1
    out = x.new_empty((num_groups, k, q) if transposed else (num_groups, q, k), dtype=dtype)
    block, width = factor_block(q), min(WIDTH, max(16, triton.next_power_of_2(k)))
    _factor_gradient[(triton.cdiv(k, width), num_groups, triton.cdiv(q, block))](
        low_Rq, x, index_R, out, tiles.start_E, k, q, low_Rq.stride(0), x.stride(0),
        q if transposed else 1, 1 if transposed else k,
        INDEXED=index_R is not None, Q=block, ROWS=ROWS, BLOCK=width, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return out
