"""Chat and prompt JSONL: one conversation a line, checked before anything is tokenised.

A line of chats is a list of turns `[{"role": ..., "content": ...}, ...]` or an object `{"messages": [...], "tools":
[...]}`. A line of prompts is an object whose turns end with the user's, with the right answer beside them:
`{"messages": [...], "gt_answer": ...}`; its other keys are kept.

Lines are read as bytes and split at "\\n" only, so a line number here is the one an editor shows. Blank lines are
ignored; a UTF-8 byte order mark is accepted.
"""

import codecs
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

ROLES = ("system", "developer", "user", "assistant", "tool")
_LINE_FORMS = 'a list of {"role", "content"} turns or an object with "messages" (and optional "tools")'
_PROMPT_FORM = 'an object with "messages" and "gt_answer"'

OnError = Callable[[ValueError], None]
Parsed = TypeVar("Parsed")


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One checked line. Turns keep every key of the file (`tool_calls`, `reasoning_content`, ...) for the template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    line: int
    """Line number in the file, from 1."""


@dataclass(frozen=True, kw_only=True)
class Prompt(Conversation):
    """One checked line of prompts. The turns end with the user's."""

    gt_answer: Any
    """The right answer, as JSON has it; None only where golds are not required."""
    metadata: dict[str, Any]
    """The other keys of the line."""


def iter_conversations(
    input_file: str | os.PathLike[str], *, require_assistant: bool = True, on_error: OnError | None = None
) -> Iterator[Conversation]:
    """Yield the conversations of a chat JSONL file; raises as `iter_jsonl`.

    `require_assistant=False` is for turns that nothing imitates.
    """

    def parse(value: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        return _check_conversation(value, require_assistant)

    for line, (messages, tools) in iter_jsonl(input_file, parse, expected=_LINE_FORMS, on_error=on_error):
        yield Conversation(messages=messages, tools=tools, line=line)


def iter_prompts(
    input_file: str | os.PathLike[str], *, require_gold: bool = True, on_error: OnError | None = None
) -> Iterator[Prompt]:
    """Yield the prompts of a prompt JSONL file; raises as `iter_jsonl`.

    `require_gold=False` is for rewards that need no right answer (a reward model).
    """

    def parse(value: Any) -> dict[str, Any]:
        return check_prompt(value, require_gold=require_gold)

    for line, fields in iter_jsonl(input_file, parse, expected=_PROMPT_FORM, on_error=on_error):
        yield Prompt(**fields, line=line)


def iter_jsonl(
    input_file: str | os.PathLike[str],
    parse: Callable[[Any], Parsed],
    *,
    expected: str = "an object",
    on_error: OnError | None = None,
) -> Iterator[tuple[int, Parsed]]:
    """Yield (line number, what `parse` makes of the line's JSON value); a ValueError of `parse` is a broken line.

    With `on_error` a broken line is handed to it and reading goes on; without, the first broken line is raised.

    Raises:
        ValueError: a broken line; the text starts with `FILE:LINE:` and says what was expected.
        OSError: the file cannot be read.
    """
    path = os.fspath(input_file)
    with open(path, "rb") as file:
        for line, raw in enumerate(file, 1):
            if line == 1:
                raw = raw.removeprefix(codecs.BOM_UTF8)
            if not raw.strip():
                continue
            try:
                parsed = parse(_load(raw, expected))
            except ValueError as error:
                located = ValueError(f"{path}:{line}: {error}")
                if on_error is None:
                    raise located from None
                on_error(located)
                continue
            yield line, parsed


def check_prompt(value: Any, *, require_gold: bool = True) -> dict[str, Any]:
    """The fields of a `Prompt`, `line` aside.

    Raises:
        ValueError: no object, broken turns, an end that is not the user's turn, or no gold.
    """
    if not isinstance(value, dict):
        raise ValueError(f"the line is {_show(value)}; expected {_PROMPT_FORM}")
    if "messages" not in value:
        keys = ", ".join(map(repr, value)) or "none"
        raise ValueError(
            f"the object has no 'messages' (its keys: {keys}); expected {_PROMPT_FORM}, which "
            "applications/prepare_dataset.py makes of questions and answers"
        )
    messages, tools = _check_conversation(value, require_assistant=False)
    role = messages[-1]["role"]
    if role != "user":
        hint = "; the answer is the model's to give: take the turn out" if role == "assistant" else ""
        raise ValueError(f"turn {len(messages)}, the last, is of role {role!r}; expected 'user'{hint}")
    if not messages[-1]["content"].strip():
        raise ValueError(f"turn {len(messages)} (user) is empty; expected a question")
    gold = value.get("gt_answer")
    if is_blank(gold):
        if "gt_answer" in value:
            raise ValueError(f"'gt_answer' is {_show(gold)}; expected the right answer")
        if require_gold:
            keys = ", ".join(map(repr, value))
            raise ValueError(f"the object has no 'gt_answer' (its keys: {keys}); expected the right answer")
    metadata = {key: item for key, item in value.items() if key not in ("messages", "tools", "gt_answer")}
    return {"messages": messages, "tools": tools, "gt_answer": gold, "metadata": metadata}


def is_blank(gold: Any) -> bool:
    """Whether a gold is none: null, white space, an empty list or object, NaN or an infinity. 0 and false are golds.

    Example:
        >>> [is_blank(gold) for gold in (None, " ", [], float("nan"), 0, False, "0")]
        [True, True, True, True, False, False, False]
    """
    if isinstance(gold, float):
        return not math.isfinite(gold)
    return gold is None or (
        isinstance(gold, str | list | dict) and not (gold.strip() if isinstance(gold, str) else gold)
    )


def _check_conversation(
    value: Any, require_assistant: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    tools = None
    if isinstance(value, dict):
        if "messages" not in value:
            keys = ", ".join(map(repr, value)) or "none"
            raise ValueError(f"the object has no 'messages' (its keys: {keys}); expected {_LINE_FORMS}")
        tools = value.get("tools")
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise ValueError(f"'tools' is {_show(tools)}; expected a list of JSON-schema objects")
        value = value["messages"]
        if not isinstance(value, list):
            raise ValueError(f"'messages' is {_show(value)}; expected a list of turns")
    elif not isinstance(value, list):
        raise ValueError(f"the line is {_show(value)}; expected {_LINE_FORMS}")
    if not value:
        raise ValueError("the conversation has no turns; expected at least one")
    messages = [_check_turn(turn, number) for number, turn in enumerate(value, 1)]
    if require_assistant and not any(message["role"] == "assistant" for message in messages):
        raise ValueError("no assistant turn, so there is nothing to train on; expected at least one")
    return messages, tools or None


def _load(raw: bytes, expected: str) -> Any:
    try:
        return json.loads(raw.rstrip().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start + 1} of the line); save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        hint = ""
        if raw.strip() in (b"[", b"{"):
            hint = "; this looks like JSON spread over several lines: write each entry on one line"
        raise ValueError(f"not JSON ({error.msg}, column {error.colno}); expected {expected}{hint}") from None
    except RecursionError:
        raise ValueError(f"JSON nested too deeply; expected {expected}") from None


def _check_turn(turn: Any, number: int) -> dict[str, Any]:
    """Return the turn with its content as one string, or None beside tool calls."""
    if not isinstance(turn, dict):
        raise ValueError(f'turn {number} is {_show(turn)}; expected an object with "role" and "content"')
    if "role" not in turn:
        keys = ", ".join(map(repr, turn)) or "none"
        raise ValueError(f"turn {number} has no 'role' (its keys: {keys}); expected one of {', '.join(ROLES)}")
    role = turn["role"]
    if role not in ROLES:
        raise ValueError(f"turn {number} has role {_show(role)}; expected one of {', '.join(ROLES)}")
    tool_calls = turn.get("tool_calls")
    if tool_calls:
        _check_tool_calls(tool_calls, role, number)
        if turn.get("content") is None:
            return {**turn, "content": None}
    if "content" not in turn:
        raise ValueError(f"turn {number} ({role}) has no 'content'; expected a string")
    content = _join_parts(turn["content"], f"turn {number} ({role})")
    if role == "assistant" and not tool_calls and not content.strip():
        raise ValueError(f"turn {number} (assistant) is empty; expected text or tool_calls")
    return {**turn, "content": content}


def _check_tool_calls(tool_calls: Any, role: str, number: int) -> None:
    if role != "assistant":
        raise ValueError(f"turn {number} ({role}) has tool_calls; only assistant turns may")
    calls = tool_calls if isinstance(tool_calls, list) else [tool_calls]
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"turn {number} has the tool call {_show(call)}; expected "
                '{"type": "function", "function": {"name": ..., "arguments": ...}}'
            )


def _join_parts(content: Any, where: str) -> str:
    """A string as it is; a list of text parts joined, because most text models' templates take strings only."""
    if isinstance(content, list):
        for part in content:
            if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                raise ValueError(
                    f'{where} has the content part {_show(part)}; expected {{"type": "text", "text": ...}}'
                )
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{where} has content {_show(content)}; expected a string")
    try:
        content.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{where} holds half of a \\ud... escape pair, which is no character") from None
    return content


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 60 else text[:57] + "..."
