"""The child process of `DeadlinePool`: reads one JSON request a line, writes one JSON answer a line."""

import json
import logging
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

_MAX_MEMORY = 4 << 30  # bytes of address space; sympy itself takes about 0.2 GiB
_GRACE_S = 2.0  # after which a child whose parent is gone ends itself


def serve() -> None:
    """Answer requests until the parent closes the pipe."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints does not get between the answers
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no timeout: the parent has one
    answers.write(b"{}\n")
    for line in requests:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request.pop("deadline_s") + _GRACE_S)
        try:
            answer = {"result": TASKS[request.pop("task")](**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(json.dumps(answer).encode() + b"\n")


def regex(pattern: str, text: str, ignore_case: bool) -> str:
    """Whether the whole text matches."""
    try:
        compiled = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    except (re.error, OverflowError, RecursionError):  # of a count or a depth that no pattern has
        return "gold_unparseable"
    return "correct" if compiled.fullmatch(text) else "wrong"


def math(answer: str | None, gold: str) -> str:
    """Whether two LaTeX expressions are equal; with `answer` None, whether the gold equals itself.

    What math-verify cannot read or compare in the answer is wrong. A gold that it does not find equal to itself is
    unparseable.
    """
    target = _parsed_gold(gold)
    if target is None:
        return "gold_unparseable"
    if answer is None:
        return "correct"
    try:
        expressions = _parse(answer)
        return "correct" if expressions and _equal(target, expressions) else "wrong"
    except MemoryError:
        os._exit(1)
    except Exception:  # sympy and its parser raise whatever hostile LaTeX leads them to: it is not the gold
        return "wrong"


@lru_cache(maxsize=256)
def _parsed_gold(gold: str) -> list[Any] | None:
    try:
        expressions = _parse(gold)
        return expressions if expressions and _equal(expressions, expressions) else None
    except Exception:
        return None


def _parse(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    # The parent keeps the time. One box holds one expression: nothing else is searched for.
    settings = [LatexExtractionConfig(boxed_match_priority=0)]
    found = parse("\\boxed{" + text + "}", settings, fallback_mode="no_fallback", parsing_timeout=None)
    return [expression for expression in found if not isinstance(expression, str)]


def _equal(gold: list[Any], answer: list[Any]) -> bool:
    from math_verify import verify

    if not verify(gold, answer, float_rounding=12, timeout_seconds=None):
        return False
    return all(_exactly_equal(left, right) for left in gold[:1] for right in answer[:1])


def _exactly_equal(left: Any, right: Any) -> bool:
    """Refuses what is equal to some digits only: decimals are what is written, and no fraction is the root of 2."""
    import sympy

    if left == right or not (isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr)):
        return True
    decimals = left.has(sympy.Float) or right.has(sympy.Float)
    if not decimals and not (left.is_number and right.is_number):
        return True  # compared by its symbols already
    exact = [side.xreplace({f: sympy.Rational(str(f)) for f in side.atoms(sympy.Float)}) for side in (left, right)]
    difference = exact[0] - exact[1]
    return sympy.simplify(difference) == 0 or difference.equals(0) is True


def reasoning_gym(name: str, answer: str, gold: str, metadata: dict[str, Any]) -> float | None:
    """What the task's scorer gives the answer, from 0 to 1; None if it does not give the gold 1."""
    task = _gym_task(name)
    try:
        if float(task.score_answer(gold, {"question": "", "answer": gold, "metadata": metadata})) < 1:
            return None
    except Exception:
        return None
    try:
        return float(task.score_answer(answer, {"question": "", "answer": gold, "metadata": metadata}))
    except MemoryError:
        os._exit(1)
    except Exception:  # a scorer raises whatever its parser does, and it took the gold
        return 0.0


@lru_cache(maxsize=256)
def _gym_task(name: str) -> Any:
    from reasoning_gym import create_dataset

    return create_dataset(name, seed=0, size=1)


TASKS: dict[str, Callable[..., Any]] = {"math": math, "reasoning_gym": reasoning_gym, "regex": regex}
