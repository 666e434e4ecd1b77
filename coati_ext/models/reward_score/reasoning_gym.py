"""Reward of tasks from the package reasoning-gym: each task brings its own scorer."""

from collections.abc import Mapping
from typing import Any

from coati_ext.models.reward_score.answer import Extraction, Tags, find_answer
from coati_ext.models.reward_score.deadline_pool import DeadlineExceeded, DeadlinePool, shared_pool
from coati_ext.models.reward_score.score import Score, graded, not_scorable

_MAX_CHARS = 10_000


def reasoning_gym_reward(
    completion: str,
    gold: Any,
    *,
    metadata: Mapping[str, Any],
    tags: Tags | None = None,
    extraction: Extraction = "strict",
    truncated: bool = False,
    deadline_s: float = 10.0,
    pool: DeadlinePool | None = None,
    format_score: float = 1.0,
    correct_score: float = 10.0,
) -> Score:
    """`format_score` for an answer in the right form, and as much of the rest as the task's scorer (0 to 1) gives it.

    An answer is correct where the scorer gives 1. Scorers parse what a model wrote, so they run in a process with a
    deadline; a timeout gives no score.

    Args:
        metadata: as `prepare_dataset.py --task` writes it: "task", and the task's own "metadata".

    Raises:
        ValueError: metadata of no task.
        RuntimeError: no reasoning-gym, or it has no such task.
    """
    task, details = metadata.get("task"), metadata.get("metadata")
    if not isinstance(task, str) or not isinstance(details, Mapping):
        raise ValueError(
            "the reward reasoning_gym needs prompts that prepare_dataset.py made of a task of reasoning-gym (keys task "
            "and metadata); for other answers use number or math"
        )
    pool = pool or shared_pool()
    request = {"task": "reasoning_gym", "name": task, "gold": gold, "metadata": dict(details)}
    answer = find_answer(completion, tags=tags, extraction=extraction, truncated=truncated)
    if answer.text is None:
        return graded(answer.reason, format_score=format_score, correct_score=correct_score)
    texts = {answer.text, answer.line or answer.text}  # of a `####` line also the whole: a text has sentences
    try:
        marks = [pool.run({**request, "answer": text[:_MAX_CHARS]}, deadline_s) for text in sorted(texts, key=len)]
    except DeadlineExceeded:
        return not_scorable("timeout")
    if None in marks:
        return not_scorable("gold_unparseable")
    given = max(marks)
    if given >= 1 and len(answer.text) <= _MAX_CHARS:
        return graded("correct", format_score=format_score, correct_score=correct_score)
    parts = {"format": float(format_score), "answer": min(max(given, 0.0), 1.0) * (correct_score - format_score)}
    return Score(score=sum(parts.values()), accuracy=0.0, parts=parts, reason="wrong")
