"""From losses of tokens to the loss of an optimizer step. B sequences, A actions (completion tokens).

The denominators are counted over the whole step, all micro-batches and data-parallel ranks, before the first backward
pass. Each micro-batch then adds its share, and no split changes the sum. A mean over each micro-batch that is averaged
afterwards gives the tokens of short completions more weight, and another learning rate for each micro-batch size.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Denominators:
    """What the loss of one optimizer step is divided by.

    A sequence without a token in the loss is no sequence here: it adds nothing and is left out of the count.

    Example:
        >>> masks = [torch.tensor([[1, 1, 0], [0, 0, 0]]), torch.tensor([[1, 1, 1]])]
        >>> Denominators.of(masks).counts.tolist()
        [5, 2]
    """

    counts: torch.Tensor
    """(2,) int64, tokens and sequences: sum it over the data-parallel group in place, `dist.all_reduce(d.counts, ...)`.
    Where the plugin averages gradients over that group, multiply the loss by its size."""

    @classmethod
    def of(cls, masks: Iterable[torch.Tensor]) -> "Denominators":
        """From the action masks (B, A) of all micro-batches of this rank, of which there is at least one."""
        counts = [torch.stack([mask.bool().sum(), mask.bool().any(-1).sum()]) for mask in masks]
        return cls(torch.stack(counts).sum(0))

    @property
    def num_tokens(self) -> torch.Tensor:
        return self.counts[0].clamp(min=1)

    @property
    def num_sequences(self) -> torch.Tensor:
        return self.counts[1].clamp(min=1)


def _token_mean(
    loss_BA: torch.Tensor, mask_BA: torch.Tensor, denominators: Denominators, max_length: int | None
) -> torch.Tensor:
    return loss_BA.sum() / denominators.num_tokens


def _seq_mean_token_mean(
    loss_BA: torch.Tensor, mask_BA: torch.Tensor, denominators: Denominators, max_length: int | None
) -> torch.Tensor:
    return (loss_BA.sum(-1) / mask_BA.sum(-1).clamp(min=1)).sum() / denominators.num_sequences


def _seq_mean_token_sum(
    loss_BA: torch.Tensor, mask_BA: torch.Tensor, denominators: Denominators, max_length: int | None
) -> torch.Tensor:
    return loss_BA.sum() / denominators.num_sequences


def _seq_mean_token_sum_norm(
    loss_BA: torch.Tensor, mask_BA: torch.Tensor, denominators: Denominators, max_length: int | None
) -> torch.Tensor:
    return loss_BA.sum() / (denominators.num_sequences * max_length)


NORMED_BY_LENGTH = "seq-mean-token-sum-norm"
AGGREGATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "token-mean": _token_mean,  # each token counts alike
    "seq-mean-token-mean": _seq_mean_token_mean,  # each sequence counts alike
    "seq-mean-token-sum": _seq_mean_token_sum,  # the log-probability of a whole sequence
    NORMED_BY_LENGTH: _seq_mean_token_sum_norm,  # the same over one constant length
}


def check_aggregation(kind: str, max_length: int | None) -> None:
    """
    Raises:
        ValueError: unknown, or seq-mean-token-sum-norm without a max_length of at least 1.
    """
    if kind not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation {kind!r}; known are {', '.join(AGGREGATIONS)}")
    if kind == NORMED_BY_LENGTH and (max_length is None or max_length < 1):
        raise ValueError(f"aggregation {kind} needs max_length, the longest completion allowed; got {max_length}")


def aggregate(
    loss_BA: torch.Tensor,
    mask_BA: torch.Tensor,
    kind: str,
    denominators: Denominators,
    max_length: int | None = None,
) -> torch.Tensor:
    """This micro-batch's share of the loss: the shares of all micro-batches and ranks add up to the whole.

    Args:
        loss_BA: anything, even NaN, where the mask is false.
        kind: one of `AGGREGATIONS`.
        max_length: the constant of seq-mean-token-sum-norm; others take no notice.

    Returns:
        A scalar; 0 with zero gradients if the mask is false everywhere.

    Raises:
        ValueError: as `check_aggregation`.

    Example:
        >>> mask = torch.arange(6) < torch.tensor([[2], [6]])  # completions of 2 and 6 tokens
        >>> loss = torch.tensor([[1.0], [3.0]]).expand(2, 6)
        >>> aggregate(loss, mask, "token-mean", Denominators.of([mask])).item()
        2.5
        >>> aggregate(loss, mask, "seq-mean-token-mean", Denominators.of([mask])).item()
        2.0
    """
    check_aggregation(kind, max_length)
    mask_BA = mask_BA.bool()
    return AGGREGATIONS[kind](loss_BA.where(mask_BA, 0), mask_BA, denominators, max_length)
