"""The Triton kernels of `sort_rows.py`: a counting sort, stable and the same in every run.

Legend: N routed rows, E experts, B chunks of rows. Counts are integers, whose atomic sums know no order.
"""

import torch
import triton
import triton.language as tl

CHUNK = 512  # rows of a program
LANES = 32  # of them at a time, beside all others
CHUNKS = 1024  # that a program adds up at a time


@triton.jit
def _count_rows(index, counts_BE, total_E, num_rows, num_experts, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """How many rows of each expert a chunk has. (EXPERTS is above the number of experts: the last has what is beyond
    the rows.)"""
    chunk = tl.program_id(0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(index + at, mask=at < num_rows, other=EXPERTS - 1).to(tl.int32)
    found = tl.histogram(expert, EXPERTS)
    e = tl.arange(0, EXPERTS)
    tl.store(counts_BE + chunk * num_experts + e, found, mask=e < num_experts)
    tl.atomic_add(total_E + e, found.to(tl.int64), mask=(e < num_experts) & (found > 0))


@triton.jit
def _first_rows(
    counts_BE, total_E, ends_E, num_chunks, num_experts, EXPERTS: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """Of one expert: where the rows of each chunk begin, in place of their numbers, and where the last ends."""
    expert = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    before = tl.load(total_E + e, mask=e < expert, other=0)
    first = tl.sum(before, 0).to(tl.int32)
    for start in range(0, num_chunks, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        to = counts_BE + chunk * num_experts + expert
        count = tl.load(to, mask=chunk < num_chunks, other=0)
        tl.store(to, first + tl.cumsum(count, 0) - count, mask=chunk < num_chunks)
        first += tl.sum(count, 0)
    tl.store(ends_E + expert, first)


@triton.jit
def _place_rows(
    index, first_BE, order, token, position, num_rows, num_experts, top_k, CHUNK: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """A row comes behind the rows of its expert that are before it in its chunk."""
    chunk = tl.program_id(0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = at < num_rows
    expert = tl.load(index + at, mask=mask, other=-1).to(tl.int32)
    place = tl.load(first_BE + chunk * num_experts + expert, mask=mask, other=0)
    for start in range(0, CHUNK, LANES):
        other_at = chunk * CHUNK + start + tl.arange(0, LANES)
        other = tl.load(index + other_at, mask=other_at < num_rows, other=-1).to(tl.int32)
        earlier = (other[None, :] == expert[:, None]) & (other_at[None, :] < at[:, None])
        place += tl.sum(earlier.to(tl.int32), 1)
    tl.store(position + at, place.to(tl.int64), mask=mask)
    tl.store(order + place, at.to(tl.int64), mask=mask)
    tl.store(token + place, (at // top_k).to(tl.int64), mask=mask)


def sort_rows_triton(top_k_index_TK: torch.Tensor, num_experts: int) -> dict[str, torch.Tensor]:
    index_TK, num_rows = top_k_index_TK.contiguous(), top_k_index_TK.numel()
    num_chunks = triton.cdiv(num_rows, CHUNK)
    order_N, token_N, position_N = index_TK.new_empty(3, num_rows, dtype=torch.int64)
    first_BE = index_TK.new_empty(num_chunks, num_experts, dtype=torch.int32)
    counts_E = index_TK.new_zeros(num_experts, dtype=torch.int64)
    ends_E = index_TK.new_empty(num_experts, dtype=torch.int32)
    experts = triton.next_power_of_2(num_experts + 1)
    _count_rows[(num_chunks,)](
        index_TK, first_BE, counts_E, num_rows, num_experts, EXPERTS=experts, CHUNK=CHUNK, num_warps=4
    )
    chunks = min(CHUNKS, triton.next_power_of_2(num_chunks))
    _first_rows[(num_experts,)](
        first_BE, counts_E, ends_E, num_chunks, num_experts, EXPERTS=experts, CHUNKS=chunks, num_warps=4
    )
    _place_rows[(num_chunks,)](
        index_TK, first_BE, order_N, token_N, position_N, num_rows, num_experts, index_TK.shape[-1],
        CHUNK=CHUNK, LANES=LANES, num_warps=4,
    )  # fmt: skip
    position_TK = position_N.view_as(index_TK)
    return {"order_N": order_N, "token_N": token_N, "position_TK": position_TK, "counts_E": counts_E, "ends_E": ends_E}
