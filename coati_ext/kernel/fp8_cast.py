"""Block-scaled FP8 weights to bf16, fp16 or fp32 and back, exact to the bit on CPUs and GPUs.

Legend: B matrices of the batch (all leading dims), N rows and M columns of one matrix, I x J its grid of scales, K rows
of blocks in a strip.

The format is that of DeepSeek-V3's checkpoints: `X.weight` in FP8, `X.weight_scale_inv` with one scale a block, to be
multiplied despite its name. Blocks count from the top left, and the last row and column of blocks may be ragged: a
weight of 576 x 7168 has 5 x 56 scales. So the block size is an argument, never a ratio of shapes.

`dequantize_fp8_reference` is the specification. The CPU path equals it and is 4 to 17 times as fast: torch converts FP8
one by one, while e4m3 shifted left by 7 bits is a half-precision number (2**8 too small, subnormals included) that it
converts in vectors. The GPU path is in `fp8_cast_triton.py`.
"""

from collections.abc import Iterator

import torch

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
E4M3_MAX = 448.0

# Weights that a CPU works on at a time, in 6 MB of buffers. On 1 and 2 cores of an AMD EPYC (torch 2.13, [4096, 7168]):
# 25 and 13 ms, 2**17 takes 36 and 30, 2**22 73 and 29, the reference 359 and 192.
CPU_STRIP = 1 << 20
# The same for quantising elsewhere: 256 MB, enough to fill a GPU.
DEVICE_STRIP = 1 << 26


@torch.no_grad()
def dequantize_fp8(
    weight: torch.Tensor,
    scale_inv: torch.Tensor,
    *,
    block_size: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply every weight by the scale of its block, in fp32, and round once, to nearest even. Not differentiable.

    A NaN has one bit pattern (0x7FC0 in bf16), so that results are equal to the bit on all devices.

    Args:
        weight: (..., N, M), float8_e4m3fn or float8_e5m2, any strides.
        scale_inv: (..., ceil(N / rows of a block), ceil(M / columns of a block)), float32, bfloat16, float16 or
            float8_e8m0fnu (UE8M0: 2**(byte - 127), 255 is NaN), on the device of weight.
        block_size: rows and columns of a block.
        dtype: bfloat16, float16 or float32.
        out: where to write; contiguous, of weight's shape and device and of dtype.

    Returns:
        out, or a new contiguous tensor of the shape of weight.

    Raises:
        ValueError: a dtype, shape, device or block size that is not one of these.
    """
    if weight.is_cuda and torch.version.hip is None:
        from coati_ext.kernel.fp8_cast_triton import dequantize_fp8_tiled

        return dequantize_fp8_tiled(weight, scale_inv, block_size=block_size, dtype=dtype, out=out)
    weight_BNM, scale_BIJ, out_BNM, out = prepare_dequantize(weight, scale_inv, block_size, dtype, out)
    if weight.device.type != "cpu":
        out.copy_(dequantize_fp8_reference(weight, scale_inv, block_size=block_size, dtype=dtype))
    elif out.numel() > 0:
        _dequantize_on_cpu(weight_BNM, scale_BIJ, out_BNM, block_size)
    return out


@torch.no_grad()
def dequantize_fp8_reference(
    weight: torch.Tensor,
    scale_inv: torch.Tensor,
    *,
    block_size: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """What `dequantize_fp8` must equal, in plain torch: same arguments, values and errors; about 10 bytes a weight."""
    _check_operands(weight, scale_inv, block_size, dtype)
    num_rows, num_columns = weight.shape[-2:]
    scale = scale_inv.float().repeat_interleave(block_size[0], -2)[..., :num_rows, :]
    scale = scale.repeat_interleave(block_size[1], -1)[..., :num_columns]
    out = (weight.float() * scale).to(dtype).contiguous()
    return out.masked_fill_(out.isnan(), float("nan"))


@torch.no_grad()
def quantize_fp8(
    weight: torch.Tensor, *, block_size: tuple[int, int] = (128, 128), power_of_two_scales: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to float8_e4m3fn with one scale a block: the largest weight of a block becomes 448. Not differentiable.

    The scale is amax / 448 in fp32, at least 2**-126 (so it is no subnormal), or 1 where a block is all zeros. Weights
    are divided by it in fp32 and rounded to nearest even. CPUs and GPUs agree to the bit. Memory besides the result is
    fp32 for a strip of rows: a row of blocks, or more up to 4 MB on CPUs and 256 MB on GPUs.

    Args:
        weight: (..., N, M), bfloat16, float16 or float32, any strides.
        block_size: rows and columns of a block.
        power_of_two_scales: round scales up to powers of two, as UE8M0 wants them; nothing saturates.

    Returns:
        The weight, (..., N, M) float8_e4m3fn, and its scale_inv, (..., ceil(N / rows), ceil(M / columns)) float32.

    Raises:
        ValueError: another dtype, fewer than 2 dims, a bad block size, or a weight that is NaN or infinite.
    """
    if weight.dtype not in DTYPES:
        raise ValueError(f"quantize_fp8: weight is {weight.dtype}, expected one of {_names(DTYPES)}")
    grid = grid_of_scales(weight.shape, block_size)
    quantized = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale_inv = torch.empty(*weight.shape[:-2], *grid, dtype=torch.float32, device=weight.device)
    if weight.numel() == 0:
        return quantized, scale_inv.fill_(1.0)
    matrices = zip(_flatten(weight), _flatten(quantized), _flatten(scale_inv), strict=True)
    for weight_NM, quantized_NM, scale_IJ in matrices:
        _quantize_matrix(weight_NM, quantized_NM, scale_IJ, block_size, power_of_two_scales)
    if not (finite := scale_inv.isfinite()).all():
        block = tuple((~finite).nonzero()[0].tolist())
        raise ValueError(
            f"quantize_fp8: weight of shape {tuple(weight.shape)} has NaN or infinity, first in block {block} "
            f"of {block_size[0]} x {block_size[1]}; FP8 blocks need finite weights"
        )
    return quantized, scale_inv


def prepare_dequantize(
    weight: torch.Tensor,
    scale_inv: torch.Tensor,
    block_size: tuple[int, int],
    dtype: torch.dtype,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Check the arguments of `dequantize_fp8`, which says what they are, and make `out` if there is none.

    Returns:
        weight (B, N, M), scale_inv (B, I, J) and out (B, N, M) as views where strides allow, and out as it was.
    """
    _check_operands(weight, scale_inv, block_size, dtype)
    if out is None:
        out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    expected = (weight.shape, dtype, weight.device, True)
    if (out.shape, out.dtype, out.device, out.is_contiguous()) != expected:
        raise ValueError(
            f"dequantize_fp8: out has shape {tuple(out.shape)}, {out.dtype}, on {out.device}, strides {out.stride()}; "
            f"expected a contiguous {tuple(weight.shape)}, {dtype}, on {weight.device}"
        )
    return _flatten(weight), _flatten(scale_inv), _flatten(out), out


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def grid_of_scales(shape: torch.Size, block_size: tuple[int, int] = (128, 128)) -> tuple[int, int]:
    """Rows and columns of the scales of one matrix of a weight (..., N, M)."""
    if len(shape) < 2 or max(shape[-2:]) >= 2**30:
        raise ValueError(f"FP8 blocks need a weight of 2 or more dims, the last two below 2**30; got {tuple(shape)}")
    if len(block_size) != 2 or min(block_size) < 1:
        raise ValueError(f"block_size is the rows and columns of a block, both at least 1; got {block_size}")
    return -(-shape[-2] // block_size[0]), -(-shape[-1] // block_size[1])


def _check_operands(
    weight: torch.Tensor, scale_inv: torch.Tensor, block_size: tuple[int, int], dtype: torch.dtype
) -> None:
    if weight.dtype not in FP8_DTYPES:
        raise ValueError(
            f"dequantize_fp8: weight of shape {tuple(weight.shape)} is {weight.dtype}, "
            f"expected one of {_names(FP8_DTYPES)}"
        )
    expected = (*weight.shape[:-2], *grid_of_scales(weight.shape, block_size))
    if tuple(scale_inv.shape) != expected:
        raise ValueError(
            f"dequantize_fp8: scale_inv has shape {tuple(scale_inv.shape)}; a weight of shape {tuple(weight.shape)} "
            f"in blocks of {block_size[0]} x {block_size[1]} needs {expected}"
        )
    if scale_inv.dtype not in SCALE_DTYPES:
        raise ValueError(
            f"dequantize_fp8: scale_inv of shape {expected} is {scale_inv.dtype}, "
            f"expected one of {_names(SCALE_DTYPES)}"
        )
    if scale_inv.device != weight.device:
        raise ValueError(f"dequantize_fp8: weight is on {weight.device}, but scale_inv is on {scale_inv.device}")
    if dtype not in DTYPES:
        raise ValueError(f"dequantize_fp8: dtype is {dtype}, expected one of {_names(DTYPES)}")


def _flatten(tensor: torch.Tensor) -> torch.Tensor:
    """(..., N, M) to (B, N, M), a view if there are no leading dims, or if their strides allow it."""
    return tensor.reshape(tensor.shape[:-2].numel(), *tensor.shape[-2:])


def _row_strips(num_rows: int, block_rows: int, max_rows: int) -> Iterator[tuple[int, int]]:
    """Cut rows into strips of whole blocks, or of a part of one block where a block does not fit into `max_rows`.

    Example:
        >>> list(_row_strips(10, 4, 8)), list(_row_strips(10, 4, 3))
        ([(0, 8), (8, 10)], [(0, 3), (3, 4), (4, 7), (7, 8), (8, 10)])
    """
    in_whole_blocks = num_rows // block_rows * block_rows if block_rows <= max_rows else 0
    start = 0
    while start < num_rows:
        if start < in_whole_blocks:
            stop = min(start + max_rows // block_rows * block_rows, in_whole_blocks)
        else:
            stop = min(start + max_rows, (start // block_rows + 1) * block_rows, num_rows)
        yield start, stop
        start = stop


def _dequantize_on_cpu(
    weight_BNM: torch.Tensor, scale_BIJ: torch.Tensor, out_BNM: torch.Tensor, block_size: tuple[int, int]
) -> None:
    _, num_rows, num_columns = weight_BNM.shape
    max_rows = min(max(CPU_STRIP // num_columns, 1), num_rows)
    half_NM = torch.empty(max_rows, num_columns, dtype=torch.int16)
    value_NM = torch.empty(max_rows, num_columns, dtype=torch.float32)
    for weight_NM, scale_IJ, out_NM in zip(weight_BNM, scale_BIJ.float(), out_BNM, strict=True):
        ordinary = bool((scale_IJ.abs() < 2.0**119).all())  # times 2**8 it stays finite; False for NaN
        for start, stop in _row_strips(num_rows, block_size[0], max_rows):
            size, first = stop - start, start // block_size[0]
            scale_KJ = scale_IJ[first : first + max(size // block_size[0], 1)]
            strip, out = weight_NM[start:stop], out_NM[start:stop]
            if ordinary and _dequantize_strip(strip, scale_KJ, out, block_size[1], half_NM[:size], value_NM[:size]):
                continue
            of_strip = (size // len(scale_KJ), block_size[1])
            out.copy_(dequantize_fp8_reference(strip, scale_KJ, block_size=of_strip, dtype=out.dtype))


def _dequantize_strip(
    weight_NM: torch.Tensor,
    scale_KJ: torch.Tensor,
    out_NM: torch.Tensor,
    block_columns: int,
    half_NM: torch.Tensor,
    value_NM: torch.Tensor,
) -> bool:
    """Dequantise rows that divide evenly among the K rows of scales; False, and no result, if a weight is not finite.

    Both formats are half precision, int8 sign-extended and shifted: e5m2 by 8 bits, e4m3 by 7 with a second sign bit to
    clear, which leaves it 2**8 too small and its NaN (0x7F) at 1.875.
    """
    num_strips, num_columns = scale_KJ.shape[0], weight_NM.shape[1]
    half_NM.copy_(weight_NM.view(torch.int8))
    if weight_NM.dtype == torch.float8_e4m3fn:
        half_NM.bitwise_left_shift_(7).bitwise_and_(~0x4000)
        scale_KJ, limit = scale_KJ * 2.0**8, 1.875
    else:
        half_NM.bitwise_left_shift_(8)
        limit = float("inf")
    value_NM.copy_(half_NM.view(torch.float16))
    low, high = value_NM.aminmax()
    if not (-limit < low and high < limit):
        return False
    scale_KM = scale_KJ[:, :, None].expand(-1, -1, block_columns).flatten(1)[:, :num_columns]
    shape = (num_strips, -1, num_columns)
    torch.mul(value_NM.view(shape), scale_KM[:, None], out=out_NM.view(shape))
    return True


def _quantize_matrix(
    weight_NM: torch.Tensor,
    quantized_NM: torch.Tensor,
    scale_IJ: torch.Tensor,
    block_size: tuple[int, int],
    power_of_two_scales: bool,
) -> None:
    (num_rows, num_columns), (rows, columns) = weight_NM.shape, block_size
    num_down, num_across = scale_IJ.shape
    strip = CPU_STRIP if weight_NM.device.type == "cpu" else DEVICE_STRIP
    num_blocks = min(max(strip // (rows * num_across * columns), 1), num_down)
    padded = weight_NM.new_zeros(num_blocks * rows, num_across * columns, dtype=torch.float32)
    for first in range(0, num_down, num_blocks):
        start, stop = first * rows, min((first + num_blocks) * rows, num_rows)
        strip_NM = padded[: stop - start, :num_columns].copy_(weight_NM[start:stop])
        padded[stop - start :].zero_()
        blocks = padded.view(num_blocks, rows, num_across, columns)
        scale_KJ = _scales(torch.maximum(blocks.amax((1, 3)), -blocks.amin((1, 3))), power_of_two_scales)
        blocks.div_(scale_KJ[:, None, :, None])  # at most 448 and an ulp, so nothing needs saturating
        quantized_NM[start:stop] = strip_NM
        scale_IJ[first : first + num_blocks] = scale_KJ[: num_down - first]


def _scales(amax_KJ: torch.Tensor, power_of_two_scales: bool) -> torch.Tensor:
    """The scales of blocks whose largest absolute weights are given; NaN or infinite where those are.

    Divides by a tensor: by a number, CUDA would multiply by its reciprocal, which rounds twice.
    """
    scale = (amax_KJ / torch.full_like(amax_KJ, E4M3_MAX)).clamp_(min=torch.finfo(torch.float32).tiny)
    if power_of_two_scales:
        up = (scale.view(torch.int32) + 0x7FFFFF).bitwise_and_(0x7F800000).view(torch.float32)
        scale = torch.where(scale.isfinite(), up, scale)
    return scale.masked_fill_(amax_KJ == 0, 1.0)
