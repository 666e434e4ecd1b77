"""Samples to pack, and a packed batch taken apart again."""

import torch
from tiny_models import VOCAB

MAX_LENGTH = 12
# One sample as long as a row, samples of one token, a last row with padding, equal lengths.
LENGTHS = [5, 12, 1, 7, 3, 9, 2, 1, 3]


def make_samples(lengths: list[int] = LENGTHS) -> list[dict[str, torch.Tensor]]:
    """Every sample supervises its own first token, which nothing may be trained on, and not its second."""
    generator = torch.Generator().manual_seed(3)
    samples = []
    for length in lengths:
        ids = torch.randint(3, VOCAB, (length,), generator=generator)
        labels = ids.clone()
        labels[1:2] = -100
        samples.append({"input_ids": ids, "labels": labels})
    return samples


def pieces(batch: dict[str, torch.Tensor], key: str) -> list[torch.Tensor]:
    """The samples of a packed batch, by its positions and counts alone, in the order of its rows."""
    found = []
    for row, count in enumerate(batch["num_tokens"].tolist()):
        starts = (batch["position_ids"][row, :count] == 0).nonzero().flatten().tolist()
        found += [batch[key][row, a:b] for a, b in zip(starts, [*starts[1:], count], strict=True)]
    return found
