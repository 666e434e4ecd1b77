"""What a reward returns, and the arithmetic on it: the format/answer scheme, sums of rewards, rates of reasons."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Reason = Literal[
    "correct",
    "wrong",
    "no_answer",
    "bad_format",
    "gold_unparseable",
    "not_scorable",
    "timeout",
    "truncated",
    "unjudged",
]
REASONS: tuple[Reason, ...] = get_args(Reason)

# Of several rewards of one sample the first of these is the reason of the sum.
_WORST_FIRST: tuple[Reason, ...] = (
    "gold_unparseable",
    "not_scorable",  # a function's None
    "timeout",
    "truncated",
    "bad_format",
    "no_answer",
    "wrong",
    "correct",
    "unjudged",  # a term of length, a reward model, a function's number: nothing says what was right
)
# The form was right, whatever the answer was.
_PAYS_FORMAT = {"correct", "wrong", "timeout"}


@dataclass(frozen=True, kw_only=True)
class Score:
    """The verdict on one completion.

    Raises: ValueError for a number that is not finite, an unknown reason, or parts that do not add up to the score.
    """

    score: float | None
    """The reward; None for a sample that says nothing about the policy: leave it out of training, and count it."""
    accuracy: float | None
    """1.0 or 0.0, apart from format and shaping; None where nothing was judged."""
    parts: dict[str, float]
    """What the score is made of; empty where it is None."""
    reason: Reason

    def __post_init__(self) -> None:
        if self.reason not in REASONS:
            raise ValueError(f"reason is {self.reason!r}; expected one of {', '.join(REASONS)}")
        for name, value in {"score": self.score, "accuracy": self.accuracy, **self.parts}.items():
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{name} of a reward is {value}; expected a finite number")
        total = sum(self.parts.values())
        if self.score is None:
            if self.parts:
                raise ValueError(f"a score of None has no parts, but got {self.parts}")
        elif not math.isclose(total, self.score, rel_tol=1e-9, abs_tol=1e-9):
            raise ValueError(f"the parts {self.parts} add up to {total}, not to the score {self.score}")


def graded(reason: Reason, *, format_score: float, correct_score: float) -> Score:
    """ColossalAI's scheme: 0 for a wrong form, `format_score` for the right form, `correct_score` for form and answer.

    Example:
        >>> graded("correct", format_score=1.0, correct_score=10.0).parts
        {'format': 1.0, 'answer': 9.0}
    """
    correct = reason == "correct"
    parts = {
        "format": float(format_score) if reason in _PAYS_FORMAT else 0.0,
        "answer": float(correct_score - format_score) if correct else 0.0,
    }
    return Score(score=sum(parts.values()), accuracy=float(correct), parts=parts, reason=reason)


def not_scorable(reason: Reason) -> Score:
    """A sample that is left out of training: its gold cannot be read, or the grader itself ran out of time."""
    return Score(score=None, accuracy=None, parts={}, reason=reason)


def add_scores(scores: Mapping[str, Score], weights: Sequence[float]) -> Score:
    """The weighted sum of the scores of one completion; parts are named `reward/part`.

    None if any is None. Accuracy is 1 where every reward that judged says so. The reason is the worst of all.

    Example:
        >>> form = Score(score=1.0, accuracy=0.0, parts={"format": 1.0}, reason="wrong")
        >>> length = Score(score=-0.5, accuracy=None, parts={"length": -0.5}, reason="unjudged")
        >>> add_scores({"gsm8k": form, "overlong": length}, [1.0, 2.0])
        Score(score=0.0, accuracy=0.0, parts={'gsm8k/format': 1.0, 'overlong/length': -1.0}, reason='wrong')
    """
    reason = min((score.reason for score in scores.values()), key=_WORST_FIRST.index)
    if any(score.score is None for score in scores.values()):
        return not_scorable(reason)
    parts = {
        f"{name}/{part}": weight * value
        for (name, score), weight in zip(scores.items(), weights, strict=True)
        for part, value in score.parts.items()
    }
    judged = [score.accuracy for score in scores.values() if score.accuracy is not None]
    return Score(score=float(sum(parts.values())), accuracy=min(judged) if judged else None, parts=parts, reason=reason)


def reason_rates(scores: Iterable[Score]) -> dict[str, float]:
    """Share of the samples with each reason, every reason named, and `unscored`: the share without a score.

    Example:
        >>> rates = reason_rates([not_scorable("timeout"), graded("wrong", format_score=1, correct_score=10)])
        >>> rates["timeout"], rates["wrong"], rates["correct"], rates["unscored"]
        (0.5, 0.5, 0.0, 0.5)
    """
    scores = list(scores)
    counts: Counter[str] = Counter(score.reason for score in scores)
    counts["unscored"] = sum(score.score is None for score in scores)
    return {name: counts[name] / max(len(scores), 1) for name in (*REASONS, "unscored")}
