"""The compiled FP8 kernels: equal to the CPU to the bit, whatever the shape, dtype, strides and size."""

from itertools import product

import pytest
import torch

from coati_ext.kernel import fp8_cast
from coati_ext.kernel.fp8_cast import dequantize_fp8, dequantize_fp8_reference, quantize_fp8

pytestmark = pytest.mark.gpu

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
SHAPES = [(576, 7168), (192, 256), (130, 200), (128, 128), (1, 1), (129, 127), (3, 130, 200), (2, 2, 33, 40), (5, 1536)]
BLOCKS = [(128, 128), (64, 32), (1, 128), (100, 96), (12, 20)]


def kernels():
    """The module of the Triton kernels: without a GPU, Triton may be absent."""
    from coati_ext.kernel import fp8_cast_triton

    return fp8_cast_triton


def grid_of(shape, block):
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def all_bytes(shape, fp8, *, seed=0):
    """All 256 codes, NaN and infinity too, equally likely."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(fp8)


def make_scale(shape, dtype=torch.float32, *, seed=0):
    """Log-uniform from 2**-20 to 2**5."""
    return torch.exp2(torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 25 - 20).to(dtype)


def assert_same_bits(ours, expected):
    assert (ours.shape, ours.dtype) == (expected.shape, expected.dtype)
    assert ours.is_cuda and ours.is_contiguous()
    integer = INTEGERS[ours.element_size()]
    assert torch.equal(ours.cpu().view(integer), expected.view(integer))


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_cpu(shape, fp8, portable):
    kernel = kernels()
    if not portable and torch.cuda.get_device_capability() < kernel.NATIVE_FP8:
        pytest.skip("this GPU does not convert FP8")
    for turn, block in enumerate(BLOCKS):
        dtype, scale_dtype = fp8_cast.DTYPES[turn % 3], fp8_cast.SCALE_DTYPES[turn % 4]
        weight, scale = all_bytes(shape, fp8), make_scale(grid_of(shape, block), scale_dtype)
        ours = kernel.dequantize_fp8_tiled(
            weight.cuda(), scale.cuda(), block_size=block, dtype=dtype, portable=portable
        )
        assert_same_bits(ours, dequantize_fp8(weight, scale, block_size=block, dtype=dtype))


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", fp8_cast.DTYPES)
def test_all_bytes_by_all_kinds_of_scales(dtype, fp8, portable):
    """NaN from weights, scales and infinity times zero; overflow; subnormal scales and results; signs of 0."""
    kernel = kernels()
    if not portable and torch.cuda.get_device_capability() < kernel.NATIVE_FP8:
        pytest.skip("this GPU does not convert FP8")
    special = [0.0, -0.0, -3.0, 2.0**-149, 2.0**-127, 1e-39, 2.0**118, 2.0**119, 3.4e38, float("inf"), float("nan")]
    exponents = torch.arange(256, dtype=torch.uint8).view(E8M0)
    of_all_dtypes = [make_scale((300,), scale_dtype) for scale_dtype in fp8_cast.SCALE_DTYPES]
    for scale in (torch.tensor(special), torch.tensor(special).bfloat16(), exponents, *of_all_dtypes):
        scale = scale[:, None].expand(-1, 2)
        weight = torch.arange(256, dtype=torch.uint8).view(fp8).expand(len(scale), 256)
        ours = kernel.dequantize_fp8_tiled(
            weight.cuda(), scale.cuda(), block_size=(1, 128), dtype=dtype, portable=portable
        )
        assert_same_bits(ours, dequantize_fp8_reference(weight, scale, block_size=(1, 128), dtype=dtype))


@pytest.mark.parametrize("num_warps", [1, 4, 8])
@pytest.mark.parametrize(("tile_rows", "tile_columns"), [(1, 1024), (4, 2048), (8, 512), (16, 1024), (128, 128)])
def test_tiles_change_nothing(tile_rows, tile_columns, num_warps):
    tile = dict(tile_rows=tile_rows, tile_columns=tile_columns, num_warps=num_warps)
    for shape in ((256, 2048), (130, 1000)):
        weight, scale = all_bytes(shape, E4M3), make_scale(grid_of(shape, (128, 128)))
        ours = kernels().dequantize_fp8_tiled(weight.cuda(), scale.cuda(), **tile)
        assert_same_bits(ours, dequantize_fp8(weight, scale))


def test_any_strides():
    shape, block = (2, 3, 130, 144), (64, 32)
    wide = all_bytes((2, 3, 140, 300), E4M3).cuda()
    scale = make_scale(grid_of(shape, block)[::-1]).permute(3, 2, 1, 0)
    for weight in (
        wide[..., 2:132, 1:145],  # no 16-byte alignment
        wide[..., :130, 16:160],
        wide[..., :130, 1:289:2],
        all_bytes((2, 3, 144, 130), E4M3).cuda().transpose(-2, -1),
        all_bytes((3, 2, 130, 144), E4M3).cuda().transpose(0, 1),  # does not flatten without a copy
        all_bytes((130, 144), E4M3).cuda().expand(shape),
    ):
        ours = dequantize_fp8(weight, scale.cuda(), block_size=block)
        assert_same_bits(ours, dequantize_fp8(weight.cpu().contiguous(), scale, block_size=block))


def test_writes_to_out_and_takes_no_weights():
    weight, scale = all_bytes((2, 130, 200), E4M3), make_scale((2, 2, 2))
    around = torch.full((4, 130, 200), 7.0, dtype=torch.float16, device="cuda")
    out = around[1:3]
    assert dequantize_fp8(weight.cuda(), scale.cuda(), dtype=torch.float16, out=out) is out
    assert_same_bits(out, dequantize_fp8(weight, scale, dtype=torch.float16))
    assert (around[[0, 3]] == 7).all()
    for shape in ((0, 128), (130, 0), (0, 3, 5)):
        assert (
            dequantize_fp8(all_bytes(shape, E4M3).cuda(), torch.ones(grid_of(shape, (128, 128))).cuda()).shape == shape
        )
    with pytest.raises(ValueError, match="scale_inv is on cpu"):
        dequantize_fp8(weight.cuda(), scale)


def random_bytes_there(shape):
    generator = torch.Generator("cuda").manual_seed(0)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8, device="cuda").view(E4M3)


def test_more_weights_than_32_bits_count():
    """2.5 GB of weights and 5 GB of results; matrix 256 begins at 2**31."""
    weight, scale = random_bytes_there((300, 4096, 2048)), make_scale((300, 32, 16)).cuda()
    out = dequantize_fp8(weight, scale)
    for index in (0, 127, 128, 255, 256, 299):
        assert_same_bits(out[index], dequantize_fp8(weight[index].cpu(), scale[index].cpu()))


def test_one_matrix_of_more_weights_than_32_bits_count():
    """2.3 GB of weights and 4.6 GB of results; row 65536, of block 512, begins at 2**31. The last block is ragged."""
    weight, scale = random_bytes_there((70000, 32768)), make_scale((547, 256)).cuda()
    out = dequantize_fp8(weight, scale)
    for block in (0, 255, 256, 511, 512, 546):
        rows = slice(block * 128, (block + 1) * 128)
        assert_same_bits(out[rows], dequantize_fp8(weight[rows].cpu(), scale[block : block + 1].cpu()))


@pytest.mark.parametrize("shape", [(256, 384), (576, 7168), (130, 200), (1, 1)])
def test_one_block_per_program_equals_the_cpu_where_finite(shape):
    kernel = kernels()
    if torch.cuda.get_device_capability() < kernel.NATIVE_FP8:
        pytest.skip("this GPU does not convert FP8")
    codes = all_bytes(shape, E4M3).view(torch.uint8)
    weight = torch.where(codes & 0x7F == 0x7F, 0, codes).view(E4M3)
    scale = make_scale(grid_of(shape, (128, 128)))
    for dtype in fp8_cast.DTYPES:
        ours = kernel.dequantize_fp8_one_block_per_program(weight.cuda(), scale.cuda(), dtype=dtype)
        assert_same_bits(ours, dequantize_fp8(weight, scale, dtype=dtype))


@pytest.mark.parametrize("power_of_two_scales", [False, True])
@pytest.mark.parametrize("dtype", fp8_cast.DTYPES)
def test_quantize_equals_the_cpu(dtype, power_of_two_scales, monkeypatch):
    monkeypatch.setattr(fp8_cast, "DEVICE_STRIP", 1 << 16)  # several strips
    for shape, block in product(SHAPES, BLOCKS):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(0.02)
        weight[..., :20, :20] *= 1e-36 if dtype != torch.float16 else 0  # tiny blocks, and blocks of zeros
        weight = weight.to(dtype)
        ours = quantize_fp8(weight.cuda(), block_size=block, power_of_two_scales=power_of_two_scales)
        expected = quantize_fp8(weight, block_size=block, power_of_two_scales=power_of_two_scales)
        for tensor, other in zip(ours, expected, strict=True):
            assert_same_bits(tensor, other)


def test_quantize_refuses_what_is_not_finite():
    weight = torch.zeros(2, 130, 200, device="cuda")
    weight[1, 129, 3] = float("inf")
    with pytest.raises(ValueError, match=r"NaN or infinity, first in block \(1, 1, 0\)"):
        quantize_fp8(weight)


def test_quantize_takes_little_memory():
    """bf16 weights of 1 GiB: the FP8 result is half of it, and a strip of fp32 is 256 MiB."""
    weight = torch.randn(16, 4096, 8192, device="cuda", dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    quantized, scale_inv = quantize_fp8(weight)
    extra = torch.cuda.max_memory_allocated() - before - quantized.nbytes - scale_inv.nbytes
    assert extra <= 2 * 4 * fp8_cast.DEVICE_STRIP
