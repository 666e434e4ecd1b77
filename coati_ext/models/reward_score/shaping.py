"""Terms that look at the length of a completion only: they judge no answer, and are added to rewards that do."""

from typing import Any

from coati_ext.models.reward_score.score import Score


def overlong_reward(
    completion: str,
    gold: Any = None,
    *,
    length: int,
    max_length: int,
    soft_zone: int,
    overlong_weight: float = 1.0,
) -> Score:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), times `overlong_weight`.

    0 up to `max_length - soft_zone` tokens, from there linearly to -1 at `max_length`, and -1 beyond.

    Args:
        length: tokens of the completion.

    Example:
        >>> [overlong_reward("", length=n, max_length=100, soft_zone=20).score for n in (80, 90, 100, 120)]
        [0.0, -0.5, -1.0, -1.0]
    """
    if not 0 < soft_zone <= max_length:
        raise ValueError(f"soft_zone is {soft_zone}; expected 1 to max_length = {max_length}")
    _check_length(length)
    excess = min(max(length - (max_length - soft_zone), 0), soft_zone)
    return _term("overlong", -overlong_weight * excess / soft_zone)


def target_length_reward(
    completion: str, gold: Any = None, *, length: int, target_length: int, length_weight: float = 1.0
) -> Score:
    """Minus the relative distance from `target_length` tokens, at most 1, times `length_weight`.

    Example:
        >>> [target_length_reward("", length=n, target_length=100).score for n in (100, 50, 150, 900)]
        [0.0, -0.5, -0.5, -1.0]
    """
    if target_length < 1:
        raise ValueError(f"target_length is {target_length}; expected at least 1")
    _check_length(length)
    return _term("target_length", -length_weight * min(abs(length - target_length) / target_length, 1.0))


def _check_length(length: int) -> None:
    if length < 0:
        raise ValueError(f"length is {length}; expected the number of tokens of the completion")


def _term(name: str, value: float) -> Score:
    value += 0.0  # -0.0 prints as 0.0
    return Score(score=value, accuracy=None, parts={name: value}, reason="unjudged")
