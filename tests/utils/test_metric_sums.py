import json
import math

import pytest
import torch
from distributed import pool

from coati_ext.utils.metric_sums import Max, Mean, MetricSums, Sum, all_reduce_mean


def test_a_mean_is_over_what_was_counted_not_over_means():
    sums = MetricSums()
    sums.add({"length": Mean(torch.tensor(2.0), torch.tensor(1))})
    sums.add({"length": Mean(torch.tensor(16.0), torch.tensor(8))})
    assert sums.reduce() == {"length": 2.0}


def test_sums_and_maxima():
    sums = MetricSums()
    for share, value in ((0.25, -3.0), (0.5, -1.0), (0.0, -2.0)):
        sums.add({"loss": Sum(torch.tensor(share)), "max": Max(torch.tensor(value))})
    assert sums.reduce() == sums.reduce() == {"loss": 0.75, "max": -1.0}


def test_counts_and_totals_beyond_fp32_are_exact():
    sums = MetricSums()
    sums.add({"tokens": Mean(torch.tensor(2**24), torch.tensor(2**24 + 1)), "n": Sum(torch.tensor(2**24))})
    sums.add({"tokens": Mean(torch.tensor(1), torch.tensor(0)), "n": Sum(torch.tensor(1))})
    assert sums.reduce() == {"tokens": 1.0, "n": 2**24 + 1}


def test_what_was_never_counted_is_left_out():
    sums = MetricSums()
    sums.add({"mean": Mean(torch.tensor(0.0), torch.tensor(0)), "max": Max(torch.tensor(-math.inf))})
    assert sums.reduce() == MetricSums().reduce() == {}


def test_nan_is_not_hidden():
    sums = MetricSums()
    for value in (1.0, math.nan, 2.0):
        sums.add({"mean": Mean(torch.tensor(value), torch.tensor(1)), "max": Max(torch.tensor(value))})
    reduced = sums.reduce()
    assert math.isnan(reduced["mean"]) and math.isnan(reduced["max"])


def test_the_graph_is_not_kept():
    sums, x = MetricSums(), torch.ones((), requires_grad=True)
    sums.add({"loss": Sum(x * 2)})
    assert not any(part.total.requires_grad for part in sums._parts["loss"])


def test_one_name_is_one_kind():
    sums = MetricSums()
    sums.add({"x": Sum(torch.tensor(1.0))})
    with pytest.raises(ValueError, match="metric x: a Max, was a Sum before"):
        sums.add({"x": Max(torch.tensor(1.0))})


def test_all_reduce_mean_alone():
    assert all_reduce_mean(torch.tensor(3.0), torch.tensor(2)) == 1.5
    assert math.isnan(all_reduce_mean(torch.tensor(0.0), torch.tensor(0)))


def reduced_on_rank():
    import torch.distributed as dist

    rank, group = dist.get_rank(), dist.group.WORLD
    sums = MetricSums()
    if rank == 1:  # rank 0 has nothing to say
        sums.add({"only_one": Sum(torch.tensor(4.0))})
    sums.add({"mean": Mean(torch.tensor(6.0 * rank), torch.tensor(1 + 2 * rank)), "max": Max(torch.tensor(-rank))})
    return sums.reduce(group), all_reduce_mean(torch.tensor(rank), torch.tensor(1), group), _disagreement(rank, group)


def _disagreement(rank, group):
    sums = MetricSums()
    sums.add({"x": Sum(torch.tensor(1.0)) if rank else Max(torch.tensor(1.0))})
    try:
        sums.reduce(group)
    except ValueError as error:
        return str(error)


def test_ranks_get_the_same_numbers_also_of_what_one_rank_alone_has():
    expected = (
        {"mean": 1.5, "max": 0.0, "only_one": 4.0},
        0.5,
        "metric x: ranks disagree whether it is a Max or a Sum",
    )
    assert pool(2).run(reduced_on_rank) == [expected, expected]


def test_a_saved_state_goes_on_to_the_same_last_bit():
    parts = [
        {
            "a": Mean(torch.tensor(0.1), torch.tensor(3)),
            "b": Max(torch.tensor(-math.inf)),
            "c": Sum(torch.tensor(1e-9)),
        },
        {"a": Mean(torch.tensor(0.7), torch.tensor(2)), "b": Max(torch.tensor(2.5)), "c": Sum(torch.tensor(0.3))},
        {"a": Mean(torch.tensor(1e8), torch.tensor(1)), "b": Max(torch.tensor(math.nan)), "c": Sum(torch.tensor(7.0))},
    ]
    whole, first, second = MetricSums(), MetricSums(), MetricSums()
    for part in parts[:2]:
        first.add(part)
    second.load_state(json.loads(json.dumps(first.state(), allow_nan=False)))
    second.add(parts[2])
    for part in parts:
        whole.add(part)
    expected, found = whole.reduce(), second.reduce()
    assert {**expected, "b": None} == {**found, "b": None}
    assert math.isnan(expected["b"]) and math.isnan(found["b"])
