"""Copies of small matrices into places in large ones."""

from collections.abc import Sequence

import torch

from coati_ext.kernel.moe_rows import has_kernels


def copy_matrices(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """`target.copy_(source)` of each (source, target), all (L, N, K) of any strides, in one launch.

    torch's copy counts offsets in 32 bits: into a view of a buffer of many GB it takes dozens of launches.
    """
    if all(has_kernels(target) for _, target in copies):
        from coati_ext.kernel.copy_matrices_triton import copy_matrices_triton

        copy_matrices_triton(copies)
        return
    for source_LNK, target_LNK in copies:
        target_LNK.copy_(source_LNK)
