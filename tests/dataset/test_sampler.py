"""EpochBatchSampler: every sample once, the same steps on all ranks, the same global batches in any layout."""

import itertools

import pytest
from torch.utils.data import DataLoader

from coati_ext.dataset import ConversationCollator, EpochBatchSampler

SIZES = list(itertools.product((1, 2, 7, 16, 33), (1, 3, 4), (1, 2, 5), (True, False)))


def epoch(n, batch_size, dp_size, *, epoch=0, seed=0, **kwargs):
    """batches[rank][step]"""
    ranks = []
    for rank in range(dp_size):
        sampler = EpochBatchSampler(n, batch_size, rank, dp_size, seed, **kwargs)
        sampler.set_epoch(epoch)
        ranks.append(list(sampler))
        assert len(ranks[-1]) == len(sampler)
    return ranks


@pytest.mark.parametrize(("n", "batch_size", "dp_size", "shuffle"), SIZES)
def test_each_epoch_has_every_sample_once_in_equally_many_batches(n, batch_size, dp_size, shuffle):
    for number in range(3):
        ranks = epoch(n, batch_size, dp_size, epoch=number, shuffle=shuffle)
        assert {len(batches) for batches in ranks} == {-(-n // (batch_size * dp_size))}
        assert sorted(i for batches in ranks for batch in batches for i in batch) == list(range(n))
        assert all(len(batch) == batch_size for batches in ranks for batch in batches[:-1])


@pytest.mark.parametrize(("n", "global_batch"), [(33, 4), (40, 4), (3, 4), (101, 12)])
def test_global_batches_depend_on_batch_size_times_dp_size_only(n, global_batch):
    steps = None
    for dp_size in (d for d in range(1, global_batch + 1) if global_batch % d == 0):
        ranks = epoch(n, global_batch // dp_size, dp_size, seed=3, epoch=2)
        joined = [[i for batch in step for i in batch] for step in zip(*ranks, strict=True)]
        assert steps is None or joined == steps
        steps = joined


def test_ranks_that_run_out_get_short_and_empty_batches():
    assert epoch(5, 2, 3, shuffle=False) == [[[0, 1]], [[2, 3]], [[4]]]
    assert epoch(1, 2, 3, shuffle=False) == [[[0]], [[]], [[]]]


def test_drop_last_keeps_full_global_batches_only():
    assert epoch(11, 2, 2, shuffle=False, drop_last=True) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_drop_last_that_leaves_no_batch_is_refused():
    with pytest.raises(ValueError, match=r"drop_last leaves no batch: 3 samples, and a global batch takes 4"):
        EpochBatchSampler(3, 2, 0, 2, 0, drop_last=True)


def test_the_order_depends_on_seed_and_epoch_and_repeats():
    orders = {(s, e): tuple(epoch(50, 50, 1, seed=s, epoch=e)[0][0]) for s in range(3) for e in range(3)}
    assert len(set(orders.values())) == 9
    assert orders[1, 2] == tuple(epoch(50, 50, 1, seed=1, epoch=2)[0][0])
    assert orders[0, 0] != tuple(range(50))


def test_start_batch_resumes_the_epoch_and_leaves_its_length():
    sampler = EpochBatchSampler(23, 2, 1, 2, seed=5)
    sampler.set_epoch(4)
    whole = list(sampler)
    sampler.set_epoch(4, start_batch=3)
    assert list(sampler) == whole[3:]
    assert len(sampler) == len(whole)
    sampler.set_epoch(4)
    assert list(sampler) == whole


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((0, 1, 0, 1, 0), "num_samples is 0"),
        ((1, 0, 0, 1, 0), "batch_size is 0"),
        ((1, 1, 0, 0, 0), "dp_size is 0"),
        ((1, 1, 2, 2, 0), "dp_rank is 2; expected 0 to 1"),
    ],
)
def test_sizes_out_of_range_are_refused(args, message):
    with pytest.raises(ValueError, match=message):
        EpochBatchSampler(*args)


def test_start_batch_past_the_epoch_is_refused():
    with pytest.raises(ValueError, match="start_batch is 3; expected 0 to 2"):
        EpochBatchSampler(4, 2, 0, 1, 0).set_epoch(0, start_batch=3)


def test_a_data_loader_takes_an_empty_batch(tokenizer_for, write_jsonl):
    from coati_ext.dataset import RawConversationDataset

    tokenizer = tokenizer_for("chatml")
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello"}]
    data = RawConversationDataset(tokenizer, write_jsonl(chat), 512)
    shapes = []
    for rank in range(2):
        sampler = EpochBatchSampler(len(data), 1, rank, 2, seed=0)
        for workers in (0, 1):
            loader = DataLoader(
                data, batch_sampler=sampler, collate_fn=ConversationCollator(tokenizer), num_workers=workers
            )
            shapes += [tuple(batch["labels"].shape) for batch in loader]
    assert shapes == [(1, data.num_tokens)] * 2 + [(1, 1)] * 2
