"""Token-level losses. B batch, S sequence, V vocabulary."""

import torch
import torch.nn.functional as F
from torch import nn

IGNORE_INDEX = -100


def num_supervised_tokens(labels_BS: torch.Tensor, *, shifted: bool = False) -> torch.Tensor:
    """How many next-token predictions these labels ask for (0-dim int64): no position predicts the first token.

    Args:
        shifted: the label of each position is its next token's already, as `sequence_chunk` makes them.
    """
    return ((labels_BS if shifted else labels_BS[:, 1:]) != IGNORE_INDEX).sum()


class GPTLMLoss(nn.Module):
    """Next-token cross-entropy, summed in fp32 over the supervised tokens and divided by one given denominator.

    The denominator is what makes accumulation, ranks and micro-batches right: it is the number of supervised tokens of
    the whole optimizer step. Without it the loss is the mean over this batch, 0 if nothing is supervised.
    """

    def forward(
        self,
        logits_BSV: torch.Tensor,
        labels_BS: torch.Tensor,
        num_tokens: torch.Tensor | float | None = None,
        *,
        shifted: bool = False,
    ) -> torch.Tensor:
        """
        Args:
            shifted: as in `num_supervised_tokens`; labels as data sets have them are shifted here.

        Example:
            >>> logits = torch.zeros(1, 3, 4)
            >>> round(GPTLMLoss()(logits, torch.tensor([[0, -100, 2]])).item(), 4)  # one supervised token: log 4
            1.3863
        """
        predicting_BSV, targets_BS = (logits_BSV, labels_BS) if shifted else (logits_BSV[:, :-1], labels_BS[:, 1:])
        total = F.cross_entropy(
            predicting_BSV.float().reshape(-1, predicting_BSV.shape[-1]),
            targets_BS.reshape(-1),
            ignore_index=IGNORE_INDEX,
            reduction="sum",
        )
        if num_tokens is None:
            num_tokens = num_supervised_tokens(labels_BS, shifted=shifted).clamp(min=1)
        return total / num_tokens
