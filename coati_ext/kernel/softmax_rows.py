"""The softmax of rows of logits, in the two passes that a loss needs: its sums, and the gradient of the logits.

Legend: C rows of a chunk, V vocabulary, or the slice of it that is here.
"""

from dataclasses import dataclass

import torch

from coati_ext.kernel.moe_rows import on_triton


@dataclass(frozen=True, kw_only=True)
class SoftmaxSums:
    """What is summed over the words of each row.

    max_C: the largest logit.
    sum_C: of exp(logit - max).
    target_C: the logit of the target; 0 where the target is not among the words.
    weighted_C: sum of exp(logit - max) (logit - max), 0 where that exp is 0; None unless asked for.
    """

    max_C: torch.Tensor
    sum_C: torch.Tensor
    target_C: torch.Tensor
    weighted_C: torch.Tensor | None


def softmax_sums(logits_CV: torch.Tensor, targets_C: torch.Tensor, *, weighted: bool) -> SoftmaxSums:
    """One pass over contiguous fp32 logits by Triton on a GPU of NVIDIA; else, and in fp64, several by torch."""
    if _has_kernels(logits_CV):
        from coati_ext.kernel.softmax_rows_triton import softmax_sums_triton

        return SoftmaxSums(**softmax_sums_triton(logits_CV, targets_C, weighted))
    max_C = logits_CV.amax(-1)
    below_CV = logits_CV - max_C[:, None]
    weights_CV = below_CV.exp() if weighted else below_CV.exp_()
    here_C = _is_here(targets_C, logits_CV)
    target_C = logits_CV.gather(-1, targets_C.where(here_C, 0)[:, None]).squeeze(-1)
    return SoftmaxSums(
        max_C=max_C,
        sum_C=weights_CV.sum(-1),
        target_C=target_C.where(here_C, 0),
        weighted_C=below_CV.masked_fill_(weights_CV == 0, 0).mul_(weights_CV).sum(-1) if weighted else None,
    )


def softmax_gradient(
    logits_CV: torch.Tensor,
    max_C: torch.Tensor,
    log_sum_C: torch.Tensor,
    targets_C: torch.Tensor,
    grad_C: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """(C, V): grad · (1 at the target - exp(logit - max - log_sum)), in `dtype`. May overwrite the logits."""
    if _has_kernels(logits_CV):
        from coati_ext.kernel.softmax_rows_triton import softmax_gradient_triton

        return softmax_gradient_triton(logits_CV, max_C, log_sum_C, targets_C, grad_C, dtype)
    grad_CV = logits_CV.sub_(max_C[:, None]).sub_(log_sum_C[:, None]).exp_().mul_(-grad_C[:, None])
    here_C = _is_here(targets_C, logits_CV)
    grad_CV.scatter_add_(-1, targets_C.where(here_C, 0)[:, None], grad_C.where(here_C, 0)[:, None])
    return grad_CV.to(dtype)


def _has_kernels(logits_CV: torch.Tensor) -> bool:
    return logits_CV.dtype == torch.float32 and logits_CV.numel() > 0 and on_triton(logits_CV.device)


def _is_here(targets_C: torch.Tensor, logits_CV: torch.Tensor) -> torch.Tensor:
    return (targets_C >= 0) & (targets_C < logits_CV.shape[-1])
