"""Rewards for text that equals the gold, or matches it as a regular expression."""

from typing import Any

from coati_ext.models.reward_score.answer import Extraction, Tags, grade_answer
from coati_ext.models.reward_score.deadline_pool import DeadlineExceeded, DeadlinePool, shared_pool
from coati_ext.models.reward_score.gold import gold_text
from coati_ext.models.reward_score.score import Reason, Score, not_scorable

_MAX_CHARS = 10_000


def exact_match_reward(
    completion: str,
    gold: Any,
    *,
    tags: Tags | None = None,
    extraction: Extraction = "strict",
    truncated: bool = False,
    ignore_case: bool = False,
    format_score: float = 1.0,
    correct_score: float = 10.0,
) -> Score:
    """ColossalAI's scheme for an answer that equals the gold, runs of white space taken as one blank.

    Example:
        >>> exact_match_reward("#### New  York", "New York").reason
        'correct'
    """
    target = gold_text(gold)
    if target is None:
        return not_scorable("gold_unparseable")

    def normal(text: str) -> str:
        return " ".join((text.casefold() if ignore_case else text).split())

    def judge(answer: str) -> Reason:
        return "correct" if normal(answer) == normal(target) else "wrong"

    return grade_answer(
        completion,
        judge,
        tags=tags,
        extraction=extraction,
        truncated=truncated,
        format_score=format_score,
        correct_score=correct_score,
        whole_lines=True,
    )


def regex_match_reward(
    completion: str,
    gold: Any,
    *,
    tags: Tags | None = None,
    extraction: Extraction = "strict",
    truncated: bool = False,
    ignore_case: bool = False,
    deadline_s: float = 5.0,
    pool: DeadlinePool | None = None,
    format_score: float = 1.0,
    correct_score: float = 10.0,
) -> Score:
    """ColossalAI's scheme for an answer that the gold, a regular expression, matches from beginning to end.

    It runs in a process with a deadline, because a pattern can take exponential time; a timeout gives no score.

    Example:
        >>> regex_match_reward("#### 2024-05-01", "[0-9]{4}-05-[0-9]{2}").reason  # doctest: +SKIP
        'correct'
    """
    pattern = gold if isinstance(gold, str) and gold else None
    pool = pool or shared_pool()

    def ask(text: str) -> Reason:
        request = {"task": "regex", "pattern": pattern, "text": text, "ignore_case": ignore_case}
        try:
            return pool.run(request, deadline_s)
        except DeadlineExceeded:
            return "timeout"

    if pattern is None or ask("") == "gold_unparseable":
        return not_scorable("gold_unparseable")

    def judge(answer: str) -> Reason:
        return ask(answer) if len(answer) <= _MAX_CHARS else "wrong"

    score = grade_answer(
        completion,
        judge,
        tags=tags,
        extraction=extraction,
        truncated=truncated,
        format_score=format_score,
        correct_score=correct_score,
        whole_lines=True,
    )
    return not_scorable("timeout") if score.reason == "timeout" else score
