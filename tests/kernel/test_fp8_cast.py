import math
from itertools import product

import pytest
import torch
from interpreted import interpreted
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from coati_ext.kernel import fp8_cast
from coati_ext.kernel.fp8_cast import DTYPES, SCALE_DTYPES, dequantize_fp8, dequantize_fp8_reference, quantize_fp8

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")  # interpreter's

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}
NAN_BYTES = {torch.bfloat16: [0xC0, 0x7F], torch.float16: [0, 0x7E], torch.float32: [0, 0, 0xC0, 0x7F]}

SHAPES = [(192, 256), (130, 200), (128, 128), (1, 1), (129, 127), (3, 130, 200), (2, 2, 33, 40)]
BLOCKS = [(128, 128), (64, 32), (1, 128), (100, 96), (12, 20)]
CASES = [((576, 7168), (128, 128)), *product(SHAPES, BLOCKS)]
# Several tiles wide, but of few rows where the block makes the tiles low: the interpreter is slow.
KERNEL_CASES = [
    *[(shape, (128, 128)) for shape in [(576, 512), (192, 256), (128, 128), (3, 130, 200)]],
    *[(shape, block) for shape in [(130, 200), (129, 127)] for block in BLOCKS if block != (1, 128)],
    *product([(1, 1), (2, 2, 13, 140)], BLOCKS),
    ((2, 2600), (1, 128)),
]


@pytest.fixture(scope="module")
def kernels():
    module = interpreted("fp8_cast_triton")
    module.TILE_ROWS, module.TILE_COLUMNS = 8, 1024  # few programs, for the interpreter; GPUs may want other tiles
    return module


def pick(request):
    casts = {"reference": dequantize_fp8_reference, "cpu": dequantize_fp8}
    return casts.get(request.param) or request.getfixturevalue("kernels").dequantize_fp8_tiled


cast = pytest.fixture(scope="module", params=["cpu", "kernel"])(pick)
any_cast = pytest.fixture(scope="module", params=["reference", "cpu", "kernel"])(pick)


def grid_of(shape, block):
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def make_weight(shape, fp8, *, finite=True, seed=0):
    """All bytes, equally likely; `finite` leaves of NaN and infinity only the sign."""
    codes = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    if finite:
        codes = torch.where(codes & 0x7F >= (0x7F if fp8 == E4M3 else 0x7C), codes & 0x80, codes)
    return codes.view(fp8)


def make_scale(shape, dtype=torch.float32, *, low=-20, high=5, seed=0):
    """Log-uniform from 2**low to 2**high."""
    uniform = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (2 ** (low + (high - low) * uniform)).float().to(dtype)


def spread(scale, shape, block):
    """The scale of each weight, by indexing."""
    rows, columns = (torch.arange(size) // side for size, side in zip(shape[-2:], block, strict=True))
    return scale[..., rows, :][..., columns]


def ulp(exact, dtype):
    """The spacing of `dtype` around fp64 values, subnormals included."""
    lowest = math.frexp(torch.finfo(dtype).smallest_normal)[1]
    exponent = torch.frexp(exact).exponent.clamp(min=lowest) - 1
    return torch.ldexp(torch.ones_like(exact), exponent - MANTISSA_BITS[dtype])


def assert_same_bits(ours, expected):
    assert (ours.shape, ours.dtype, ours.is_contiguous()) == (expected.shape, expected.dtype, True)
    assert torch.equal(ours.view(torch.uint8), expected.contiguous().view(torch.uint8))


def assert_equals_the_reference(cast, weight, scale, block, dtype, **kwargs):
    expected = dequantize_fp8_reference(weight, scale, block_size=block, dtype=dtype)
    assert_same_bits(cast(weight, scale, block_size=block, dtype=dtype, **kwargs), expected)


@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", MANTISSA_BITS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("shape", "block"), [((576, 7168), (128, 128)), ((130, 200), (100, 96))])
def test_within_half_an_ulp_of_float64(shape, block, seed, dtype, fp8):
    """Scales low enough for subnormal results. Rounding to fp32 first may add half an ulp of fp32."""
    weight, scale = make_weight(shape, fp8, seed=seed), make_scale(grid_of(shape, block), low=-130, high=-5, seed=seed)
    exact = weight.double() * spread(scale.double(), shape, block)
    tolerance = 0.5 * ulp(exact, dtype) + (0.5 * ulp(exact, torch.float32) if dtype != torch.float32 else 0)
    for run in (dequantize_fp8, dequantize_fp8_reference):
        out = run(weight, scale, block_size=block, dtype=dtype)
        assert ((out.double() - exact).abs() <= tolerance).all()


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize(("shape", "block"), CASES)
def test_cpu_path_equals_the_reference(shape, block, finite):
    dtypes = list(product([E4M3, E5M2], SCALE_DTYPES, DTYPES))
    for fp8, scale_dtype, dtype in dtypes[:: 5 if shape == (576, 7168) else 1]:
        scale = make_scale(grid_of(shape, block), scale_dtype)
        assert_equals_the_reference(dequantize_fp8, make_weight(shape, fp8, finite=finite), scale, block, dtype)


@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize("portable", [True, False])
@pytest.mark.parametrize(("shape", "block"), KERNEL_CASES)
def test_kernel_equals_the_reference(kernels, shape, block, portable, fp8):
    """Dtypes take turns; a test below has all. The interpreter's own FP8 conversion knows no NaN and no infinity."""
    turn, weight = KERNEL_CASES.index((shape, block)), make_weight(shape, fp8, finite=not portable)
    scale = make_scale(grid_of(shape, block), SCALE_DTYPES[turn % 4])
    run, dtype = kernels.dequantize_fp8_tiled, DTYPES[turn % 3]
    assert_equals_the_reference(run, weight, scale, block, dtype, portable=portable)


def decode(byte, exponent_bits, bias):
    """The value of an FP8 byte, from its sign, exponent and mantissa."""
    sign, unit = 1 - 2 * (byte >> 7), 1 << 7 - exponent_bits
    exponent, mantissa = (byte & 0x7F) // unit, byte % unit
    if byte & 0x7F == 0x7F or exponent == 31:
        return math.nan if mantissa else sign * math.inf
    return sign * (mantissa / unit + (exponent > 0)) * 2.0 ** (max(exponent, 1) - bias)


@pytest.mark.parametrize(("fp8", "exponent_bits", "bias"), [(E4M3, 4, 7), (E5M2, 5, 15)])
def test_all_bytes_are_decoded_as_the_formats_say(any_cast, fp8, exponent_bits, bias):
    weight = torch.arange(256, dtype=torch.uint8).view(fp8).view(16, 16)
    expected = torch.tensor([decode(byte, exponent_bits, bias) for byte in range(256)]).view(16, 16)
    rows = [any_cast(row[None], torch.ones(1, 1), dtype=torch.float32) for row in weight]  # most of them are finite
    for out in (torch.cat(rows), any_cast(weight, torch.ones(1, 1), dtype=torch.float32)):
        assert torch.equal(out.isnan(), expected.isnan())
        assert_same_bits(torch.where(out.isnan(), 0, out), torch.where(expected.isnan(), 0, expected))  # signs of 0 too


@pytest.mark.parametrize("dtype", NAN_BYTES)
def test_every_nan_has_one_bit_pattern(any_cast, dtype):
    """From the weight, the scale, and 0 times infinity; 129 at a time, since torch's vector loops have tails."""
    for byte, scale in ((0x7F, 1.0), (0xFF, 1.0), (0x38, -math.nan), (0, math.inf)):
        weight = torch.full((1, 129), byte, dtype=torch.uint8).view(E4M3)
        out = any_cast(weight, torch.full((1, 2), scale), dtype=dtype)
        assert out.view(torch.uint8).view(129, -1).unique(dim=0).tolist() == [NAN_BYTES[dtype]]


@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", NAN_BYTES)
def test_all_bytes_by_all_kinds_of_scales(cast, dtype, fp8):
    """Subnormal and huge scales, each beside ordinary ones; results that overflow, vanish or are not a number."""
    weight = torch.arange(256, dtype=torch.uint8).view(fp8).expand(4, 256)
    for value in (0, -0.0, -3, 2.0**-149, 2.0**-127, 2.0**118, 2.0**119, -(2.0**127), 3.4e38, math.inf, math.nan):
        scale = make_scale((2, 8))
        scale[1, 5] = value
        assert_equals_the_reference(cast, weight, scale, (2, 32), dtype)
    for scale_dtype in SCALE_DTYPES:
        assert_equals_the_reference(cast, weight, make_scale((2, 8), scale_dtype), (2, 32), dtype)
    assert cast(torch.full((1, 1), 448.0).to(E4M3), torch.full((1, 1), 3e38), dtype=dtype).item() == math.inf


def test_ue8m0_scales_are_powers_of_two(any_cast):
    codes = torch.arange(256, dtype=torch.uint8).view(E8M0)[:, None]
    out = any_cast(torch.ones(256, 1).to(E4M3), codes, block_size=(1, 1), dtype=torch.float32)[:, 0]
    assert out[:255].double().tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert out[255].isnan()


@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize("lead", [(2, 3), ()])
def test_any_strides(cast, lead, fp8):
    rows, columns, block = 129, 127, (32, 16)
    wide = make_weight((*lead, rows + 3, 2 * columns + 1), fp8)
    scale = make_scale(grid_of((*lead, rows, columns), block)[::-1]).permute(*range(len(lead) + 2)[::-1])
    for weight in (
        wide[..., 2:-1, 1 : columns + 1],
        wide[..., 3:, 1::2],
        make_weight((*lead, columns, rows), fp8).transpose(-2, -1),
        make_weight((*lead, 1, columns), fp8).expand(*lead, rows, columns),
        make_weight((rows, *lead, columns), fp8).movedim(0, -2),  # does not flatten without a copy
        make_weight((rows, columns), fp8).expand(*lead, rows, columns),
    ):
        expected = dequantize_fp8_reference(weight.contiguous(), scale.contiguous(), block_size=block)
        assert_same_bits(cast(weight, scale, block_size=block), expected)
        assert_same_bits(dequantize_fp8_reference(weight, scale, block_size=block), expected)


@pytest.mark.parametrize("shape", [(0, 128), (130, 0), (0, 0), (0, 3, 5), (2, 0, 5)])
def test_no_weights(any_cast, shape):
    grid = grid_of(shape, (128, 128))
    assert any_cast(make_weight(shape, E4M3), torch.ones(grid), dtype=torch.float16).shape == shape
    assert [tensor.shape for tensor in quantize_fp8(torch.empty(shape))] == [shape, grid]


def test_writes_to_out_and_nothing_else(cast):
    weight, scale = make_weight((2, 130, 200), E4M3), make_scale((2, 2, 2)).requires_grad_()
    around = torch.full((4, 130, 200), 7.0, dtype=torch.float16)
    out = around[1:3]
    assert cast(weight, scale, dtype=torch.float16, out=out) is out
    assert_same_bits(out, dequantize_fp8_reference(weight, scale, dtype=torch.float16))
    assert (around[[0, 3]] == 7).all() and not out.requires_grad


WEIGHT, SCALE = torch.zeros(576, 256, dtype=torch.uint8).view(E4M3), torch.ones(5, 2)
REFUSED = {
    r"weight of shape \(576, 256\) is torch.float32": dict(weight=WEIGHT.float()),
    r"2 or more dims.*\(256,\)": dict(weight=WEIGHT[0], scale_inv=SCALE[0]),
    r"\(4, 2\); a weight of shape \(576, 256\) in blocks of 128 x 128 needs \(5, 2\)": dict(scale_inv=SCALE[:4]),
    r"\(1, 5, 2\)": dict(scale_inv=SCALE[None]),
    r"in blocks of 64 x 128 needs \(9, 2\)": dict(block_size=(64, 128)),
    "scale_inv .* is torch.int32": dict(scale_inv=SCALE.int()),
    "scale_inv is on meta": dict(scale_inv=SCALE.to("meta")),
    r"both at least 1; got \(0, 128\)": dict(block_size=(0, 128)),
    "dtype is torch.float64": dict(dtype=torch.float64),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refuses(any_cast, message):
    with pytest.raises(ValueError, match=message):
        any_cast(**dict(weight=WEIGHT, scale_inv=SCALE) | REFUSED[message])


def test_refuses_out(cast):
    for message, out in (
        (r"\(576, 255\)", torch.empty(576, 255, dtype=torch.bfloat16)),
        ("torch.float32", torch.empty(576, 256)),
        ("on meta", torch.empty(576, 256, dtype=torch.bfloat16, device="meta")),
        (r"strides \(1, 576\)", torch.empty(256, 576, dtype=torch.bfloat16).T),
    ):
        with pytest.raises(ValueError, match=f"out has .*{message}"):
            cast(WEIGHT, SCALE, out=out)


@pytest.mark.parametrize("fp8", [E4M3, E5M2])
def test_ordinary_weights_take_the_fast_path(monkeypatch, fp8):
    monkeypatch.setattr(fp8_cast, "dequantize_fp8_reference", None)
    dequantize_fp8(make_weight((130, 200), fp8), make_scale((2, 2), low=-140, high=118))
    with pytest.raises(TypeError, match="not callable"):
        dequantize_fp8(make_weight((130, 200), fp8, finite=False), make_scale((2, 2)))


class LargestNewTensor(TorchDispatchMode):
    """The largest storage that an operation returns and did not get."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        storages = [leaf.untyped_storage() for leaf in tree_leaves(result) if torch.is_tensor(leaf)]
        self.bytes = max([self.bytes, *[new.nbytes() for new in storages if new.data_ptr() not in given]])
        return result


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("block", [(128, 128), (1, 128), (1000, 96)])
def test_memory_is_bounded_by_a_strip(block, finite, monkeypatch):
    monkeypatch.setattr(fp8_cast, "CPU_STRIP", 1 << 12)
    weight, scale = make_weight((2000, 200), E4M3, finite=finite), make_scale(grid_of((2000, 200), block))
    out = torch.empty(2000, 200, dtype=torch.bfloat16)
    with LargestNewTensor() as largest:
        dequantize_fp8(weight, scale, block_size=block, out=out)
    assert 0 < largest.bytes <= max(2 * (4 << 12), scale.nbytes)  # fp32; the slow path pads the scales to whole blocks
    assert_same_bits(out, dequantize_fp8_reference(weight, scale, block_size=block))


@pytest.mark.parametrize(("tile_rows", "tile_columns"), [(1, 1), (4, 2), (32, 512), (128, 128), (2, 256)])
def test_kernel_takes_any_tile(kernels, tile_rows, tile_columns):
    tile = dict(tile_rows=tile_rows, tile_columns=tile_columns, num_warps=8)
    weight, scale = make_weight((5, 70), E4M3), make_scale((1, 3))
    assert_equals_the_reference(kernels.dequantize_fp8_tiled, weight, scale, (128, 32), torch.bfloat16, **tile)
    with pytest.raises(ValueError, match="tile_rows must divide the 100 rows"):
        kernels.dequantize_fp8_tiled(weight, scale, block_size=(100, 32), tile_rows=8)


FAR_APART = [((2, 2, 2), (2**32, 8, 1)), ((2, 2, 2), (8, 2**32, 1)), ((2, 2, 5), (8, 16, 2**29))]


@pytest.mark.parametrize(("shape", "strides"), FAR_APART)
def test_kernel_offsets_have_64_bits(kernels, shape, strides):
    """Matrices, rows or columns gigabytes apart: only the weights are touched, and where 32 bits would lead."""
    codes = torch.empty(2**32 + 2**31 + 32, dtype=torch.uint8).as_strided(shape, strides, storage_offset=2**31)
    weight = codes.copy_(make_weight(shape, E5M2).view(torch.uint8)).view(E5M2)
    assert_equals_the_reference(kernels.dequantize_fp8_tiled, weight, make_scale((2, 1, 1)), (128, 128), torch.float32)


def test_tiles_fit_blocks_and_waste_few_columns(kernels):
    for shape, block, tile in (
        ((18432, 7168), (128, 128), (8, 1024)),
        ((576, 1536), (128, 128), (16, 512)),
        ((512, 576), (128, 128), (64, 128)),
        ((2048, 2048), (100, 96), (4, 1024)),
        ((3, 5), (1, 128), (1, 8)),
    ):
        assert kernels.choose_tile(*shape, block) == tile


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(256, 384), (130, 200), (1, 1)])
def test_one_block_per_program_equals_the_reference_where_finite(kernels, shape, dtype):
    weight, scale = make_weight(shape, E4M3), make_scale(grid_of(shape, (128, 128)))
    assert_equals_the_reference(kernels.dequantize_fp8_one_block_per_program, weight, scale, (128, 128), dtype)


def test_one_block_per_program_refuses_what_it_would_do_wrong(kernels):
    weight, scale = make_weight((130, 200), E4M3), make_scale((2, 2))
    with pytest.raises(ValueError, match="2-D, contiguous"):
        kernels.dequantize_fp8_one_block_per_program(weight[None], scale[None])
    with pytest.raises(ValueError, match="fp32"):
        kernels.dequantize_fp8_one_block_per_program(weight, scale.bfloat16())
    with pytest.raises(ValueError, match="powers of two"):
        kernels.dequantize_fp8_one_block_per_program(weight, make_scale((2, 3)), block_size=(100, 96))


def quantize_by_loop(weight, block, power_of_two_scales):
    """One block at a time, by the definition."""
    quantized, scale_inv = torch.empty(weight.shape, dtype=E4M3), torch.empty(grid_of(weight.shape, block))
    for *lead, i, j in product(*map(range, scale_inv.shape)):
        part = *lead, slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
        x = weight[part].float()
        scale = x.abs().max() / 448
        if power_of_two_scales:
            scale = torch.tensor(2.0 ** math.ceil(math.log2(scale.item())))
        quantized[part], scale_inv[(*lead, i, j)] = (x / scale).clamp(-448, 448).to(E4M3), scale
        assert power_of_two_scales or quantized[part].float().abs().max() == 448
    return quantized, scale_inv


def gaussian(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(0.02)


@pytest.mark.parametrize("power_of_two_scales", [False, True])
@pytest.mark.parametrize("dtype", MANTISSA_BITS)
@pytest.mark.parametrize(("shape", "block"), CASES)
def test_quantize_equals_the_loop(shape, block, dtype, power_of_two_scales, monkeypatch):
    monkeypatch.setattr(fp8_cast, "CPU_STRIP", 1 << 15)  # several strips
    weight = gaussian(shape[::-1]).permute(*range(len(shape))[::-1]).to(dtype)
    ours = quantize_fp8(weight, block_size=block, power_of_two_scales=power_of_two_scales)
    for tensor, expected in zip(ours, quantize_by_loop(weight, block, power_of_two_scales), strict=True):
        assert_same_bits(tensor, expected)


@pytest.mark.parametrize("power_of_two_scales", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
def test_round_trip_error(block, power_of_two_scales):
    """3 mantissa bits: 2**-4 of a weight, or scale times half of the smallest subnormal, 2**-9; fp32 rounds both."""
    weight = gaussian((130, 200))
    quantized, scale_inv = quantize_fp8(weight, block_size=block, power_of_two_scales=power_of_two_scales)
    back = dequantize_fp8(quantized, scale_inv, block_size=block, dtype=torch.float32)
    scale = spread(scale_inv, weight.shape, block)
    assert ((back - weight).abs() <= (1 + 2**-20) * torch.maximum(weight.abs() * 2**-4, scale * 2**-10)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_that_were_fp8_come_back_exactly(dtype):
    """4 bits times a power of two are exact in bf16, and a smaller power of two only has finer steps."""
    block, scale = (64, 32), make_scale((3, 7), E8M0)
    once = dequantize_fp8(make_weight((130, 200), E4M3), scale, block_size=block, dtype=dtype)
    quantized, scale_inv = quantize_fp8(once, block_size=block, power_of_two_scales=True)
    assert_same_bits(dequantize_fp8(quantized, scale_inv, block_size=block, dtype=dtype), once)
    assert (scale_inv <= scale.float()).all()


@pytest.mark.parametrize("power_of_two_scales", [False, True])
def test_blocks_of_zeros_and_of_tiny_weights(power_of_two_scales):
    weight, tiny = torch.zeros(4, 6), 2.0**-126
    weight[:2, 2:4], weight[2:, :2] = 1e-45, -3e-38  # subnormal; normal with a scale that would be subnormal
    quantized, scale_inv = quantize_fp8(weight, block_size=(2, 2), power_of_two_scales=power_of_two_scales)
    assert scale_inv.tolist() == [[1, tiny, 1], [tiny, 1, 1]]
    back = dequantize_fp8(quantized, scale_inv, block_size=(2, 2), dtype=torch.float32)
    assert (back - weight).abs().max() <= 3e-38 * 2**-4


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("power_of_two_scales", [False, True])
def test_quantize_refuses_what_is_not_finite(value, power_of_two_scales):
    weight = gaussian((2, 130, 200))
    weight[1, 129, 3] = value
    with pytest.raises(ValueError, match=r"NaN or infinity, first in block \(1, 1, 0\) of 128 x 128"):
        quantize_fp8(weight, power_of_two_scales=power_of_two_scales)


def test_quantize_refuses_other_dtypes_shapes_and_blocks():
    with pytest.raises(ValueError, match="weight is torch"):
        quantize_fp8(torch.zeros(4, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"2 or more dims.*\(4,\)"):
        quantize_fp8(torch.zeros(4))
    with pytest.raises(ValueError, match="at least 1"):
        quantize_fp8(torch.zeros(4, 4), block_size=(128, -1))
