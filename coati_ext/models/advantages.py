"""Group-relative advantages: how much better a completion is than the others of its prompt. P prompts, G group.

One number a completion, the same for each of its tokens. Nothing but the reward goes in: a KL penalty added before the
normalisation would be blown up to full strength wherever the rewards of a group are alike.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

STD_EPS = 1e-4  # added to the standard deviation; TRL and ColossalChat use the same


class _Group(NamedTuple):
    """Rewards minus the mean of their group (0 where not valid), and how many of the group are valid."""

    centred_PG: torch.Tensor
    num_valid_P1: torch.Tensor


def _group_std(group: _Group) -> torch.Tensor:
    variance_P1 = group.centred_PG.square().sum(-1, keepdim=True) / (group.num_valid_P1 - 1).clamp(min=1)
    return group.centred_PG / (variance_P1.sqrt() + STD_EPS)


def _group_mean(group: _Group) -> torch.Tensor:
    return group.centred_PG


def _leave_one_out(group: _Group) -> torch.Tensor:
    return group.centred_PG * group.num_valid_P1 / (group.num_valid_P1 - 1).clamp(min=1)


ADVANTAGES: dict[str, Callable[[_Group], torch.Tensor]] = {
    "group_std": _group_std,  # GRPO: by the unbiased standard deviation
    "group_mean": _group_mean,  # Dr. GRPO: no division
    "leave_one_out": _leave_one_out,  # RLOO: minus the mean of the others
}


def group_advantages(rewards_PG: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages within each prompt's group, and which samples have one.

    Args:
        rewards_PG: one row a prompt. A reward that is not finite (NaN stands for a sample that could not be graded) is
            left out of the statistics of its group.
        kind: one of `ADVANTAGES`.

    Returns:
        (P, G) fp32, exactly 0 where the group has no variance (equal rewards, or fewer than two valid ones) and where
        the reward is not finite; (P, G) bool, false there: mask these samples out of the loss.

    Raises:
        ValueError: unknown kind, or not two dimensions.

    Example:
        >>> advantages, valid = group_advantages(torch.tensor([[0.0, 1.0, 10.0, 1.0]]), "group_mean")
        >>> advantages.tolist(), valid.all().item()
        ([[-3.0, -2.0, 7.0, -2.0]], True)
    """
    if kind not in ADVANTAGES:
        raise ValueError(f"unknown advantage {kind!r}; known are {', '.join(ADVANTAGES)}")
    _check_groups(rewards_PG)
    rewards_PG = rewards_PG.float()
    valid_PG = rewards_PG.isfinite()
    num_valid_P1 = valid_PG.sum(-1, keepdim=True)
    mean_P1 = rewards_PG.where(valid_PG, 0).sum(-1, keepdim=True) / num_valid_P1.clamp(min=1)
    centred_PG = (rewards_PG - mean_P1).where(valid_PG, 0)
    advantages_PG = ADVANTAGES[kind](_Group(centred_PG, num_valid_P1))
    return advantages_PG.masked_fill(zero_variance(rewards_PG)[:, None], 0), valid_PG


def zero_variance(rewards_PG: torch.Tensor) -> torch.Tensor:
    """(P,) bool: groups that teach nothing, for all their finite rewards are equal or there are fewer than two.

    Raises:
        ValueError: not two dimensions.

    Example:
        >>> zero_variance(torch.tensor([[1.0, 1.0, float("nan")], [1.0, 0.0, 1.0]])).tolist()
        [True, False]
    """
    _check_groups(rewards_PG)
    rewards_PG = rewards_PG.float()
    valid_PG = rewards_PG.isfinite()
    highest_P = rewards_PG.where(valid_PG, -torch.inf).amax(-1)
    lowest_P = rewards_PG.where(valid_PG, torch.inf).amin(-1)
    return highest_P <= lowest_P


def _check_groups(rewards_PG: torch.Tensor) -> None:
    if rewards_PG.dim() != 2 or rewards_PG.shape[1] == 0:
        raise ValueError(f"rewards must be (prompts, group size), got {tuple(rewards_PG.shape)}")
