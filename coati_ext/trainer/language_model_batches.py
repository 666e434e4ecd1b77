"""Batches of conversations for the language-model loss beside a policy loss (ColossalChat's PTX)."""

import torch
from torch.utils.data import Dataset

from coati_ext.dataset import ConversationCollator, EpochBatchSampler

Batch = dict[str, torch.Tensor]


class LanguageModelBatches:
    """Endless micro-batches by number, epoch after epoch, so that a position is a number and no state.

    Args:
        dataset: of {"input_ids", "labels"}.
        batch_size: conversations of this rank in a micro-batch.
    """

    def __init__(
        self, dataset: Dataset, collate: ConversationCollator, batch_size: int, *, dp_rank: int, dp_size: int, seed: int
    ) -> None:
        self._dataset, self._collate = dataset, collate
        self._sampler = EpochBatchSampler(len(dataset), batch_size, dp_rank, dp_size, seed=seed)

    def take(self, first: int, count: int, device: torch.device) -> list[Batch]:
        """The micro-batches [first, first + count) of this rank."""
        batches = [self._batch(number) for number in range(first, first + count)]
        return [{name: value.to(device) for name, value in batch.items()} for batch in batches]

    def _batch(self, number: int) -> Batch:
        epoch, position = divmod(number, len(self._sampler))
        self._sampler.set_epoch(epoch, position)
        return self._collate([self._dataset[index] for index in next(iter(self._sampler))])
