"""Triton kernels of `fp8_gemm.py`, which says what they compute: the weight is dequantised inside the product.

Legend: R rows sorted by group, L groups, C contracted width, O output width, q columns of the factors.

A weight tile is read in FP8 and becomes 16 bits on its way to the tensor cores. Hopper's take their first operand from
registers and their second from shared memory alone, so with `weight_first` the product is out' = W · x', and the tile
never goes back to shared memory. Where the weight is contracted along its rows (`transposed`), its bytes lie across the
order that registers need; read in pairs, as 16-bit numbers, they are transposed by the hardware's own instruction, and
each program has the even and the odd columns of its tile as two products (`pairs`).
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from coati_ext.kernel.row_groups import RowGroups

BLOCK = 128  # rows and columns of a block of the weight, columns of a block of quantised rows


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How a product is cut: a program has `rows` x `width` of the output and contracts `depth` at a time."""

    rows: int
    width: int
    depth: int
    num_warps: int
    num_stages: int
    described: bool = True
    """Whether tiles of the weight come by descriptors, that is by the tensor copy engine."""
    rows_described: bool = True
    """The same for the rows."""
    weight_first: bool = True
    scale_tile: bool = True
    """Whether scales multiply the weight, which then is what `dequantize_fp8` makes, or each block's partial sums."""
    pairs: bool = False
    settle: bool = True
    """Whether a program waits for each step's product: it has no other work until then, and told otherwise, ptxas
    waits for each single instruction."""
    band: int = 8
    """Row tiles of a group that go through the weight together."""


@triton.jit
def _place(pid, first_tile, group_of, out_tiles, BAND: tl.constexpr):
    """A program's group, row tile and tile of columns: all row tiles of a band take a weight tile one after the other,
    so that it comes from memory once."""
    group = tl.load(group_of + pid // out_tiles)
    first = tl.load(first_tile + group)
    within = pid - first * out_tiles
    band = within // (BAND * out_tiles)
    within -= band * BAND * out_tiles
    height = tl.minimum(tl.load(first_tile + group + 1) - first - band * BAND, BAND)
    return group, first, first + band * BAND + within % height, within // height


@triton.jit
def _dot(weight, x, acc, WEIGHT_FIRST: tl.constexpr):
    if WEIGHT_FIRST:  # noqa: SIM108 - Triton takes no conditional expression of two types
        acc = tl.dot(weight, x, acc)
    else:
        acc = tl.dot(x, weight, acc)
    return acc


@triton.jit
def _product(weight, of_block, x, acc, WEIGHT_FIRST: tl.constexpr, SCALE_TILE: tl.constexpr, SETTLE: tl.constexpr):
    """acc + weight · of_block · x; of_block is a scalar, or has one value for each output column."""
    if SCALE_TILE:
        acc = _dot((weight * of_block).to(x.dtype), x, acc, WEIGHT_FIRST)
        if SETTLE:
            acc = tl.inline_asm_elementwise("", "=r,0", [acc], dtype=tl.float32, is_pure=False, pack=1)
    else:
        acc += _dot(weight.to(x.dtype), x, tl.zeros_like(acc), WEIGHT_FIRST) * of_block
    return acc


@triton.jit
def _decode_pair(code, INLINE: tl.constexpr):
    """The two e4m3 numbers of a 16-bit integer, the lower byte first, as fp32."""
    if INLINE:  # both by one instruction
        halves = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h", [code], tl.int32, is_pure=True, pack=1
        )
        left = (halves & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        right = (halves >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        left = (code & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        right = ((code >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return left, right


@triton.jit
def _across(tensor, OTHER: tl.constexpr):
    """A vector along the first dimension of a tile, or the second."""
    return tensor[None, :] if OTHER else tensor[:, None]


@triton.jit(do_not_specialize=["num_groups", "q", "scale_group", "scale_o", "scale_c"])
def _rows_by_fp8(
    x, weight, scale, out, low, factor, start, first_tile, group_of, num_groups, C, O, q,  # noqa: E741
    x_row, weight_group, weight_o, weight_c, scale_group, scale_o, scale_c, low_row, factor_group, factor_q, factor_o,
    TRANSPOSED: tl.constexpr, WEIGHT_FIRST: tl.constexpr, SCALE_TILE: tl.constexpr, PAIRS: tl.constexpr,
    SETTLE: tl.constexpr, ROWS_DESCRIBED: tl.constexpr, DESCRIBED: tl.constexpr, Q: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr, DTYPE: tl.constexpr,
    INLINE: tl.constexpr,
):  # fmt: skip
    """With PAIRS, weight has int16 elements, two weights each, and out int32, two numbers each."""
    pid = tl.program_id(0)
    out_tiles = tl.cdiv(O, WIDTH)
    if pid < tl.load(first_tile + num_groups) * out_tiles:
        group, first, tile, column = _place(pid, first_tile, group_of, out_tiles, BAND)
        row = tl.load(start + group) + (tile - first) * ROWS
        valid = tl.minimum(tl.load(start + group + 1) - row, ROWS)
        r, d = tl.arange(0, ROWS), tl.arange(0, DEPTH)
        # Rows and columns that are not there are read from the last that is, and not stored.
        if not ROWS_DESCRIBED:
            x += row.to(tl.int64) * x_row
            x_at = _across(tl.minimum(r, valid - 1), WEIGHT_FIRST) * x_row + _across(d, not WEIGHT_FIRST)
        # Of the output columns 2n and 2n + 1 with PAIRS, else of the columns.
        EACH: tl.constexpr = 2 if PAIRS else 1
        n = column * (WIDTH // EACH) + tl.arange(0, WIDTH // EACH)
        there = n < O // EACH
        n_in = tl.minimum(n, O // EACH - 1)
        if not DESCRIBED:
            weight += group.to(tl.int64) * weight_group // EACH
            weight_at = _across(n_in, not WEIGHT_FIRST) * weight_o + _across(d, WEIGHT_FIRST) * (weight_c // EACH)
        # One for each column, and not one for all: so Triton loads them ahead, and puts the weight into registers.
        of_columns = scale + group * scale_group + _across(n_in * EACH // 128, not WEIGHT_FIRST) * scale_o

        if WEIGHT_FIRST:
            acc = tl.zeros((WIDTH // EACH, ROWS), tl.float32)
        else:
            acc = tl.zeros((ROWS, WIDTH // EACH), tl.float32)
        odd = acc
        if Q > 0:
            low += row.to(tl.int64) * low_row
            factor += group.to(tl.int64) * factor_group
            low_at = _across(r, WEIGHT_FIRST) * low_row
            low_there = _across(r < valid, WEIGHT_FIRST)
            factor_at = _across(n_in * EACH, not WEIGHT_FIRST) * factor_o
            for k in range(0, q, Q):
                f_low = _across(k + tl.arange(0, Q), not WEIGHT_FIRST)
                f = _across(k + tl.arange(0, Q), WEIGHT_FIRST)
                part = tl.load(low + low_at + f_low, mask=low_there & (f_low < q), other=0.0)
                of_group = tl.load(factor + factor_at + f * factor_q, mask=f < q, other=0.0)
                acc = _dot(of_group, part, acc, WEIGHT_FIRST)
                if PAIRS:
                    of_group = tl.load(factor + factor_at + factor_o + f * factor_q, mask=f < q, other=0.0)
                    odd = _dot(of_group, part, odd, WEIGHT_FIRST)

        for c in range(0, C, DEPTH):
            of_block = tl.load(of_columns + c // 128 * scale_c)
            if ROWS_DESCRIBED:
                rows = x.load([row, c])
                if WEIGHT_FIRST:
                    rows = rows.T
            elif EVEN:
                rows = tl.load(x + c + x_at)
            else:
                rows = tl.load(x + c + x_at, mask=_across(c + d < C, not WEIGHT_FIRST), other=0.0)
            if DESCRIBED:
                if TRANSPOSED:
                    code = weight.load([group * C + c, column * (WIDTH // EACH)])
                else:
                    code = weight.load([group * O + column * WIDTH, c])
                if TRANSPOSED == WEIGHT_FIRST:
                    code = code.T
            elif EVEN:
                code = tl.load(weight + c * (weight_c // EACH) + weight_at)
            else:
                there_c = _across(c + d < C, WEIGHT_FIRST)
                code = tl.load(weight + c * (weight_c // EACH) + weight_at, mask=there_c, other=0)
            if PAIRS:
                left, right = _decode_pair(code, INLINE)
                acc = _product(left, of_block, rows, acc, WEIGHT_FIRST, SCALE_TILE, SETTLE)
                odd = _product(right, of_block, rows, odd, WEIGHT_FIRST, SCALE_TILE, SETTLE)
            else:
                left = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
                acc = _product(left, of_block, rows, acc, WEIGHT_FIRST, SCALE_TILE, SETTLE)

        out += row.to(tl.int64) * (O // EACH)
        out_at = _across(r, WEIGHT_FIRST) * (O // EACH) + _across(n, not WEIGHT_FIRST)
        mask = _across(r < valid, WEIGHT_FIRST) & _across(there, not WEIGHT_FIRST)
        if PAIRS:
            left = acc.to(DTYPE).to(tl.uint16, bitcast=True).to(tl.uint32)
            right = odd.to(DTYPE).to(tl.uint16, bitcast=True).to(tl.uint32)
            tl.store(out + out_at, (left | (right << 16)).to(tl.int32, bitcast=True), mask=mask)
        else:
            tl.store(out + out_at, acc.to(DTYPE), mask=mask)


def rows_by_fp8_triton(
    x: torch.Tensor,
    weight_LNK: torch.Tensor,
    scale_LIJ: torch.Tensor,
    groups: RowGroups,
    *,
    transposed: bool,
    low: tuple[torch.Tensor, torch.Tensor] | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    num_rows, contracted = x.shape
    num_groups, of_n, of_k = weight_LNK.shape
    width_out = of_k if transposed else of_n
    tile = _allowed(tile or choose_tile(num_rows, num_groups, transposed), x, weight_LNK, transposed)
    out = x.new_empty(num_rows, width_out)
    tiles = groups.tiles_of(tile.rows)
    weight = weight_LNK.view(torch.int16 if tile.pairs else torch.uint8)
    along = (1, weight_LNK.stride(1)) if transposed else (weight_LNK.stride(1), 1)
    if tile.described:
        across = tile.width // 2 if tile.pairs else tile.width
        shape = [tile.depth, across] if transposed else [across, tile.depth]
        weight = TensorDescriptor.from_tensor(weight.flatten(0, 1), shape)
    scales = scale_LIJ.transpose(1, 2).stride() if transposed else scale_LIJ.stride()
    q, factors, strides = 0, (None, None), (0, 0, 0, 0)
    if low is not None:
        q, factors = low[0].shape[1], low
        strides = (low[0].stride(0), *low[1].stride())
    _rows_by_fp8[(tiles.group_M.shape[0] * triton.cdiv(width_out, tile.width),)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]) if tile.rows_described else x,
        weight, scale_LIJ, out.view(torch.int32) if tile.pairs else out, *factors,
        tiles.start_E, tiles.first_tile_E, tiles.group_M, num_groups, contracted, width_out, q,
        x.stride(0), weight_LNK.stride(0), *along, *scales, *strides,
        TRANSPOSED=transposed, WEIGHT_FIRST=tile.weight_first, SCALE_TILE=tile.scale_tile, PAIRS=tile.pairs,
        SETTLE=tile.settle and not INTERPRETED, ROWS_DESCRIBED=tile.rows_described, DESCRIBED=tile.described,
        Q=min(64, max(16, triton.next_power_of_2(q))) if q else 0, EVEN=contracted % tile.depth == 0,
        ROWS=tile.rows, WIDTH=tile.width, DEPTH=tile.depth, BAND=tile.band, DTYPE=DTYPES[x.dtype],
        INLINE=not INTERPRETED,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def _allowed(tile: Tile, x: torch.Tensor, weight_LNK: torch.Tensor, transposed: bool) -> Tile:
    """The tile without what these tensors cannot have: descriptors want rows of a multiple of 16 bytes."""
    contiguous = weight_LNK.is_contiguous()
    even = weight_LNK.shape[2] % 2 == 0 and contiguous and weight_LNK.data_ptr() % 2 == 0
    return replace(
        tile,
        pairs=tile.pairs and transposed and even,
        described=tile.described and contiguous and weight_LNK.shape[2] % 16 == 0 and weight_LNK.data_ptr() % 16 == 0,
        rows_described=tile.rows_described and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0,
    )


def choose_tile(num_rows: int, num_groups: int, transposed: bool) -> Tile:
    return TILES[num_rows >= MANY * num_groups, transposed]


# (Whether a group has MANY rows, transposed): the fastest of 58 tiles on an H200 (torch 2.11, Triton 3.6) at the widths
# of DeepSeek-V3 and Qwen3-30B-A3B with 32, 64, 256 and 512 rows a group. Beside torch's product in bf16 it takes 1.2 to
# 1.5 of the time with 256 and 512 rows, 0.7 to 0.8 with 64, half with 32 (CUDA events around each alone).
MANY = 160
TILES = {
    (True, False): Tile(rows=128, width=128, depth=64, num_warps=4, num_stages=4),
    (True, True): Tile(rows=128, width=128, depth=64, num_warps=4, num_stages=4, pairs=True),
    (False, False): Tile(rows=64, width=128, depth=128, num_warps=4, num_stages=3, scale_tile=False),
    (False, True): Tile(rows=64, width=128, depth=128, num_warps=4, num_stages=3, scale_tile=False, pairs=True),
}

INTERPRETED = not isinstance(_rows_by_fp8, triton.runtime.JITFunction)  # TRITON_INTERPRET=1: runs on the CPU
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
