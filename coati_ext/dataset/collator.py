"""Samples of unequal length -> one right-padded batch. B: batch, S: longest sample, rounded up."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORE_INDEX = -100


class ConversationCollator:
    """Pads on the right with the pad token; attention mask and labels come from lengths, never from token values.

    So a pad token equal to the end-of-turn token does no harm, and `pad_token_id` None falls back to the tokenizer's
    eos token (to id 0 when it has none either).

    An EMPTY list of samples gives one unsupervised token (input_ids pad, attention_mask 1, label -100): the rank takes
    part in the step and adds nothing to the loss. See `EpochBatchSampler`.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | int", *, pad_to_multiple_of: int = 1) -> None:
        """`tokenizer`: a tokenizer, or the pad token's id."""
        if pad_to_multiple_of < 1:
            raise ValueError(f"pad_to_multiple_of is {pad_to_multiple_of}; expected at least 1")
        if isinstance(tokenizer, int):
            pad_token_id: int | None = tokenizer
        else:
            pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.pad_token_id = 0 if pad_token_id is None else pad_token_id
        self.pad_to_multiple_of = pad_to_multiple_of

    def __call__(self, samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Samples {"input_ids", "labels"}, each (S_i,) -> {"input_ids", "attention_mask", "labels"}, (B, S), int64."""
        longest = max((len(sample["input_ids"]) for sample in samples), default=1)
        shape_BS = (max(len(samples), 1), -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of)
        input_ids_BS = torch.full(shape_BS, self.pad_token_id, dtype=torch.long)
        attention_mask_BS = torch.zeros(shape_BS, dtype=torch.long)
        labels_BS = torch.full(shape_BS, IGNORE_INDEX, dtype=torch.long)
        for row, sample in enumerate(samples):
            length = len(sample["input_ids"])
            input_ids_BS[row, :length] = sample["input_ids"]
            attention_mask_BS[row, :length] = 1
            labels_BS[row, :length] = sample["labels"]
        if not samples:
            attention_mask_BS[0, 0] = 1
        return {"input_ids": input_ids_BS, "attention_mask": attention_mask_BS, "labels": labels_BS}


def split_rows(batch: dict[str, torch.Tensor], size: int) -> list[dict[str, torch.Tensor]]:
    """The batch as batches of at most `size` rows.

    Example:
        >>> [part["x"].tolist() for part in split_rows({"x": torch.tensor([[1], [2], [3]])}, 2)]
        [[[1], [2]], [[3]]]
    """
    num_rows = len(next(iter(batch.values())))
    return [{key: value[i : i + size] for key, value in batch.items()} for i in range(0, num_rows, size)]
