"""PromptSampler: equal shares, every prompt once an epoch, and a position that any layout can go on from."""

import itertools
import json

import pytest

from coati_ext.dataset import PromptSampler

SIZES = [case for case in itertools.product((5, 7, 16, 33), (1, 2, 3), (1, 2, 5)) if case[1] * case[2] <= case[0]]


def samplers(size, num_prompts, dp_size, **kwargs):
    kwargs = {"seed": 3, "fingerprint": "a", **kwargs}
    return [PromptSampler(size, num_prompts, dp_rank=rank, dp_size=dp_size, **kwargs) for rank in range(dp_size)]


def steps(ranks, count, *args):
    """The prompts of `count` steps, over all ranks in order."""
    return [[index for rank in ranks for index in rank.next_indices(*args)] for _ in range(count)]


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


@pytest.mark.parametrize(("size", "num_prompts", "dp_size"), SIZES)
def test_every_rank_has_its_number_and_every_epoch_every_prompt(size, num_prompts, dp_size):
    ranks = samplers(size, num_prompts, dp_size)
    num_steps = 3 * size  # 3 * num_prompts * dp_size epochs
    shares = [[rank.next_indices() for _ in range(num_steps)] for rank in ranks]
    assert {len(share) for rank in shares for share in rank} == {num_prompts}
    stream = flat(flat(step) for step in zip(*shares, strict=True))
    epochs = [stream[i : i + size] for i in range(0, len(stream), size)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert {rank.epoch for rank in ranks} == {3 * num_prompts * dp_size}


def test_the_prompts_of_a_step_do_not_depend_on_the_layout():
    expected = steps(samplers(33, 12, 1), 9)
    for dp_size in (2, 3, 4, 6, 12):
        assert steps(samplers(33, 12 // dp_size, dp_size), 9) == expected


@pytest.mark.parametrize("taken", range(12))
def test_a_saved_position_goes_on_in_this_and_in_other_layouts(taken):
    ranks = samplers(7, 2, 2)
    whole = flat(steps(samplers(7, 2, 2), 30))
    steps(ranks, taken)
    (state,) = {json.dumps(rank.state_dict()) for rank in ranks}  # the same on every rank
    for num_prompts, dp_size in ((2, 2), (1, 4), (4, 1), (1, 3), (5, 1)):
        resumed = samplers(7, num_prompts, dp_size)
        for rank in resumed:
            rank.load_state_dict(json.loads(state))
        later = flat(steps(resumed, 6))
        assert later == whole[4 * taken : 4 * taken + len(later)]


def test_a_step_may_take_more_prompts_than_usual():
    ranks, usual = samplers(9, 2, 2), samplers(9, 2, 2)
    assert flat(steps(ranks, 1) + steps(ranks, 1, 4) + steps(ranks, 2)) == flat(steps(usual, 5))
    with pytest.raises(ValueError, match="num_prompts is 0"):
        ranks[0].next_indices(0)


def test_the_order_depends_on_the_seed_and_may_be_the_files():
    assert steps(samplers(9, 9, 1, seed=1), 1) != steps(samplers(9, 9, 1, seed=2), 1)
    assert steps(samplers(4, 3, 1, shuffle=False), 3) == [[0, 1, 2], [3, 0, 1], [2, 3, 0]]


@pytest.mark.parametrize(
    ("name", "other"), [("fingerprint", "b"), ("seed", 4), ("shuffle", False), ("dataset_size", 8)]
)
def test_a_position_of_another_data_set_or_order_is_refused(name, other):
    (sampler,) = samplers(7, 2, 1)
    state = {**sampler.state_dict(), name: other}
    with pytest.raises(ValueError, match=f"the saved position is of prompts with {name} {other!r}, these have"):
        sampler.load_state_dict(state)


@pytest.mark.parametrize(("change", "message"), [({"position": -1}, "position is -1"), ({"extra": 1}, "has the keys")])
def test_a_damaged_state_is_refused(change, message):
    (sampler,) = samplers(7, 2, 1)
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict({**sampler.state_dict(), **change})


@pytest.mark.parametrize(
    ("size", "num_prompts", "rank", "dp_size", "message"),
    [
        (0, 1, 0, 1, "dataset_size is 0"),
        (1, 0, 0, 1, "num_prompts is 0"),
        (1, 1, 0, 0, "dp_size is 0"),
        (9, 1, 2, 2, "dp_rank is 2; expected 0 to 1"),
        (5, 2, 0, 3, r"a step takes 6 prompts .* but the data set has 5: lower num_prompts"),
    ],
)
def test_sizes_out_of_range_are_refused(size, num_prompts, rank, dp_size, message):
    with pytest.raises(ValueError, match=message):
        PromptSampler(size, num_prompts, dp_rank=rank, dp_size=dp_size, seed=0, fingerprint="a")
