"""Copies between matrices of any strides, by torch and by the interpreted Triton kernel."""

import pytest
import torch
from interpreted import interpreted

from coati_ext.kernel import copy_matrices as module


@pytest.mark.parametrize("path", ["torch", "triton"])
@pytest.mark.parametrize("shape", [(3, 70, 8), (2, 8, 1030), (1, 1, 1)])
@pytest.mark.parametrize("transposed", [False, True])
def test_only_the_place_is_filled(path, shape, transposed, monkeypatch):
    if path == "triton":
        kernels = interpreted("copy_matrices_triton")
        monkeypatch.setattr(module, "has_kernels", lambda tensor: True)
        monkeypatch.setitem(__import__("sys").modules, "coati_ext.kernel.copy_matrices_triton", kernels)
    other, place_of_other = torch.randn(shape[0], 2, 3), torch.zeros(shape[0], 2, 3)
    source = torch.randn(shape)
    buffer = torch.full((shape[0], shape[1] + 5, shape[2] + 3), -7.0)
    if transposed:
        buffer, source = buffer.transpose(1, 2).contiguous().transpose(1, 2), source.mT.contiguous().mT
    place = buffer[:, 2 : 2 + shape[1], 1 : 1 + shape[2]]
    module.copy_matrices([(source, place), (other, place_of_other)])
    assert torch.equal(place, source) and torch.equal(place_of_other, other)
    assert (buffer == -7).sum() == buffer.numel() - source.numel()
