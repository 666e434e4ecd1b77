"""Copies of small matrices into places in large ones."""

import torch

from coati_ext.kernel.moe_rows import has_kernels


def copy_matrices(source_LNK: torch.Tensor, target_LNK: torch.Tensor) -> None:
    """`target.copy_(source)` for tensors of any strides, in one launch.

    torch's copy counts offsets in 32 bits: into a view of a buffer of many GB it takes dozens of launches.
    """
    if has_kernels(target_LNK):
        from coati_ext.kernel.copy_matrices_triton import copy_matrices_triton

        copy_matrices_triton(source_LNK, target_LNK)
    else:
        target_LNK.copy_(source_LNK)
