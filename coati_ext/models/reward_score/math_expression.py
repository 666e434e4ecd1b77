"""Reward for mathematical expressions: numbers exactly, the rest by the library math-verify in killable processes."""

import importlib.util
import re
from typing import Any

from coati_ext.models.reward_score.answer import Extraction, Tags, grade_answer
from coati_ext.models.reward_score.deadline_pool import DeadlineExceeded, DeadlinePool, shared_pool
from coati_ext.models.reward_score.gold import gold_text
from coati_ext.models.reward_score.number import MAX_CHARS, Percent, last_number, plain, read_number, same_number
from coati_ext.models.reward_score.score import Reason, Score, graded, not_scorable

_PERCENT = re.compile(r"\s*\\?%\s*$")
_THOUSANDS = re.compile(r"(?<![0-9,.])[1-9][0-9]{0,2}(?:\{,\}[0-9]{3})+(?![0-9])")
_WITH_BASE = re.compile(r"([0-9A-Z.]+) ?_ ?\{?([0-9]+)\}?")
_NAME = re.compile(r"([A-Za-z](?:_[0-9A-Za-z])?)\s*=\s*(?=[^=\s])")


def math_reward(
    completion: str,
    gold: Any,
    *,
    tags: Tags | None = None,
    extraction: Extraction = "strict",
    truncated: bool = False,
    percent: Percent = "unit",
    deadline_s: float = 5.0,
    leave_out_timeouts: bool = True,
    pool: DeadlinePool | None = None,
    format_score: float = 1.0,
    correct_score: float = 10.0,
) -> Score:
    """ColossalAI's scheme for a gold that is an expression, a tuple, a set, an interval, a matrix or an equation.

    If gold and answer are both numbers they are compared as in `number_reward`. A decimal equals what it says: 1.4142
    is not the square root of 2.

    Args:
        percent: as in `number_reward`, for a sign at the end of gold or answer.
        deadline_s: for one comparison, after which the process that computes it is killed.
        leave_out_timeouts: a timeout says that the grader does not know, so the sample gets no score; False: it
            counts as a wrong answer. The reason is "timeout" either way.
        pool: the processes; by default two for all callers.

    Raises:
        ImportError: math-verify is not installed.
        RuntimeError: a grader process cannot start.
    """
    if percent not in ("unit", "fraction"):
        raise ValueError(f"percent is {percent!r}; expected 'unit' or 'fraction'")
    target = gold_text(gold)
    if target is None or len(target) > MAX_CHARS:
        return not_scorable("gold_unparseable")
    pool = pool or shared_pool()

    def judge(answer: str) -> Reason:
        return _compare(answer, target, percent, pool, deadline_s)

    if read_number(target, percent=percent) is None:
        require_math_verify()
        if _ask(None, target, percent, pool, deadline_s) != "correct":
            return not_scorable("gold_unparseable")
    score = grade_answer(
        completion,
        judge,
        tags=tags,
        extraction=extraction,
        truncated=truncated,
        format_score=format_score,
        correct_score=correct_score,
        last_resort=last_number,
    )
    if score.reason == "timeout":
        wrong = graded("timeout", format_score=format_score, correct_score=correct_score)
        return not_scorable("timeout") if leave_out_timeouts else wrong
    return score


def require_math_verify() -> None:
    """Raise an ImportError that says what to install, unless math-verify is there."""
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("the math reward needs math-verify: pip install 'math-verify>=0.8,<0.10' (extra: grpo)")


def _compare(answer: str, gold: str, percent: Percent, pool: DeadlinePool, deadline_s: float) -> Reason:
    # The library's parser takes twice as long for each brace in a row: 5 s for 15 of them.
    if len(answer) > MAX_CHARS or "\\boxed" in answer or "{{{{" in answer.replace(" ", ""):
        return "wrong"
    numbers = [read_number(text, percent=percent) for text in (answer, gold)]
    if None not in numbers:
        return "correct" if same_number(*numbers) else "wrong"
    bases = [_WITH_BASE.fullmatch(plain(text)) for text in (answer, gold)]
    if bases[0]:  # 204_5: the library would drop the base
        return "correct" if bases[1] and bases[0].groups() == bases[1].groups() else "wrong"
    if not _same_kind(plain(answer), plain(gold)):
        return "wrong"
    require_math_verify()
    return _ask(answer, gold, percent, pool, deadline_s)


def _same_kind(answer: str, gold: str) -> bool:
    """False where math-verify would be kinder than mathematics: unlike names, foreign digits, prose."""
    names = [_NAME.match(text) for text in (answer, gold)]
    if all(names) and names[0][1] != names[1][1]:
        return False
    # Of `17 = 18` the library would take the right side.
    if answer.count("=") > gold.count("=") and (answer.count("=") > 1 or not _NAME.match(answer)):
        return False
    if re.search(r"[0-9]_[0-9]", answer) or any(char.isnumeric() and not char.isascii() for char in answer):
        return False
    return not re.search(r"\b(?:or|and|not)\b", answer) or bool(re.search(r"\b(?:or|and|not)\b", gold))


def _ask(answer: str | None, gold: str, percent: Percent, pool: DeadlinePool, deadline_s: float) -> Reason:
    request = {"task": "math", "answer": answer and _expression(answer, percent), "gold": _expression(gold, percent)}
    try:
        return pool.run(request, deadline_s)
    except DeadlineExceeded:
        return "timeout"


def _expression(text: str, percent: Percent) -> str:
    """The text as math-verify reads it: thousands joined, a percent sign at the end by our rule, no `$` around it."""
    text = text.strip()
    for opening, closing in (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            text = text[len(opening) : -len(closing)].strip()
    text = _THOUSANDS.sub(lambda match: match[0].replace("{,}", ""), text)
    if _PERCENT.search(text):
        text = _PERCENT.sub("", text)
        text = text if percent == "unit" else f"\\frac{{{text}}}{{100}}"
    return text
