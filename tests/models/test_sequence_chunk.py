"""Cutting a batch into the chunks of a sequence-parallel group."""

import copy

import pytest
import torch

from coati_ext.models.sequence_parallel import sequence_chunk


def rows(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 96, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def test_chunks_put_together_are_the_batch_and_its_next_tokens():
    batch = rows((10, 4))
    before = copy.deepcopy(batch)
    parts = [sequence_chunk(batch, rank, 4) for rank in range(4)]
    assert all(torch.equal(batch[name], before[name]) for name in batch)
    joined = {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}
    assert all(value.shape == (2, 12) for value in joined.values())
    assert torch.equal(joined["input_ids"][:, :10], batch["input_ids"])
    assert torch.equal(joined["attention_mask"][:, :10], batch["attention_mask"])
    assert torch.equal(joined["position_ids"], torch.arange(12).expand(2, -1))
    assert torch.equal(joined["targets"][:, :9], batch["labels"][:, 1:])
    assert (joined["targets"][:, 9:] == -100).all() and not joined["attention_mask"][:, 10:].any()


def test_positions_that_count_up_are_taken_and_padding_may_have_any():
    batch = {**rows((5, 3)), "position_ids": torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 1, 1]])}
    assert torch.equal(sequence_chunk(batch, 1, 2)["position_ids"], torch.tensor([[3, 4, 5]] * 2))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_tokens": torch.tensor([5])}, "packed rows"),
        ({"token_type_ids": torch.zeros(1, 5)}, "'token_type_ids'"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}, "padded on the right"),
        ({"position_ids": torch.tensor([[0, 1, 2, 0, 1]])}, "packed rows"),
        ({"position_ids": torch.arange(5)}, "position_ids has shape (5,)"),
        ({"attention_mask": torch.ones(1, 1, 5, 5)}, "attention_mask has shape (1, 1, 5, 5)"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_rows_that_cannot_be_cut_are_refused(change, words):
    with pytest.raises(ValueError) as error:
        sequence_chunk({**rows((5,)), **change}, 0, 2)
    assert words in str(error.value)
