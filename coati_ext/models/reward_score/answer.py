"""Where the answer is in a completion: inside tags, after `####` or in the last `\\boxed{}`. Linear in its length."""

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from coati_ext.models.reward_score.score import Reason, Score, graded

Extraction = Literal["strict", "flexible"]
Tags = Mapping[str, Mapping[str, Any]]

# Written by chat models at the end of a turn; a tokenizer that keeps special tokens leaves them in the text.
END_OF_TURN = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|return|>",
    "<｜end▁of▁sentence｜>",  # noqa: RUF001 (DeepSeek's token is spelt with these characters)
    "<end_of_turn>",
    "</s>",
    "<eos>",
)
_REASONING = ("<think>", "</think>")
_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*([^\n]*)")
_BOX = re.compile(r"\\(?:boxed|fbox)[ \t]*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_PHRASE = re.compile(r"\banswer(?:[ \t]{1,3}is\b|[ \t]{0,3}[:=])[ \t:*]{0,8}", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The text of an answer, or the reason why there is none."""

    text: str | None = None
    reason: Reason | None = None
    line: str | None = None
    """The whole line behind `####`, of which `text` is the first sentence."""


def grade_answer(
    completion: str,
    judge: Callable[[str], Reason],
    *,
    tags: Tags | None,
    extraction: Extraction,
    truncated: bool,
    format_score: float,
    correct_score: float,
    last_resort: Callable[[str], str | None] | None = None,
    whole_lines: bool = False,
) -> Score:
    """Find the answer, let `judge` say what it is worth, and pay by the scheme of `graded`.

    Args:
        whole_lines: what follows `####` is right too if the whole line is, as "Dr. No" or "Wait! What?".
        last_resort: finds an answer in text without any marker, where `extraction` is "flexible".
        truncated: the completion was cut at the token limit. What is not an answer then has that reason.
    """
    answer = find_answer(completion, tags=tags, extraction=extraction, truncated=truncated, last_resort=last_resort)
    reason = answer.reason or judge(answer.text)
    if whole_lines and reason == "wrong" and answer.line not in (None, answer.text):
        reason = judge(answer.line)
    return graded(reason, format_score=format_score, correct_score=correct_score)


def find_answer(
    completion: str,
    *,
    tags: Tags | None = None,
    extraction: Extraction = "strict",
    truncated: bool = False,
    last_resort: Callable[[str], str | None] | None = None,
    marks: bool = True,
) -> Answer:
    """The answer of a completion.

    With `tags` the whole completion must keep them (`tags_are_kept`); the answer lies between `answer_start` and
    `answer_end`, in the last box or after the last `####` there if it has one. Without tags it is the last of those
    two behind the reasoning; "flexible" also takes what follows "answer is", then `last_resort`. With `marks` false,
    for answers that are programs, only the tags are looked for.

    Raises: ValueError for tags or an extraction that cannot be used.

    Example:
        >>> find_answer("7 * 6 = 42, so\\n#### 42").text
        '42'
        >>> find_answer("\\\\boxed{4").reason
        'truncated'
    """
    if extraction not in ("strict", "flexible"):
        raise ValueError(f"extraction is {extraction!r}; expected 'strict' or 'flexible'")
    text = strip_end_of_turn(completion)
    if tags is not None:
        check_tags(tags)
        if not tags_are_kept(text, tags):
            return Answer(reason="truncated" if truncated else "bad_format")
        start, end = (text.index(tags[name]["text"]) for name in ("answer_start", "answer_end"))
        text = text[start + len(tags["answer_start"]["text"]) : end]
        found = (marked(text, truncated=False) if marks else None) or Answer(text=text.strip())
        if found.reason is not None:  # a box that is not closed, though the text goes on
            return Answer(reason="bad_format")
    else:
        text = _without_reasoning(text)
        found = marked(text, truncated=truncated)
        if found is None and extraction == "flexible" and not truncated:
            found = _unmarked(text, last_resort)
    if found is not None and (found.reason or found.text):
        return found
    return Answer(reason="truncated" if truncated else "no_answer")


def check_tags(tags: Tags) -> None:
    """Raise a ValueError unless `tags` has ColossalAI's form `{"answer_start": {"text": ..., "num_occur": 1}, ...}`."""
    form = '{"answer_start": {"text": "<answer>", "num_occur": 1}, ...}'
    for name, tag in tags.items():
        if not isinstance(tag, Mapping) or set(tag) != {"text", "num_occur"}:
            raise ValueError(f"response_format_tags: {name!r} is {tag!r}; expected the form {form}")
        if not isinstance(tag["text"], str) or not tag["text"].strip():
            raise ValueError(f"response_format_tags: the text of {name!r} is {tag['text']!r}; expected some text")
        count = tag["num_occur"]
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ValueError(f"response_format_tags: num_occur of {name!r} is {count!r}; expected a whole number >= 0")
    for name in ("answer_start", "answer_end"):
        if name not in tags or tags[name]["num_occur"] != 1:
            raise ValueError(f"response_format_tags: {name!r} must be there, with num_occur 1; got {dict(tags)}")
    names = list(tags)
    if names.index("answer_start") > names.index("answer_end"):
        raise ValueError("response_format_tags: 'answer_start' must come before 'answer_end'")
    for name, tag in tags.items():
        for other, longer in tags.items():
            if name != other and tag["text"] in longer["text"]:
                raise ValueError(f"response_format_tags: the text of {name!r} occurs in that of {other!r}")


def tags_are_kept(text: str, tags: Tags) -> bool:
    """Whether each tag occurs as often as it should, in the order given, with only white space after the last.

    Of tags that occur several times the first and the last occurrences must be in order.

    Example:
        >>> tags = {
        ...     "answer_start": {"text": "<answer>", "num_occur": 1},
        ...     "answer_end": {"text": "</answer>", "num_occur": 1},
        ... }
        >>> tags_are_kept("<answer>8</answer>\\n", tags), tags_are_kept("<answer>8</answer> or 9", tags)
        (True, False)
    """
    first_end = last_end = 0
    for tag in tags.values():
        if text.count(tag["text"]) != tag["num_occur"]:
            return False
        if tag["num_occur"] == 0:
            continue
        first, last = text.find(tag["text"]), text.rfind(tag["text"])
        if first < first_end or last < last_end:
            return False
        first_end, last_end = first + len(tag["text"]), last + len(tag["text"])
    return not text[last_end:].strip()


def strip_end_of_turn(text: str) -> str:
    """The text without the end-of-turn tokens at its end.

    White space before them stays: a line break says that the last line is whole.
    """
    end = bare = len(text)
    while True:
        while bare and text[bare - 1].isspace():
            bare -= 1
        token = next((token for token in END_OF_TURN if text.endswith(token, 0, bare)), None)
        if token is None:
            return text[:end]
        end = bare = bare - len(token)


def last_box(text: str) -> tuple[int, str | None] | None:
    """Start and content of the last outermost `\\boxed{}`; the content is None if its brace is never closed."""
    boxes = [(match.start(), match.end() - 1) for match in _BOX.finditer(text)]
    if not boxes:
        return None
    closing, open_braces = {}, []
    for match in _BRACE.finditer(text, boxes[0][0] + 1):
        if match[0] == "{":
            open_braces.append(match.start())
        elif match[0] == "}" and open_braces:
            closing[open_braces.pop()] = match.start()
    if boxes[-1][1] not in closing:
        return boxes[-1][0], None
    covered, outermost = -1, boxes[-1]
    for start, brace in boxes:
        if brace in closing and start > covered:
            covered, outermost = closing[brace], (start, brace)
    return outermost[0], text[outermost[1] + 1 : closing[outermost[1]]]


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The last of the matches that `finditer` finds from the left."""
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def marked(text: str, *, truncated: bool) -> Answer | None:
    """The last box or `####` line."""
    hashes = last_match(_HASHES, text)
    box = last_box(text)
    if box is not None and (hashes is None or box[0] > hashes.start()):
        return Answer(reason="truncated") if box[1] is None else Answer(text=_unwrap_box(box[1].strip()))
    if hashes is None:
        return None
    if truncated and hashes.end() == len(text):
        return Answer(reason="truncated")  # the cut may have shortened it
    return Answer(text=_first_sentence(hashes[1]), line=hashes[1].strip())


def _unmarked(text: str, last_resort: Callable[[str], str | None] | None) -> Answer:
    phrase = last_match(_PHRASE, text)
    if phrase is not None:
        line = re.sub(r"\*\*(?=[\s.,;!?]|$)", "", text[phrase.end() :].partition("\n")[0])  # **5** apples
        answer = _first_sentence(line).strip("* ")
        if answer:
            return Answer(text=answer)
    return Answer(text=last_resort(text) if last_resort else None)


def _without_reasoning(text: str) -> str:
    """What follows the reasoning: nothing, where it was begun and never ended."""
    start, end = (text.rfind(tag) for tag in _REASONING)
    if start > end:
        return ""
    return text if end < 0 else text[end + len(_REASONING[1]) :]


def _first_sentence(text: str) -> str:
    return re.split(r"[.;!?](?=\s|$)", text, maxsplit=1)[0].strip()


def _unwrap_box(text: str) -> str:
    """`\\boxed{42}` inside a box is 42; a box beside other text stays, and no reward reads it."""
    for _ in range(4):
        box = last_box(text)
        if box is None or box[0] != 0 or box[1] is None or not text.endswith("{" + box[1] + "}"):
            break
        text = box[1].strip()
    return text
