"""Prompts of a data set, or of several, in the order of a `PromptSampler`."""

import hashlib
from collections.abc import Sequence
from typing import Any

from torch.utils.data import ConcatDataset

from coati_ext.dataset.prompt_sampler import PromptSampler
from coati_ext.dataset.prompts import RawPromptDataset


class PromptLoader:
    """Endless: `next(n)` gives this rank's next `n` prompts, each with a `number` that no other prompt of the run has.

    Args:
        datasets: taken as one.
        num_prompts, dp_rank, dp_size, seed, shuffle: as in `PromptSampler`.

    Raises:
        ValueError: as `PromptSampler`.
    """

    def __init__(
        self,
        datasets: Sequence[RawPromptDataset],
        num_prompts: int,
        *,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self.dataset = ConcatDataset(datasets)
        self.sampler = PromptSampler(
            len(self.dataset),
            num_prompts,
            dp_rank=dp_rank,
            dp_size=dp_size,
            seed=seed,
            fingerprint=fingerprint_of(datasets),
            shuffle=shuffle,
        )

    def next(self, num_prompts: int | None = None) -> list[dict[str, Any]]:
        """Items of `RawPromptDataset` with "number", their position in the order over all ranks.

        Every rank must ask for the same number of prompts; default: that of the constructor.
        """
        sampler = self.sampler
        count = sampler.num_prompts if num_prompts is None else num_prompts
        first = sampler.position + sampler.dp_rank * count
        return [
            {**self.dataset[index], "number": first + offset}
            for offset, index in enumerate(sampler.next_indices(count))
        ]


def fingerprint_of(datasets: Sequence[RawPromptDataset]) -> str:
    """sha256 over those of the data sets, in order; that of the only one."""
    found = [dataset.fingerprint() for dataset in datasets]
    return found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()
