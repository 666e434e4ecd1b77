"""The Triton kernels of `softmax_rows.py`: each reads the logits once.

Legend: C rows of a chunk, V vocabulary, or the slice of it that is here.
"""

import torch
import triton
import triton.language as tl

BLOCK = 4096  # words of a row at a time


@triton.jit
def _softmax_sums(
    logits, target_of, out_max, out_sum, out_target, out_weighted, num_words,
    WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of one row. Every lane keeps the sums of its own words, relative to the largest of them, until the end."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * num_words
    lanes = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_words, BLOCK):
        x = tl.load(logits + start + lanes, mask=start + lanes < num_words, other=float("-inf"))
        new = tl.maximum(top, x)
        base = tl.where(new == float("-inf"), 0.0, new)
        old, weight = tl.exp(top - base), tl.exp(x - base)
        if WEIGHTED:
            weighted = old * (weighted + total * tl.where(old > 0, top - base, 0.0))
            weighted += weight * tl.where(weight > 0, x - base, 0.0)
        total = total * old + weight
        top = new
    largest = tl.max(top, 0)
    shrink = tl.exp(top - largest)
    tl.store(out_max + row, largest)
    tl.store(out_sum + row, tl.sum(total * shrink, 0))
    if WEIGHTED:
        below = tl.where(shrink > 0, top - largest, 0.0)
        tl.store(out_weighted + row, tl.sum(shrink * (weighted + total * below), 0))
    target = tl.load(target_of + row)
    here = (target >= 0) & (target < num_words)
    tl.store(out_target + row, tl.load(logits + target, mask=here, other=0.0))


@triton.jit
def _softmax_gradient(logits, maxima, log_sums, target_of, grads, out, num_words, BLOCK: tl.constexpr):
    """Of some words of one row."""
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = word < num_words
    x = tl.load(logits + row * num_words + word, mask=mask, other=0.0)
    softmax = tl.exp(x - tl.load(maxima + row) - tl.load(log_sums + row))
    difference = tl.where(word == tl.load(target_of + row), 1.0, 0.0) - softmax
    tl.store(out + row * num_words + word, (difference * tl.load(grads + row)).to(out.dtype.element_ty), mask=mask)


def softmax_sums_triton(
    logits_CV: torch.Tensor, targets_C: torch.Tensor, weighted: bool
) -> dict[str, torch.Tensor | None]:
    logits_CV, (num_rows, num_words) = logits_CV.contiguous(), logits_CV.shape
    names = ("max_C", "sum_C", "target_C", "weighted_C")
    sums = dict(zip(names, logits_CV.new_empty(4, num_rows), strict=True))
    _softmax_sums[(num_rows,)](
        logits_CV, targets_C.contiguous(), *sums.values(), num_words, WEIGHTED=weighted, BLOCK=BLOCK, num_warps=8
    )
    return sums if weighted else {**sums, "weighted_C": None}


def softmax_gradient_triton(
    logits_CV: torch.Tensor,
    max_C: torch.Tensor,
    log_sum_C: torch.Tensor,
    targets_C: torch.Tensor,
    grad_C: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    logits_CV, (num_rows, num_words) = logits_CV.contiguous(), logits_CV.shape
    out_CV = torch.empty_like(logits_CV, dtype=dtype)
    rows = (max_C, log_sum_C, targets_C, grad_C)
    _softmax_gradient[(num_rows, triton.cdiv(num_words, BLOCK))](
        logits_CV, *(x.contiguous() for x in rows), out_CV, num_words, BLOCK=BLOCK, num_warps=8
    )
    return out_CV
