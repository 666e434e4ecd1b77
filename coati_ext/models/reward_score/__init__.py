"""Verifiable rewards: pure functions of a completion's text and a gold. One file each, and one line in `REWARDS`."""

import importlib
from collections.abc import Callable
from typing import Any

from coati_ext.models.reward_score.code import code_reward
from coati_ext.models.reward_score.match import exact_match_reward, regex_match_reward
from coati_ext.models.reward_score.math_expression import math_reward
from coati_ext.models.reward_score.multiple_choice import multiple_choice_reward
from coati_ext.models.reward_score.number import number_reward
from coati_ext.models.reward_score.reasoning_gym import reasoning_gym_reward
from coati_ext.models.reward_score.score import REASONS, Reason, Score, add_scores, reason_rates
from coati_ext.models.reward_score.shaping import overlong_reward, target_length_reward

REWARDS: dict[str, Callable[..., Any]] = {
    "number": number_reward,
    "gsm8k": number_reward,
    "math": math_reward,
    "multiple_choice": multiple_choice_reward,
    "exact_match": exact_match_reward,
    "regex_match": regex_match_reward,
    "code": code_reward,
    "reasoning_gym": reasoning_gym_reward,
    "overlong": overlong_reward,
    "target_length": target_length_reward,
    # ColossalChat's names.
    "gsm8k_reward_fn": number_reward,
    "math_reward_fn": math_reward,
    "boxed_math_reward_fn": math_reward,
    "math_competition_reward_fn": math_reward,
    "code_reward_fn": code_reward,
}


def find_reward(name: str) -> Callable[..., Any]:
    """The function of a name in `REWARDS`, or at a dotted path: `package.module:function` or `package.module.function`.

    Raises: ValueError for what is neither; the text lists the names. An error inside the module itself is not hidden.

    Example:
        >>> find_reward("gsm8k").__name__, find_reward("coati_ext.models.reward_score.number:number_reward").__name__
        ('number_reward', 'number_reward')
    """
    if name in REWARDS:
        return REWARDS[name]
    module, separator, function = name.partition(":") if ":" in name else name.rpartition(".")
    if not (module and separator and function):
        raise ValueError(
            f"unknown reward {name!r}; expected one of {', '.join(REWARDS)}, or a dotted path package.module:function"
        )
    try:
        found = getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"reward {name!r}: there is no module {error.name}; is its folder on PYTHONPATH?") from None
    if not callable(found):
        raise ValueError(f"reward {name!r}: {module} has no function {function}")
    return found


__all__ = ["REASONS", "REWARDS", "Reason", "Score", "add_scores", "find_reward", "reason_rates"]
