"""Triton kernels that turn block-scaled FP8 weights into bf16, fp16 or fp32; `fp8_cast.py` says what they compute.

Legend: B matrices of the batch, N rows and M columns of one matrix, I and J rows and columns of its grid of scales.

The work is 3 bytes of traffic a weight and little arithmetic, so what counts is how memory is walked. One program for
each 128 x 128 block (the published scheme, `dequantize_fp8_one_block_per_program`) reads 128 bytes here and there, and
since its 16-byte loads do not match its 16-byte stores, each block passes through shared memory. Here a program takes a
wide, low tile inside one row of blocks. A thread takes 8 neighbouring weights at a time, which fill one store; it loads
all of its weights before it uses the first, and stores what it loaded.
"""

from contextlib import nullcontext
from math import gcd

import torch
import triton
import triton.language as tl

from coati_ext.kernel.fp8_cast import prepare_dequantize

# A tile has TILE_ROWS x TILE_COLUMNS weights, all of one row of blocks. Both are powers of two. Of 80 combinations on
# an H200 this one is best over [7168, 2048] and [2048, 7168] (64 each) and [18432, 7168]: 0.95 of a device copy on
# average; 8 x 256 with 4 warps reaches 0.94, 8 x 1024 with 4 warps 0.88.
TILE_ROWS = 1
TILE_COLUMNS = 1024
NUM_WARPS = 2
VECTOR_BYTES = 16  # the widest store of a thread: 8 weights in a 16-bit dtype, so it loads 8 bytes
NATIVE_FP8 = (8, 9)  # the first compute capability that converts FP8 itself

FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
SCALE_FORMATS = {torch.float8_e8m0fnu: "e8m0", torch.bfloat16: "bf16"}  # others are loaded as numbers
SCALE_INTEGERS = {"e8m0": torch.uint8, "bf16": torch.int16}
OUT_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _decode(code, FORMAT: tl.constexpr):
    """FP8 to fp32, exactly. Formats e4m3 and e5m2 come as bytes: shifted they are fp16, with e4m3 2**8 too small."""
    if FORMAT == "native":
        value = code.to(tl.float32)
    elif FORMAT == "e5m2":
        value = (code.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        bits = code.to(tl.int16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        value = tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
    return value


@triton.jit
def _decode_scale(scale, SCALE_FORMAT: tl.constexpr):
    """A scale as fp32; UE8M0 is a byte, and its 0 is 2**-127, a subnormal.

    bf16 comes as an integer: LLVM sees that the product of an fp16 and a bf16, made in fp32, fits the mantissa of fp16,
    and computes an fp16 result in fp16, where a bf16 scale loses its exponent (triton 3.6, sm_90).
    """
    if SCALE_FORMAT == "bf16":
        value = (scale.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif SCALE_FORMAT == "e8m0":
        exponent = scale.to(tl.int32)
        bits = tl.where(exponent == 0, 0x400000, exponent << 23)
        value = tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    else:
        value = scale.to(tl.float32)
    return value


@triton.jit
def _round(value, out_dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """fp32 to out_dtype, to nearest even. Triton's interpreter rounds to bf16 otherwise, so it gets the arithmetic."""
    if INTERPRETED and out_dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        rounded = value.to(out_dtype)
    return rounded


@triton.jit
def _round_one_nan(value, out_dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """`_round`, with torch's bit pattern for every NaN.

    On NVIDIA GPUs NaN comes out of a product, and of its rounding, as the largest integer; all numbers, read as signed
    integers, are below torch's NaN. So one minimum does it, of two 16-bit values at a time on compute capability 9.0.
    """
    rounded = _round(value, out_dtype, INTERPRETED)
    if out_dtype == tl.float32:
        bits = rounded.to(tl.int32, bitcast=True)
        nan = tl.full((), 0x7FC00000, tl.int32)
    else:
        bits = rounded.to(tl.int16, bitcast=True)
        nan = tl.full((), 0x7FC0 if out_dtype == tl.bfloat16 else 0x7E00, tl.int16)
    bits = tl.where(value != value, nan, bits) if INTERPRETED else tl.minimum(bits, nan)
    return bits.to(out_dtype, bitcast=True)


# Widths and strides come in units, so the compiler knows them as multiples of the unit and of no more, and loads as
# many weights at a time as it stores. do_not_specialize keeps it from finding out that they are multiples of 16.
@triton.jit(do_not_specialize=["num_rows", "column_units", "weight_stride_B", "weight_stride_N"])
def _dequantize_tile(
    weight_ptr,
    scale_ptr,
    out_ptr,
    num_rows,
    column_units,
    weight_stride_B,
    weight_stride_N,
    weight_stride_M,
    scale_stride_B,
    scale_stride_I,
    scale_stride_J,
    COLUMN_UNIT: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_M: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE_FORMAT: tl.constexpr,
    out_dtype: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    num_columns = column_units * COLUMN_UNIT
    tiles_across, tiles_down = (num_columns + TILE_M - 1) // TILE_M, (num_rows + TILE_N - 1) // TILE_N
    program = tl.program_id(0)
    first_column = program % tiles_across * TILE_M
    first_row = program // tiles_across % tiles_down * TILE_N
    batch = (program // tiles_across // tiles_down).to(tl.int64)

    rows = (first_row + tl.arange(0, TILE_N))[:, None]
    columns = (first_column + tl.arange(0, TILE_M))[None, :]
    rows_64, columns_64 = rows.to(tl.int64), columns.to(tl.int64)
    weight_ptr += batch * weight_stride_B * STRIDE_UNIT  # from the left, or a stride of 2**31 would overflow
    weights = weight_ptr + rows_64 * weight_stride_N * STRIDE_UNIT + columns_64 * weight_stride_M
    outs = out_ptr + (batch * num_rows + rows_64) * num_columns + columns_64

    # The weights before the scales: their loads are the ones to wait for.
    if EVEN:
        code = tl.load(weights, eviction_policy="evict_first")
    else:
        mask = (rows < num_rows) & (columns < num_columns)
        code = tl.load(weights, mask=mask, eviction_policy="evict_first")

    scale_ptr += batch * scale_stride_B + (first_row // BLOCK_ROWS).to(tl.int64) * scale_stride_I
    if BLOCK_COLUMNS % TILE_M == 0:  # one scale for the tile
        scale = tl.load(scale_ptr + (first_column // BLOCK_COLUMNS).to(tl.int64) * scale_stride_J)
    else:  # one for each GROUP of columns, loaded by the thread that has these columns
        groups = first_column + tl.arange(0, TILE_M // GROUP) * GROUP
        scales = scale_ptr + (groups // BLOCK_COLUMNS).to(tl.int64) * scale_stride_J
        scale = tl.load(scales, mask=groups < num_columns)
        scale = tl.broadcast_to(scale[:, None], (TILE_M // GROUP, GROUP)).reshape(1, TILE_M)

    value = _decode(code, FORMAT) * _decode_scale(scale, SCALE_FORMAT)
    out = _round_one_nan(value, out_dtype, INTERPRETED)
    if EVEN:
        tl.store(outs, out, eviction_policy="evict_first")
    else:
        tl.store(outs, out, mask=mask, eviction_policy="evict_first")


INTERPRETED = not isinstance(_dequantize_tile, triton.runtime.JITFunction)  # TRITON_INTERPRET=1: runs on the CPU


def dequantize_fp8_tiled(
    weight: torch.Tensor,
    scale_inv: torch.Tensor,
    *,
    block_size: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    portable: bool | None = None,
    tile_rows: int | None = None,
    tile_columns: int | None = None,
    num_warps: int = NUM_WARPS,
) -> torch.Tensor:
    """`dequantize_fp8` on a CUDA device, which says the rest, in one launch whatever the shape.

    Args:
        portable: decode FP8 by integer arithmetic; by default where the hardware does not (compute capability < 8.9).
        tile_rows: a power of two that divides the rows of a block; `choose_tile` says what is taken otherwise.
        tile_columns: a power of two.
        num_warps: of 32 threads, a program.
    """
    weight_BNM, scale_BIJ, out_BNM, out = prepare_dequantize(weight, scale_inv, block_size, dtype, out)
    if out.numel() == 0:
        return out
    if portable is None:
        portable = INTERPRETED or torch.cuda.get_device_capability(weight.device) < NATIVE_FP8
    num_batch, num_rows, num_columns = weight_BNM.shape
    chosen_rows, chosen_columns = choose_tile(num_rows, num_columns, block_size)
    tile_n, tile_m = tile_rows or chosen_rows, tile_columns or chosen_columns
    if block_size[0] % tile_n:
        raise ValueError(f"tile_rows must divide the {block_size[0]} rows of a block, got {tile_n}")

    vector = VECTOR_BYTES // max(out.element_size(), 2)
    column_unit = gcd(vector, num_columns)
    scale_format = SCALE_FORMATS.get(scale_inv.dtype, "number")
    stride_unit = gcd(vector, weight_BNM.stride(0), weight_BNM.stride(1))
    grid = (num_batch * triton.cdiv(num_rows, tile_n) * triton.cdiv(num_columns, tile_m),)
    with torch.cuda.device(weight.device) if weight.is_cuda else nullcontext():
        _dequantize_tile[grid](
            weight_BNM.view(torch.uint8) if portable else weight_BNM,
            scale_BIJ.view(SCALE_INTEGERS[scale_format]) if scale_format in SCALE_INTEGERS else scale_BIJ,
            out_BNM,
            num_rows,
            num_columns // column_unit,
            weight_BNM.stride(0) // stride_unit,
            weight_BNM.stride(1) // stride_unit,
            weight_BNM.stride(2),
            *scale_BIJ.stride(),
            COLUMN_UNIT=column_unit,
            STRIDE_UNIT=stride_unit,
            BLOCK_ROWS=block_size[0],
            BLOCK_COLUMNS=block_size[1],
            TILE_N=tile_n,
            TILE_M=tile_m,
            GROUP=gcd(vector, block_size[1], tile_m),
            EVEN=num_rows % tile_n == 0 and num_columns % tile_m == 0,
            FORMAT=FORMATS[weight.dtype] if portable else "native",
            SCALE_FORMAT=scale_format,
            out_dtype=OUT_DTYPES[dtype],
            INTERPRETED=INTERPRETED,
            num_warps=num_warps,
        )
    return out


def choose_tile(num_rows: int, num_columns: int, block_size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of a tile: as wide as wastes the fewest columns, and within one row of blocks."""
    narrowest = min(triton.next_power_of_2(num_columns), 128)
    widths = [2**i for i in range(TILE_COLUMNS.bit_length()) if narrowest <= 2**i <= TILE_COLUMNS]
    tile_m = min(widths, key=lambda width: (triton.cdiv(num_columns, width) * width, -width))
    tallest = min(TILE_ROWS * TILE_COLUMNS // tile_m, triton.next_power_of_2(num_rows))
    return gcd(tallest, block_size[0]), tile_m


@triton.jit
def _dequantize_block(
    weight_ptr,
    scale_ptr,
    out_ptr,
    num_rows,
    num_columns,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    block_row, block_column = tl.program_id(0), tl.program_id(1)
    rows = block_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = block_column * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    offsets = rows[:, None] * num_columns + columns[None, :]
    mask = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
    weight = tl.load(weight_ptr + offsets, mask=mask).to(tl.float32)
    scale = tl.load(scale_ptr + block_row * tl.num_programs(1) + block_column)
    tl.store(out_ptr + offsets, _round(weight * scale, out_ptr.dtype.element_ty, INTERPRETED), mask=mask)


def dequantize_fp8_one_block_per_program(
    weight: torch.Tensor,
    scale_inv: torch.Tensor,
    *,
    block_size: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The published scheme (DeepSeek-V3, inference/kernel.py `weight_dequant`), to measure against; not used otherwise.

    One program a block, 32-bit offsets, FP8 loads that need compute capability 8.9, whatever NaN the hardware makes.

    Args:
        weight: (N, M), contiguous, fewer than 2**31 weights.
        scale_inv: fp32, contiguous.
        block_size: powers of two.
        dtype: as in `dequantize_fp8`, and so is `out`.

    Raises:
        ValueError: what `dequantize_fp8` refuses, and what is not as above.
    """
    *_, out = prepare_dequantize(weight, scale_inv, block_size, dtype, out)
    if weight.dim() != 2 or not weight.is_contiguous() or weight.numel() >= 2**31:
        raise ValueError(
            f"one block per program: weight must be 2-D, contiguous, below 2**31 elements; got {tuple(weight.shape)}"
        )
    if scale_inv.dtype != torch.float32 or not scale_inv.is_contiguous():
        raise ValueError(f"one block per program: scales must be contiguous fp32, got {scale_inv.dtype}")
    if any(side & (side - 1) for side in block_size):
        raise ValueError(f"one block per program: sides of a block must be powers of two, got {block_size}")
    if out.numel():
        with torch.cuda.device(weight.device) if weight.is_cuda else nullcontext():
            _dequantize_block[tuple(scale_inv.shape)](
                weight, scale_inv, out, *weight.shape, *block_size, INTERPRETED=INTERPRETED
            )
    return out
