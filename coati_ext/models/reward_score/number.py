"""Reward for one number, compared exactly: nothing is rounded and no digit is dropped."""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal

from coati_ext.models.reward_score.answer import Extraction, Tags, grade_answer, last_match
from coati_ext.models.reward_score.gold import gold_text
from coati_ext.models.reward_score.score import Reason, Score, not_scorable

Percent = Literal["unit", "fraction"]

MAX_CHARS = 1000  # of an answer; what is longer is no number
_MAX_EXPONENT = 1000  # of scientific notation, so that no number takes long

_DECIMAL = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_NUMBER = re.compile(
    rf"""(?P<sign>[+-]?)[ ]?(?P<currency>[$€£]?)(?P<inner>[+-]?)
    (?:
        10\^(?P<bare_power>\(?[+-]?[0-9]+\)?)
        | (?:(?P<whole>[0-9]+)[ ])?(?P<top>{_DECIMAL})[ ]?/[ ]?(?P<bottom>{_DECIMAL})
        | (?P<decimal>{_DECIMAL})(?:[eE](?P<e>[+-]?[0-9]+)|[ ]?[*×][ ]?10\^(?P<power>\(?[+-]?[0-9]+\)?))?
    )""",  # noqa: RUF001 (the multiplication sign)
    re.VERBOSE,
)
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
# Directly behind a number, without a space: other letters are variables.
_UNITS = frozenset(
    "m cm mm km g kg mg s sec min h hr hrs ms l L ml mL lb lbs oz ft in yd mi mph am pm km/h m/s € £ ¢ ° °C °F".split()  # noqa: SIM905 (read as a list)
)
# What makes more, or something else, of the number before it.
_NOT_UNITS = frozenset(
    "or and nor not to through versus vs isn't wrong incorrect if unless plus minus times over squared cubed half "  # noqa: SIM905 (read as a list)
    "halves third thirds quarter quarters dozen dozens hundred hundreds lakh crore bn mn pi sqrt mod root factorial "
    "choose approximately about roughly than below zero maybe".split()
)
_WORDS = re.compile(r"[A-Za-z°²³/'’()-]+(?:\^[23])?")  # noqa: RUF001 (an apostrophe as phones write it)
_ASSIGNMENT = re.compile(r"([A-Za-z](?:_[0-9A-Za-z])?)[ ]?=[ ]?(?=[^= ])")
_LAST_NUMBER = re.compile(r"(?<![0-9A-Za-z_.,/])(?:[0-9]|\.[0-9])[0-9A-Za-z_.,/^]*(?: [0-9]+/[0-9]+)?%?")
_LATEX = [
    (re.compile(r"\\(?:left|right|displaystyle|!)(?![A-Za-z])"), ""),
    (re.compile(r"(?<=[0-9])\\,(?=[0-9]{3}(?![0-9]))"), ","),
    (re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox)[ ]?\{([^{}\\]*)\}"), r" \1 "),
    (re.compile(r"\\[dtc]?frac[ ]?\{([^{}]*)\}[ ]?\{([^{}]*)\}"), r" \1/\2 "),
    (re.compile(r"\\[dtc]?frac[ ]?([0-9])[ ]?([0-9])"), r" \1/\2 "),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])"), "*"),
    (re.compile(r"\^[ ]?\{([+-]?[0-9]+)\}"), r"^\1"),
    (re.compile(r"\\circ(?![A-Za-z])"), "°"),
    (re.compile(r"\^[ ]?\{?°\}?"), "°"),
    (re.compile(r"\\[,;: ]|~|\\quad(?![A-Za-z])"), " "),
    (re.compile(r"\\([$%])"), r"\1"),
]


def number_reward(
    completion: str,
    gold: Any,
    *,
    tags: Tags | None = None,
    extraction: Extraction = "strict",
    truncated: bool = False,
    percent: Percent = "unit",
    format_score: float = 1.0,
    correct_score: float = 10.0,
) -> Score:
    """ColossalAI's scheme for a gold that is one number: `gsm8k_reward_fn`, with the number read as people write it.

    Args:
        extraction: "strict" reads tags, a box or a `####` line; "flexible" also "answer is", then the last number.
        percent: what `25%` is: "unit" takes the sign as a unit, so that it equals 25 and not 0.25; "fraction" reads
            0.25. Golds are read by the same rule.

    Example:
        >>> number_reward("3 * 6 = 18\\n#### $1,018.00", "1018").score
        10.0
    """
    if percent not in ("unit", "fraction"):
        raise ValueError(f"percent is {percent!r}; expected 'unit' or 'fraction'")
    text = gold_text(gold)
    target = None if text is None else read_number(text, percent=percent)
    if target is None:
        return not_scorable("gold_unparseable")

    def judge(answer: str) -> Reason:
        return "correct" if same_number(read_number(answer, percent=percent), target) else "wrong"

    return grade_answer(
        completion,
        judge,
        tags=tags,
        extraction=extraction,
        truncated=truncated,
        format_score=format_score,
        correct_score=correct_score,
        last_resort=last_number,
    )


def same_number(answer: tuple[str | None, Fraction] | None, gold: tuple[str | None, Fraction] | None) -> bool:
    """Equal values, and equal names where both have one: `y = 4` is not `x = 4`."""
    if answer is None or gold is None:
        return False
    return answer[1] == gold[1] and (answer[0] == gold[0] or None in (answer[0], gold[0]))


def read_number(text: str, *, percent: Percent = "unit") -> tuple[str | None, Fraction] | None:
    """(name, value) of `x = 3 1/2`, the name None without one; None for text that is not exactly one number.

    Reads signs, true thousands separators, currencies, units, fractions, mixed numbers, scientific notation, a scale
    such as "million", and the LaTeX of all these. Digits are ASCII.

    Example:
        >>> read_number("x = 3\\\\frac{1}{2}"), read_number("$1,250.50"), read_number("12,5")
        (('x', Fraction(7, 2)), (None, Fraction(2501, 2)), None)
    """
    if len(text) > MAX_CHARS:
        return None
    text = plain(text)
    name = None
    if assignment := _ASSIGNMENT.match(text):
        name, text = assignment[1], text[assignment.end() :]
    match = _NUMBER.match(text)
    if match is None or (match["sign"] and match["inner"]):
        return None
    value, factor = _value(match), _factor(text[match.end() :], percent)
    return None if value is None or factor is None else (name, value * factor)


def plain(text: str) -> str:
    """One line without the LaTeX and Markdown that wrap or decorate a number."""
    text = text.replace("−", "-").strip()  # noqa: RUF001 (the minus sign)
    for opening, closing in (("**", "**"), ("`", "`"), ("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            text = text[len(opening) : -len(closing)].strip()
    text = " ".join(text.split())
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    return re.sub(r"\.$", "", " ".join(text.split()))


def last_number(text: str) -> str | None:
    """The last thing that looks like a number, with its sign; not yet read.

    Example:
        >>> last_number("5 apples, so she has -65 left.")
        '-65'
    """
    match = last_match(_LAST_NUMBER, text)
    if match is None:
        return None
    if re.search(r"\bnegative $", text[max(0, match.start() - 10) : match.start()], re.IGNORECASE):
        return "-" + match[0].rstrip(".,/")
    before = text[max(0, match.start() - 3) : match.start()]
    sign = re.search(r"(?:^|[\s(=:])([-−+])\$?$|\$([-−+])$", before)  # noqa: RUF001 (the minus sign)
    return (sign[1] or sign[2] if sign else "") + match[0].rstrip(".,/")


def _value(match: Mapping[str, str | None]) -> Fraction | None:
    sign = -1 if "-" in (match["sign"], match["inner"]) else 1
    if match["bare_power"]:
        return _scaled(Fraction(sign), match["bare_power"])
    if match["decimal"]:
        return _scaled(sign * _decimal(match["decimal"]), match["e"] or match["power"] or "0")
    top, bottom = _decimal(match["top"]), _decimal(match["bottom"])
    if bottom == 0:
        return None
    if match["whole"] is None:
        return sign * top / bottom
    proper = top < bottom and "." not in match["top"] + match["bottom"]
    return sign * (int(match["whole"]) + top / bottom) if proper else None


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", "").rstrip(".") or "0")


def _scaled(value: Fraction, exponent: str) -> Fraction | None:
    digits = exponent.strip("()")
    if len(digits) > 6 or abs(int(digits)) > _MAX_EXPONENT:
        return None
    return value * Fraction(10) ** int(digits)


def _factor(rest: str, percent: Percent) -> Fraction | None:
    """What the text behind a number multiplies it by; None if that text is not a unit."""
    spaced, rest = rest.startswith(" "), rest.strip()
    factor = Fraction(1)
    if not rest:
        return factor
    if rest.startswith("%") or re.match(r"percent\b", rest):
        spaced, rest = True, rest.removeprefix("%").removeprefix("percent").strip()
        factor = factor if percent == "unit" else Fraction(1, 100)
    words = rest.split()
    if words and spaced and words[0].lower().removesuffix("s") in _SCALES:
        factor *= _SCALES[words.pop(0).lower().removesuffix("s")]
    if not all(_WORDS.fullmatch(word) for word in words):
        return None
    if any(word.lower().strip("()'-") in _NOT_UNITS for word in words):
        return None
    if words and re.sub(r"\^[23]|[²³]", "", words[0]) not in _UNITS and (not spaced or len(words[0].strip("()")) < 2):
        return None
    return factor
