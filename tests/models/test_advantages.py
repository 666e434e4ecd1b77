import math

import pytest
import torch

from coati_ext.models.advantages import ADVANTAGES, group_advantages, zero_variance

NAN = float("nan")
KINDS = list(ADVANTAGES)


def random_rewards(num_prompts=5, size=6, seed=0):
    return torch.randn(num_prompts, size, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("group_std", [-0.6396, -0.4264, 1.4924, -0.4264]),
        ("group_mean", [-3, -2, 7, -2]),
        ("leave_one_out", [-4, -2.6667, 9.3333, -2.6667]),
    ],
)
def test_worked_values(kind, expected):
    advantages, valid = group_advantages(torch.tensor([[0.0, 1.0, 10.0, 1.0]]), kind)
    torch.testing.assert_close(advantages, torch.tensor([expected]).float(), rtol=0, atol=5e-5)  # given to 4 digits
    assert advantages.dtype == torch.float32 and valid.all()


def by_hand(rewards, kind):
    """One group of floats, a sample at a time."""
    kept = [reward for reward in rewards if math.isfinite(reward)]
    mean = sum(kept) / len(kept)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in kept) / (len(kept) - 1))
    result = []
    for index, reward in enumerate(rewards):
        others = [other for j, other in enumerate(rewards) if j != index and math.isfinite(other)]
        value = {
            "group_std": (reward - mean) / (std + 1e-4),
            "group_mean": reward - mean,
            "leave_one_out": reward - sum(others) / len(others),
        }[kind]
        result.append(value if math.isfinite(reward) else 0.0)
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_equals_a_loop_over_the_samples_with_some_missing(kind):
    rewards = random_rewards()
    rewards[1, 2] = rewards[3, :3] = NAN
    advantages, valid = group_advantages(rewards, kind)
    expected = torch.tensor([by_hand(group, kind) for group in rewards.tolist()])
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(valid, ~rewards.isnan())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reward", [10.0, 0.1, -7.3, 0.0])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_equal_rewards_are_exactly_zero(kind, reward, size):
    advantages, valid = group_advantages(torch.full((2, size), reward), kind)
    assert not advantages.any() and valid.all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_is_zero(kind):
    advantages, valid = group_advantages(torch.tensor([[3.0], [NAN]]), kind)
    assert advantages.tolist() == [[0.0], [0.0]] and valid.tolist() == [[True], [False]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broken", [NAN, float("inf"), -float("inf")])
def test_a_reward_that_is_not_finite_reaches_no_other_sample(kind, broken):
    with_it, valid = group_advantages(torch.tensor([[1.0, broken, 4.0, 2.0], [0.0, 1.0, 2.0, 5.0]]), kind)
    assert valid.tolist() == [[True, False, True, True], [True] * 4]
    without, _ = group_advantages(torch.tensor([[1.0, 4.0, 2.0]]), kind)
    assert with_it[0, 1] == 0
    torch.testing.assert_close(with_it[0, [0, 2, 3]], without[0])
    torch.testing.assert_close(with_it[1:], group_advantages(torch.tensor([[0.0, 1.0, 2.0, 5.0]]), kind)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_groups_with_fewer_than_two_valid_rewards_are_zero(kind):
    advantages, valid = group_advantages(torch.tensor([[NAN, NAN, NAN], [NAN, 5.0, NAN]]), kind)
    assert not advantages.any() and valid.sum() == 1


def test_scale_and_offset_of_rewards():
    rewards = random_rewards()
    torch.testing.assert_close(
        group_advantages(2.5 * rewards + 3, "group_std")[0],
        group_advantages(rewards, "group_std")[0],
        rtol=1e-4,  # the 1e-4 beside a standard deviation of about 3
        atol=0,
    )
    for kind in ("group_mean", "leave_one_out"):
        shifted, plain = group_advantages(rewards + 3, kind)[0], group_advantages(rewards, kind)[0]
        torch.testing.assert_close(shifted, plain, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(group_advantages(2 * rewards, kind)[0], 2 * plain, rtol=1e-6, atol=1e-6)


def test_zero_variance_marks_what_teaches_nothing():
    rewards = torch.tensor([[1.0, 1.0, 1.0], [1.0, NAN, 1.0], [NAN, NAN, NAN], [NAN, 2.0, NAN], [0.0, 1e-6, 0.0]])
    assert zero_variance(rewards).tolist() == [True, True, True, True, False]


def test_integer_rewards_and_no_prompt():
    assert group_advantages(torch.tensor([[0, 4]]), "group_mean")[0].tolist() == [[-2.0, 2.0]]
    assert group_advantages(torch.zeros(0, 4), "group_std")[0].shape == (0, 4)


@pytest.mark.parametrize(
    "rewards, kind, said",
    [
        (torch.zeros(1, 2), "gae", "unknown advantage 'gae'; known are group_std, group_mean, leave_one_out"),
        (torch.zeros(4), "group_std", r"must be \(prompts, group size\), got \(4,\)"),
        (torch.zeros(4, 0), "group_std", "got"),
    ],
)
def test_refusals(rewards, kind, said):
    with pytest.raises(ValueError, match=said):
        group_advantages(rewards, kind)
