"""Routed rows by expert: torch's sort and the interpreted kernels, against what sorting means."""

import pytest
import torch
from interpreted import interpreted

from coati_ext.kernel import sort_rows as module
from coati_ext.kernel.sort_rows import sort_rows

CHUNK = 8  # few rows, for the interpreter


@pytest.fixture(params=["torch", "triton"])
def path(request, monkeypatch):
    if request.param == "triton":
        kernels = interpreted("sort_rows_triton")
        monkeypatch.setattr(module, "on_triton", lambda device: True)
        monkeypatch.setitem(__import__("sys").modules, "coati_ext.kernel.sort_rows_triton", kernels)
        monkeypatch.setattr(kernels, "CHUNK", CHUNK)
        monkeypatch.setattr(kernels, "LANES", 4)
        monkeypatch.setattr(kernels, "CHUNKS", 2)
    return request.param


# Less than a chunk, exactly some, and more; few experts, a power of two, and more experts than rows.
@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 1), (4, 2), (13, 3), (0, 2)])
@pytest.mark.parametrize("num_experts", [1, 5, 8, 70])
def test_rows_are_in_the_order_of_experts_and_then_of_tokens(path, num_tokens, top_k, num_experts):
    generator = torch.Generator().manual_seed(num_tokens)
    index = torch.randint(num_experts, (num_tokens, top_k), generator=generator)
    if num_experts == 5:
        index[index == 2] = 3  # an expert without rows
    rows = sort_rows(index, num_experts)
    flat = index.flatten().tolist()
    order = sorted(range(len(flat)), key=lambda n: flat[n])  # stable
    assert rows.order_N.tolist() == order
    assert rows.token_N.tolist() == [n // top_k for n in order]
    counts = [flat.count(e) for e in range(num_experts)]
    assert rows.counts_E.tolist() == counts and rows.counts_E.dtype == torch.int64
    assert rows.ends_E.tolist() == torch.tensor(counts).cumsum(0).tolist() and rows.ends_E.dtype == torch.int32
    assert rows.position_TK.shape == index.shape
    assert [order[place] for place in rows.position_TK.flatten().tolist()] == list(range(len(flat)))


def test_a_view_of_other_strides(path):
    index = torch.randint(6, (3, 10)).t()
    assert torch.equal(sort_rows(index, 6).order_N, index.flatten().sort(stable=True).indices)
