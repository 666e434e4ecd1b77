"""The Triton kernel of `copy_matrices.py`."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

BLOCK = 1024  # elements of a program


@triton.jit
def _copy_matrices(sources, targets, sizes, source_strides, target_strides, BLOCK: tl.constexpr):
    """The arguments are tuples with an item for each copy; sizes has elements of a matrix, and its columns."""
    for i in tl.static_range(len(sources)):
        if tl.program_id(2) == i:
            _copy(sources[i], targets[i], sizes[i], source_strides[i], target_strides[i], BLOCK)


@triton.jit
def _copy(source, target, size, source_strides, target_strides, BLOCK: tl.constexpr):
    matrix = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column = (at // size[1]).to(tl.int64), (at % size[1]).to(tl.int64)
    mask = at < size[0]
    from_here = source + matrix * source_strides[0] + row * source_strides[1] + column * source_strides[2]
    to = target + matrix * target_strides[0] + row * target_strides[1] + column * target_strides[2]
    tl.store(to, tl.load(from_here, mask=mask).to(target.dtype.element_ty), mask=mask)


def copy_matrices_triton(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    sources, targets = zip(*copies, strict=True)
    sizes = tuple((source.shape[1] * source.shape[2], source.shape[2]) for source in sources)
    grid = (triton.cdiv(max(size for size, _ in sizes), BLOCK), sources[0].shape[0], len(copies))
    strides = (tuple(tensor.stride() for tensor in tensors) for tensors in (sources, targets))
    _copy_matrices[grid](sources, targets, sizes, *strides, BLOCK=BLOCK, num_warps=4)
