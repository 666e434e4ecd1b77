"""The Triton kernel of `copy_matrices.py`."""

import torch
import triton
import triton.language as tl

BLOCK = 1024  # elements of a program


@triton.jit
def _copy_matrices(
    source, target, num_elements, num_columns,
    source_matrix, source_row, source_column, target_matrix, target_row, target_column, BLOCK: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column = (at // num_columns).to(tl.int64), at % num_columns
    mask = at < num_elements
    value = tl.load(source + matrix * source_matrix + row * source_row + column * source_column, mask=mask)
    to = target + matrix * target_matrix + row * target_row + column * target_column
    tl.store(to, value.to(target.dtype.element_ty), mask=mask)


def copy_matrices_triton(source_LNK: torch.Tensor, target_LNK: torch.Tensor) -> None:
    num_matrices, num_rows, num_columns = source_LNK.shape
    grid = (triton.cdiv(num_rows * num_columns, BLOCK), num_matrices)
    _copy_matrices[grid](
        source_LNK, target_LNK, num_rows * num_columns, num_columns, *source_LNK.stride(), *target_LNK.stride(),
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
