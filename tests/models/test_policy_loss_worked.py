"""Values of the policy losses, their KL terms, weights and means that were worked by hand."""

import pytest
import torch

from coati_ext.models.aggregation import Denominators, aggregate
from coati_ext.models.importance import importance_weights
from coati_ext.models.policy_loss import PolicyLoss, kl_terms


@pytest.mark.parametrize(
    "advantages, expected", [((2.0, -1.0, 1.0), -0.5600), ((-2.0, -1.0, 1.0), 0.4400)], ids=["positive", "negative"]
)
def test_worked_clip(advantages, expected):
    ratio = torch.tensor([[0.7], [1.0], [1.35]])
    mask = torch.ones(3, 1, dtype=torch.bool)
    settings = {"loss": "dapo", "clip_eps_low": 0.2, "clip_eps_high": 0.28}
    loss, _ = PolicyLoss(**settings)(
        ratio.log(), torch.zeros(3, 1), torch.tensor(advantages), mask, denominators=Denominators.of([mask])
    )
    assert loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "d, expected",
    [(0.1, {"k1": 0.1, "k2": 0.005, "k3": 0.004837}), (-0.5, {"k1": -0.5, "k2": 0.125, "k3": 0.148721})],
)
def test_worked_kl(d, expected):
    for kind, value in expected.items():
        assert kl_terms(torch.tensor(d), torch.tensor(0.0), kind).item() == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(
    "kind, cap, expected",
    [
        ("none", 2.0, [1, 1, 1]),
        ("token_truncate", 2.0, [1.4918, 0.3679, 2]),
        ("token_mask", 2.0, [1.4918, 0, 0]),
        ("token_mask", 3.0, [1.4918, 0.3679, 0]),
        ("sequence_mask", 1.82, [0, 0, 0]),  # the product is 1.8221
        ("sequence_mask", 1.83, [1, 1, 1]),
        ("geometric_mask", 1.22, [0, 0, 0]),  # the geometric mean is 1.2214
        ("geometric_mask", 1.23, [1, 1, 1]),
    ],
)
def test_worked_importance_weights(kind, cap, expected):
    log_w = torch.tensor([[0.4, -1.0, 1.2, 5.0]])  # the last is not in the mask
    mask = torch.tensor([[True, True, True, False]])
    weights = importance_weights(log_w.requires_grad_(), torch.zeros(1, 4), mask, kind, cap)
    assert weights[0, :3].tolist() == pytest.approx(expected, abs=5e-5) and not weights.requires_grad


@pytest.mark.parametrize("kind, below", [("sequence_mask", 1 / 1.82), ("geometric_mask", 1 / 1.22)])
def test_sequences_far_below_are_dropped_as_those_far_above(kind, below):
    mask = torch.ones(1, 3, dtype=torch.bool)
    weights = importance_weights(-torch.tensor([[0.4, -1.0, 1.2]]), torch.zeros(1, 3), mask, kind, 1 / below)
    assert not weights.any()


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("token-mean", 2.5),
        ("seq-mean-token-mean", 2.0),
        ("seq-mean-token-sum", 10.0),
        ("seq-mean-token-sum-norm", 1.25),
    ],
)
def test_worked_aggregation_whole_and_one_sequence_at_a_time(kind, expected):
    mask = torch.arange(6) < torch.tensor([[2], [6]])
    loss = torch.tensor([[1.0], [3.0]]).expand(2, 6)
    denominators = Denominators.of([mask])
    assert aggregate(loss, mask, kind, denominators, 8).item() == pytest.approx(expected)
    parts = [aggregate(loss[i : i + 1], mask[i : i + 1], kind, denominators, 8).item() for i in range(2)]
    assert sum(parts) == pytest.approx(expected)


def test_empty_sequences_are_not_counted():
    mask = torch.tensor([[True, True], [False, False]])
    assert Denominators.of([mask, mask[1:]]).counts.tolist() == [2, 1]
    assert aggregate(torch.ones(2, 2), mask, "seq-mean-token-mean", Denominators.of([mask])).item() == 1
