"""pack_rows and PackedCollator: which samples go into which row, and what is in a batch."""

import random

import pytest
import torch
from packed_samples import LENGTHS, MAX_LENGTH, make_samples, pieces

from coati_ext.dataset.collator import ConversationCollator
from coati_ext.dataset.packing import PackedCollator, model_inputs, num_real_tokens, pack_rows
from coati_ext.models.loss import num_supervised_tokens


def first_fit_decreasing(lengths: list[int], width: int) -> int:
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [i for i, left in enumerate(free) if left >= length]
        if fits:
            free[fits[0]] -= length
        else:
            free.append(width - length)
    return len(free)


def fewest_rows(lengths: list[int], width: int) -> int:
    """Over all orders, by depth-first search."""
    best = len(lengths)

    def place(index: int, free: tuple[int, ...]) -> None:
        nonlocal best
        if len(free) >= best:
            return
        if index == len(lengths):
            best = len(free)
            return
        for row in range(len(free)):
            if free[row] >= lengths[index]:
                place(index + 1, (*free[:row], free[row] - lengths[index], *free[row + 1 :]))
        place(index + 1, (*free, width - lengths[index]))

    place(0, ())
    return best


@pytest.mark.parametrize("seed", range(200))
def test_rows_hold_every_sample_once_within_the_bounds(seed):
    rnd = random.Random(seed)
    width = rnd.randint(1, 40)
    lengths = [rnd.randint(1, width) for _ in range(rnd.randint(1, 8))]
    rows = pack_rows(lengths, width)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(1 <= sum(lengths[index] for index in row) <= width for row in rows)
    assert len(rows) <= first_fit_decreasing(lengths, width)
    assert 9 * len(rows) <= 11 * fewest_rows(lengths, width) + 6
    assert rows == pack_rows(list(lengths), width)


def test_rows_are_as_narrow_as_their_number_allows():
    # First-fit decreasing within 100 gives rows of 95 and 20: 75 tokens of padding.
    lengths = [50, 25, 20, 20]
    rows = pack_rows(lengths, 100)
    assert sorted(sum(lengths[index] for index in row) for row in rows) == [50, 65]


def test_no_sample_gives_no_row():
    assert pack_rows([], 8) == []


@pytest.mark.parametrize("single_row", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_a_batch_holds_each_sample_whole_and_in_order(seed, single_row):
    rnd = random.Random(seed)
    samples = make_samples([rnd.randint(1, MAX_LENGTH) for _ in range(rnd.randint(1, 12))])
    batch = PackedCollator(0, MAX_LENGTH, single_row=single_row)(samples)

    def labels_but_first(sample):
        return [-100, *sample["labels"][1:].tolist()]

    wanted = sorted((sample["input_ids"].tolist(), labels_but_first(sample)) for sample in samples)
    ids, labels, positions = (pieces(batch, key) for key in ("input_ids", "labels", "position_ids"))
    assert sorted((a.tolist(), b.tolist()) for a, b in zip(ids, labels, strict=True)) == wanted
    assert all(piece.tolist() == list(range(len(piece))) for piece in positions)
    assert batch["input_ids"].shape[0] == (1 if single_row else len(pack_rows([len(i) for i in ids], MAX_LENGTH)))
    assert single_row or batch["input_ids"].shape[1] <= MAX_LENGTH


def test_a_batch_to_the_letter():
    samples = [
        {"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)} for ids in ([1, 2, 3], [4], [5, 6, 7, 8, 9])
    ]
    batch = PackedCollator(0, 6, pad_to_multiple_of=4)(samples)
    assert {key: value.tolist() for key, value in batch.items()} == {
        "input_ids": [[5, 6, 7, 8, 9, 0, 0, 0], [1, 2, 3, 4, 0, 0, 0, 0]],
        "position_ids": [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 0, 0, 1, 2, 3]],
        "labels": [[-100, 6, 7, 8, 9, -100, -100, -100], [-100, 2, 3, -100, -100, -100, -100, -100]],
        "num_tokens": [5, 4],
    }
    assert all(value.dtype == torch.int64 for value in batch.values())


def test_padding_reaches_no_position_that_no_sample_has():
    batch = PackedCollator(0, 8, pad_to_multiple_of=16)(make_samples([3, 2]))
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1]]


@pytest.mark.parametrize("multiple", [1, 8])
def test_an_empty_batch_is_one_unsupervised_token(multiple):
    batch = PackedCollator(9, 4, pad_to_multiple_of=multiple)([])
    assert {key: tuple(batch[key].shape) for key in ("input_ids", "position_ids", "labels")} == dict.fromkeys(
        ("input_ids", "position_ids", "labels"), (1, multiple)
    )
    assert batch["input_ids"].unique().tolist() == [9] and batch["labels"].unique().tolist() == [-100]
    assert int(num_real_tokens(batch)) == 1


def test_counts_are_those_of_the_unpacked_batch():
    samples = make_samples()
    packed, unpacked = PackedCollator(0, MAX_LENGTH)(samples), ConversationCollator(0)(samples)
    assert int(num_real_tokens(packed)) == int(num_real_tokens(unpacked)) == sum(LENGTHS)
    assert int(num_supervised_tokens(packed["labels"])) == int(num_supervised_tokens(unpacked["labels"]))
    assert set(model_inputs(packed)) == {"input_ids", "position_ids"}
    assert set(model_inputs(unpacked)) == {"input_ids", "attention_mask"}


@pytest.mark.parametrize("length", [0, 5])
def test_a_sample_out_of_range_is_refused(length):
    with pytest.raises(ValueError, match=rf"sample 1 of the micro-batch has {length} tokens; .* max_length 4"):
        PackedCollator(0, 4)(make_samples([4, length]))


def test_a_max_length_below_one_is_refused():
    with pytest.raises(ValueError, match="max_length is 0; expected at least 1"):
        PackedCollator(0, 0)
