"""Reward for a letter among choices."""

import re
from typing import Any

from coati_ext.models.reward_score.answer import Extraction, Tags, grade_answer
from coati_ext.models.reward_score.gold import gold_text
from coati_ext.models.reward_score.number import plain
from coati_ext.models.reward_score.score import Reason, Score, not_scorable

_MAX_CHARS = 1000
_LETTER = re.compile(
    r"(?:(?:option|choice|answer)[ ])?(?:\(([A-Za-z])\)|\[([A-Za-z])\]|([A-Za-z]))(?P<mark>[.):!]?)(?P<rest> .*)?",
    re.IGNORECASE,
)
# A second letter in what follows the first: "B. or C", "(A) and (D)", "A. not B:".
_SECOND = re.compile(r"\([A-Za-z]\)|(?:^| )[A-Z](?:[.):,]|$)|\b(?:or|and|not|nor)[ ]+\(?[A-Z]\b", re.ASCII)


def multiple_choice_reward(
    completion: str,
    gold: Any,
    *,
    tags: Tags | None = None,
    extraction: Extraction = "strict",
    truncated: bool = False,
    choices: str = "ABCDEFGHIJ",
    format_score: float = 1.0,
    correct_score: float = 10.0,
) -> Score:
    """ColossalAI's scheme for a gold that is one of the letters `choices`.

    `B`, `(B)`, `B.`, `\\text{B}` and `B. the text of the choice` are B; `A or B` is wrong, as is a sentence about B.

    Example:
        >>> multiple_choice_reward("so \\\\boxed{\\\\text{(B)}}", "B").reason
        'correct'
    """
    if not choices or not choices.isascii() or not choices.isupper():
        raise ValueError(f"choices is {choices!r}; expected capital letters such as 'ABCD'")
    text = gold_text(gold)
    target = None if text is None else _letter(text, choices)
    if target is None:
        return not_scorable("gold_unparseable")

    def judge(answer: str) -> Reason:
        return "correct" if _letter(answer, choices) == target else "wrong"

    return grade_answer(
        completion,
        judge,
        tags=tags,
        extraction=extraction,
        truncated=truncated,
        format_score=format_score,
        correct_score=correct_score,
    )


def _letter(text: str, choices: str) -> str | None:
    if len(text) > _MAX_CHARS:
        return None
    match = _LETTER.fullmatch(plain(text))
    if match is None:
        return None
    bracketed = match[1] or match[2]
    letter = (bracketed or match[3]).upper()
    rest = (match["rest"] or "").strip()
    if letter not in choices or (rest and not (bracketed or match["mark"])) or _SECOND.search(rest):
        return None
    return letter
