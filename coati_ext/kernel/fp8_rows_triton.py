"""Triton kernels of `fp8_gemm.py` whose rows are FP8 too: one pass that quantises rows, and FP8 x FP8 products.

Legend: R rows sorted by group, L groups, C contracted width, O output width, J blocks of 128 of the contracted width,
q columns of the factors.

Hopper's tensor cores add up FP8 products with about 14 bits, so a product goes 128 deep there, and is added up in fp32
with the scales of its blocks (DeepSeek-V3's report, section 3.3). They take FP8 operands only as they lie in memory
when both are contracted along their rows, so this is the forward product alone.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from coati_ext.kernel.fp8_gemm_triton import BLOCK, DTYPES, INTERPRETED, Tile, _across, _dot, _place
from coati_ext.kernel.row_groups import RowGroups

QUANTIZED_ROWS = 8  # of a program that quantises
# The fastest of 13 on an H200 at the shapes of `fp8_gemm_triton.TILES`: 0.7 to 1.1 of the time of torch's product in
# bf16 with 256 and 512 rows a group, half with 64, 0.4 with 32.
TILE = Tile(rows=64, width=128, depth=128, num_warps=4, num_stages=4, weight_first=False)


@triton.jit
def _quantize_rows(x, out, scale, num_rows, width, x_row, HEIGHT: tl.constexpr):
    block = tl.program_id(1)
    r = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    c = block * 128 + tl.arange(0, 128)
    at = r.to(tl.int64)[:, None]
    mask = (r < num_rows)[:, None] & (c < width)
    value = tl.load(x + at * x_row + c, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(value), 1)
    of_block = tl.where(
        largest == 0, 1.0, tl.maximum(tl.div_rn(largest, tl.full((HEIGHT,), 448.0, tl.float32)), 1.1754943508222875e-38)
    )
    code = tl.minimum(
        tl.maximum(tl.div_rn(value, tl.broadcast_to(of_block[:, None], (HEIGHT, 128))), -448.0), 448.0
    ).to(tl.float8e4nv)
    tl.store(out + at * width + c, code.to(tl.uint8, bitcast=True), mask=mask)
    tl.store(scale + block.to(tl.int64) * num_rows + r, of_block, mask=r < num_rows)


def quantize_rows_triton(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, width = x.shape
    blocks = triton.cdiv(width, BLOCK)
    out = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scale_JR = torch.empty(blocks, num_rows, dtype=torch.float32, device=x.device)
    _quantize_rows[(triton.cdiv(num_rows, QUANTIZED_ROWS), blocks)](
        x, out.view(torch.uint8), scale_JR, num_rows, width, x.stride(0), HEIGHT=QUANTIZED_ROWS, num_warps=1
    )
    return out, scale_JR.t()


@triton.jit(do_not_specialize=["num_groups", "q", "x_scale_c", "scale_group", "scale_o", "scale_c"])
def _fp8_rows_by_fp8(
    x, weight, scale_x, scale, out, low, factor, start, first_tile, group_of, num_groups, C, O, q,  # noqa: E741
    x_scale_row, x_scale_c, scale_group, scale_o, scale_c, low_row, factor_group, factor_q, factor_o,
    WEIGHT_FIRST: tl.constexpr, Q: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    BAND: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    out_tiles = tl.cdiv(O, WIDTH)
    if pid < tl.load(first_tile + num_groups) * out_tiles:
        group, first, tile, column = _place(pid, first_tile, group_of, out_tiles, BAND)
        row = tl.load(start + group) + (tile - first) * ROWS
        valid = tl.minimum(tl.load(start + group + 1) - row, ROWS)
        r, n = tl.arange(0, ROWS), column * WIDTH + tl.arange(0, WIDTH)
        n_in = tl.minimum(n, O - 1)
        of_weight = scale + group * scale_group + (column * WIDTH // 128) * scale_o  # WIDTH divides 128
        of_rows = scale_x + row.to(tl.int64) * x_scale_row
        of_rows += _across(tl.minimum(r, valid - 1), WEIGHT_FIRST) * x_scale_row

        if WEIGHT_FIRST:  # noqa: SIM108 - Triton takes no conditional expression of two types
            acc = tl.zeros((WIDTH, ROWS), tl.float32)
        else:
            acc = tl.zeros((ROWS, WIDTH), tl.float32)
        if Q > 0:
            of_low = low + row.to(tl.int64) * low_row + _across(r, WEIGHT_FIRST) * low_row
            of_factor = factor + group.to(tl.int64) * factor_group + _across(n_in, not WEIGHT_FIRST) * factor_o
            for k in range(0, q, Q):
                f_low = _across(k + tl.arange(0, Q), not WEIGHT_FIRST)
                f = _across(k + tl.arange(0, Q), WEIGHT_FIRST)
                there = _across(r < valid, WEIGHT_FIRST) & (f_low < q)
                part = tl.load(of_low + f_low, mask=there, other=0.0)
                acc = _dot(tl.load(of_factor + f * factor_q, mask=f < q, other=0.0), part, acc, WEIGHT_FIRST)

        for c in range(0, C, DEPTH):
            of_product = tl.load(of_rows + c // 128 * x_scale_c) * tl.load(of_weight + c // 128 * scale_c)
            rows = x.load([row, c]).to(tl.float8e4nv, bitcast=True)
            code = weight.load([group * O + column * WIDTH, c]).to(tl.float8e4nv, bitcast=True)
            if WEIGHT_FIRST:
                acc += tl.dot(code, rows.T) * of_product
            else:
                acc += tl.dot(rows, code.T) * of_product

        out += row.to(tl.int64) * O
        mask = _across(r < valid, WEIGHT_FIRST) & _across(n < O, not WEIGHT_FIRST)
        out_at = _across(r, WEIGHT_FIRST) * O + _across(n, not WEIGHT_FIRST)
        tl.store(out + out_at, acc.to(DTYPE), mask=mask)


def fp8_rows_by_fp8_triton(
    x8: torch.Tensor,
    scale_RJ: torch.Tensor,
    weight_LNK: torch.Tensor,
    scale_LIJ: torch.Tensor,
    groups: RowGroups,
    *,
    dtype: torch.dtype,
    low: tuple[torch.Tensor, torch.Tensor] | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    num_rows, contracted = x8.shape
    num_groups, width_out, _ = weight_LNK.shape
    tile = tile or TILE
    out = torch.empty(num_rows, width_out, dtype=dtype, device=x8.device)
    tiles = groups.tiles_of(tile.rows)
    q, factors, strides = 0, (None, None), (0, 0, 0, 0)
    if low is not None:
        q, factors = low[0].shape[1], low
        strides = (low[0].stride(0), *low[1].stride())
    as_stored = torch.uint8 if INTERPRETED else torch.float8_e4m3fn
    _fp8_rows_by_fp8[(tiles.group_M.shape[0] * triton.cdiv(width_out, tile.width),)](
        TensorDescriptor.from_tensor(x8.view(as_stored), [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight_LNK.view(as_stored).flatten(0, 1), [tile.width, tile.depth]),
        scale_RJ, scale_LIJ, out, *factors, tiles.start_E, tiles.first_tile_E, tiles.group_M, num_groups, contracted,
        width_out, q, *scale_RJ.stride(), *scale_LIJ.stride(), *strides,
        WEIGHT_FIRST=tile.weight_first, Q=min(64, max(16, triton.next_power_of_2(q))) if q else 0,
        ROWS=tile.rows, WIDTH=tile.width, DEPTH=tile.depth, BAND=tile.band, DTYPE=DTYPES[dtype],
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out
