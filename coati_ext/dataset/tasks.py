"""Tasks with verifiable answers: made here (`builtin:NAME`), or by the package reasoning-gym (`NAME`).

Sample i of a built-in task depends on its options, the seed and i only. Most of reasoning-gym's tasks draw sample i
from seed + i, so that neighbouring seeds share nearly all samples: hold samples out rather than use another seed.
"""

import difflib
import inspect
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_BUILTIN = "builtin:"
_INSTALL = "pip install 'reasoning-gym>=0.1.19,<0.2'"


@dataclass(frozen=True, kw_only=True)
class TaskSample:
    """A question with its gold (None: none that the task's own scorer pays) and what that scorer needs."""

    question: str
    gold: str | None
    metadata: dict[str, Any]
    key: str | None = None
    """Equal for questions that are the same but for their order; None: only equal texts are the same question."""


def arithmetic(
    index: int, seed: int, *, min_number: int = 0, max_number: int = 20, num_terms: int = 2, operations: str = "+-"
) -> TaskSample:
    """`What is 3 + 4?`: `num_terms` numbers from `min_number` to `max_number`, joined by `operations` (of `+-*`).

    Example:
        >>> arithmetic(0, seed=1, max_number=9, num_terms=3)
        TaskSample(question='What is 4 - 7 - 0?', gold='-3', metadata={'num_terms': 3}, key='+4 -0 -7')
    """
    if min_number < 0 or max_number < min_number:
        raise ValueError(f"min_number is {min_number} and max_number {max_number}; expected 0 <= min <= max")
    if num_terms < 2:
        raise ValueError(f"num_terms is {num_terms}; expected at least 2")
    if not operations or set(operations) - set("+-*"):
        raise ValueError(f"operations is {operations!r}; expected some of '+-*'")
    draw = random.Random(f"arithmetic/{seed}/{index}")
    text = str(draw.randint(min_number, max_number))
    terms = [("+", [int(text)])]  # signed products
    for _ in range(num_terms - 1):
        operation, number = draw.choice(operations), draw.randint(min_number, max_number)
        text += f" {operation} {number}"
        if operation == "*":
            terms[-1][1].append(number)
        else:
            terms.append((operation, [number]))
    value = sum(math.prod(factors) if sign == "+" else -math.prod(factors) for sign, factors in terms)
    key = " ".join(sorted(sign + "*".join(map(str, sorted(factors))) for sign, factors in terms))
    return TaskSample(question=f"What is {text}?", gold=str(value), metadata={"num_terms": num_terms}, key=key)


BUILTIN_TASKS: dict[str, Callable[..., TaskSample]] = {"arithmetic": arithmetic}


def make_samples(task: str, num_samples: int, seed: int, options: dict[str, Any] | None = None) -> Iterator[TaskSample]:
    """Yield samples of `builtin:NAME` or of a task of reasoning-gym.

    Raises:
        ValueError: an unknown task (near names are listed) or option, an option out of range, or no reasoning-gym.
    """
    options = options or {}
    if task.startswith(_BUILTIN):
        yield from _builtin_samples(task, num_samples, seed, options)
    else:
        yield from _gym_samples(task, num_samples, seed, options)


def _builtin_samples(task: str, num_samples: int, seed: int, options: dict[str, Any]) -> Iterator[TaskSample]:
    name = task.removeprefix(_BUILTIN)
    if name not in BUILTIN_TASKS:
        raise ValueError(_unknown(task, [_BUILTIN + known for known in BUILTIN_TASKS]))
    make = BUILTIN_TASKS[name]
    parameters = [p for p in inspect.signature(make).parameters.values() if p.kind is p.KEYWORD_ONLY]
    kinds = {parameter.name: type(parameter.default) for parameter in parameters}
    for key, value in options.items():
        if key not in kinds:
            raise ValueError(f"task {task!r} has no option {key!r}; it has {', '.join(kinds)}")
        if type(value) is not kinds[key]:
            raise ValueError(f"task {task!r}: option {key} is {value!r}; expected {kinds[key].__name__}")
    try:
        for index in range(num_samples):
            yield make(index, seed, **options)
    except ValueError as error:
        raise ValueError(f"task {task!r}: {error}") from None


def _gym_samples(task: str, num_samples: int, seed: int, options: dict[str, Any]) -> Iterator[TaskSample]:
    """Samples whose metadata survive JSON: the task's own scorer, given what JSON reads back, pays the gold in full.

    A sample for which it does not has the gold None.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:  # its __init__ imports every task, and with them all that the tasks import
        raise ValueError(f"task {task!r} is made by the package reasoning-gym: {error}; run: {_INSTALL}") from error
    if task not in DATASETS:
        raise ValueError(_unknown(task, [*DATASETS, *(_BUILTIN + name for name in BUILTIN_TASKS)]))
    try:
        dataset = reasoning_gym.create_dataset(task, seed=seed, size=num_samples, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"task {task!r} refuses its options {options}: {error}") from error
    for index in range(num_samples):
        entry = dataset[index]
        metadata = json.loads(json.dumps(entry["metadata"], default=str))
        gold = entry["answer"]
        if gold is not None and not _is_paid(dataset, entry, metadata):
            gold = None
        yield TaskSample(question=entry["question"], gold=gold, metadata=metadata)


def _is_paid(dataset: Any, entry: dict[str, Any], metadata: dict[str, Any]) -> bool:
    try:
        return float(dataset.score_answer(entry["answer"], {**entry, "metadata": metadata})) >= 1
    except Exception:  # a scorer meets lists where it had tuples, and can raise anything
        return False


def _unknown(task: str, known: list[str]) -> str:
    near = difflib.get_close_matches(task, known, n=5, cutoff=0.5)
    near = near or [name for name in known if task.partition("_")[0] in name][:5]
    return f"unknown task {task!r}; " + (f"near names: {', '.join(near)}" if near else f"known are {', '.join(known)}")
