"""A conversation -> its text under the tokenizer's chat template, and which characters the loss is on.

The loss is on what the model has to produce: each assistant turn from the end of its generation header (the text of
`add_generation_prompt=True`, which is not supervised) up to and including its end-of-turn token. White space that the
template prints after that token (ChatML's newline) belongs to the next turn and is not supervised.

Templates are programs, so nothing is assumed of them that is not checked on each conversation:

* An assistant turn is found by rendering the turns before it with the generation header, and the turns up to it.
* Where the rendering up to an assistant turn is not a prefix of the rendering of the whole (Qwen3 and gpt-oss drop the
  reasoning of earlier turns, Mistral moves the tool list), the conversation becomes one rendering per assistant turn,
  with the loss on that turn only: each is then what the model meets at inference.
* A template that marks its own spans with `{% generation %}` is obeyed.
* A template that ends a turn with no special token (GLM stops at the next role marker) gets that next special token,
  or the eos token at the end of the conversation, supervised: a model must learn to stop.
* A template that does not print something the line says (a tool call, a system prompt, the reasoning of the turn that
  is trained) is refused for that line: training on less than the data says would not show otherwise.

Characters become tokens with the offsets of ONE tokenisation of the whole text, so ids are those of
`apply_chat_template` and merges across turn boundaries are kept. A token is supervised if any of its characters is.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from coati_ext.dataset.jsonl import Conversation

Span = tuple[int, int]
Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None
Rendered = TypeVar("Rendered")

_PROBE = "PROBE-7f3a1c"
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, kw_only=True)
class RenderedChat:
    """A text and the character ranges [start, end) of it that are supervised."""

    text: str
    spans: list[Span]
    has_end_of_turn: bool
    """Whether the last span ends with a special token, or is the template's own choice."""


class ChatRenderer:
    """Renders conversations with the tokenizer's chat template and finds the supervised spans.

    `notices` collects what a user should know of the template; each is said once. `chat_template` is one to use
    instead of the tokenizer's own.

    Raises:
        ValueError: the tokenizer has no chat template and none is given.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: dict[str, Any] | None = None,
        *,
        chat_template: str | None = None,
    ) -> None:
        if not (chat_template or getattr(tokenizer, "chat_template", None)):
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template, so turns cannot be told apart; use "
                "the tokenizer of the model's chat (Instruct) version, or set tokenizer.chat_template before this call"
            )
        if _ids(tokenizer, "a b") == _ids(tokenizer, "ab"):
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} ({type(tokenizer).__name__}) drops white space: 'a b' "
                "and 'ab' are the same tokens. transformers 5 does this to DeepSeek's tokenizer when there is no "
                "config.json beside it; load it with PreTrainedTokenizerFast.from_pretrained"
            )
        text = chat_template or tokenizer.get_chat_template()
        for name in template_kwargs or {}:
            if not re.search(rf"\b{name}\b", text):
                raise ValueError(f"the chat template of {tokenizer.name_or_path!r} reads no {name!r}: leave it out")
        self.tokenizer = tokenizer
        self.template_kwargs = template_kwargs or {}
        self.chat_template = chat_template
        self.special_tokens = special_tokens(tokenizer)
        self._notices: dict[str, str] = {}
        self.default_system_prompt = self._find_default_system_prompt()

    @property
    def notices(self) -> list[str]:
        return list(self._notices.values())

    def render(self, conversation: Conversation) -> list[RenderedChat]:
        """One rendering of the conversation, or one per assistant turn if the template rewrites earlier turns.

        Turns after the last assistant turn train nothing and are left out.

        Raises:
            ValueError: the template refuses the conversation or does not print all of it.
        """
        return self._with_or_without_nulls(self._render, conversation)

    def render_prompt(self, prompt: Conversation) -> str:
        """The text of all turns with the generation header behind them: what the model is to go on from.

        Raises:
            ValueError: the template refuses the turns or does not print all of them.
        """
        return self._with_or_without_nulls(self._render_prompt, prompt)

    def _render_prompt(self, messages: Messages, tools: Tools) -> str:
        text = self._text(messages, tools, add_generation_prompt=True)
        _check_prompt_printed(messages, tools, text)
        return text

    def _with_or_without_nulls(self, render: Callable[[Messages, Tools], Rendered], chat: Conversation) -> Rendered:
        messages, tools = chat.messages, chat.tools
        try:
            return render(messages, tools)
        except ValueError as error:
            if all(message["content"] is not None for message in messages):
                raise
            first = error
        # The null content of a turn with tool calls: some templates need it (DeepSeek), some cannot take it (Qwen).
        messages = [message if message["content"] is not None else {**message, "content": ""} for message in messages]
        try:
            return render(messages, tools)
        except ValueError as second:
            raise ValueError(f'{first} (with "" for the null content of a turn: {second})') from first

    def _render(self, messages: Messages, tools: Tools) -> list[RenderedChat]:
        turns = [
            self._render_turn(messages[: i + 1], tools)
            for i, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        whole = turns[-1]
        if all(whole.text.startswith(turn.text) for turn in turns):
            spans = [span for turn in turns for span in self._reach_end_of_turn(whole.text, turn)]
            turns = [RenderedChat(text=whole.text, spans=spans, has_end_of_turn=whole.has_end_of_turn)]
        return [self._append_eos(turn) for turn in turns]

    def _render_turn(self, messages: Messages, tools: Tools) -> RenderedChat:
        """Render `messages`, which end with an assistant turn, with the spans of that turn only."""
        if re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", self._template(tools)):
            text, start, spans = self._find_marked_spans(messages, tools)
            has_end_of_turn = True
        else:
            text = self._text(messages, tools)
            start = self._find_turn_start(text, messages, tools)
            stripped = text.rstrip()
            has_end_of_turn = stripped.endswith(self.special_tokens)
            spans = [(start, len(stripped) if has_end_of_turn else len(text))]
        _check_printed(messages, tools, text, text[start:])
        return RenderedChat(text=text, spans=spans, has_end_of_turn=has_end_of_turn)

    def _find_turn_start(self, text: str, messages: Messages, tools: Tools) -> int:
        if len(messages) > 1:
            prompt = self._text(messages[:-1], tools, add_generation_prompt=True)
            if text.startswith(prompt):
                return len(prompt)
        # Nothing to prompt with, or a header that the template does not print before a turn that is already there.
        probe = self._text([*messages[:-1], {"role": "assistant", "content": _PROBE}], tools)
        start = probe.find(_PROBE)
        if start < 0 or probe[:start] != text[:start]:
            raise ValueError("the chat template prints the last assistant turn where it cannot be found")
        if len(messages) > 1:
            extra = prompt[_common_length(prompt, probe[:start]) :]
            self._notices.setdefault(
                "header",
                f"the chat template's generation prompt ends with {extra!r}, which it does not print before an "
                "assistant turn: training leaves it out, inference puts it in",
            )
        return start

    def _find_marked_spans(self, messages: Messages, tools: Tools) -> tuple[str, int, list[Span]]:
        """The text, where its last turn starts, and the `{% generation %}` spans in that turn."""
        from transformers.utils.chat_template_utils import render_jinja_template

        (text,), (marked,) = self._guard(
            render_jinja_template,
            conversations=[messages],
            tools=tools,
            chat_template=self._template(tools),
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **self.template_kwargs},
        )
        context = self._text(messages[:-1], tools) if len(messages) > 1 else ""
        start = _common_length(context, text)
        spans = [span for span in marked if span[1] > start]
        rest = text[spans[-1][1] :].strip() if spans else ""
        if rest:
            self._notices.setdefault(
                "stop",
                f"the chat template's {{% generation %}} block leaves out {rest!r} at the end of an assistant turn: "
                "the model is not trained to stop there",
            )
        return text, start, spans

    def _reach_end_of_turn(self, whole: str, turn: RenderedChat) -> list[Span]:
        """The spans of `turn`; if it has no end-of-turn token, with the special token that follows it in `whole`."""
        if turn.has_end_of_turn or len(turn.text) == len(whole):
            return turn.spans
        follows = [token for token in self.special_tokens if whole.startswith(token, len(turn.text))]
        if not follows:
            self._notices.setdefault(
                "stop within",
                f"the chat template ends an assistant turn in {turn.text[-20:]!r}, with no special token there or "
                "next: the model is not trained to stop there",
            )
        start, end = turn.spans[-1]
        return [*turn.spans[:-1], (start, end + max(map(len, follows), default=0))]

    def _append_eos(self, chat: RenderedChat) -> RenderedChat:
        if chat.has_end_of_turn:
            return chat
        eos = self.tokenizer.eos_token
        if eos is None:
            self._notices.setdefault(
                "stop",
                "the chat template ends an assistant turn with no special token and the tokenizer has no eos token: "
                "the model is not trained to stop",
            )
            return chat
        self._notices.setdefault(
            "stop",
            f"the chat template ends an assistant turn with no special token: {eos!r} is put, supervised, at the end "
            "of each conversation, so that the model learns to stop",
        )
        text = chat.text + eos
        start, _ = chat.spans[-1]
        return RenderedChat(text=text, spans=[*chat.spans[:-1], (start, len(text))], has_end_of_turn=True)

    def _find_default_system_prompt(self) -> str | None:
        """The system prompt that the template itself prints when the conversation has none."""
        user = {"role": "user", "content": f"user {_PROBE}"}
        system = {"role": "system", "content": f"system {_PROBE}"}
        try:
            without, _, _ = self._text([user], None).partition(user["content"])
            before, printed, after = (
                self._text([system, user], None).partition(user["content"])[0].partition(system["content"])
            )
        except ValueError:  # no system role in this template, or it wants more than a user turn
            return None
        if not printed or len(without) < len(before) + len(after):
            return None
        if not (without.startswith(before) and without.endswith(after)):
            return None
        return without[len(before) : len(without) - len(after)].strip() or None

    def _text(self, messages: Messages, tools: Tools, add_generation_prompt: bool = False) -> str:
        return self._guard(
            self.tokenizer.apply_chat_template,
            messages,
            tools=tools,
            chat_template=self.chat_template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self.template_kwargs,
        )

    def _template(self, tools: Tools) -> str:
        return self.tokenizer.get_chat_template(self.chat_template, tools=tools)

    @staticmethod
    def _guard(render: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return render(*args, **kwargs)
        except Exception as error:  # a template can raise anything: TemplateError, TypeError, KeyError, ...
            hint = ""
            if isinstance(error, TypeError) and '"dict"' in str(error):
                hint = "; it may want the 'arguments' of tool calls as a JSON string, not an object"
            raise ValueError(f"the chat template refuses the conversation: {error}{hint}") from error


def tokenize_chats(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[RenderedChat]
) -> Iterator[tuple[list[int], bytearray]]:
    """Yield (token ids, mask) per chat; mask[t] is 1 where token t is supervised, and 0 for token 0.

    Nothing predicts token 0, so counting it would put the loss's denominator off by one.
    """
    if tokenizer.is_fast:
        encoding = tokenizer(
            [chat.text for chat in chats],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        ranges = [
            [_tokens_of(offsets, span) for span in chat.spans]
            for offsets, chat in zip(encoding["offset_mapping"], chats, strict=True)
        ]
        all_ids = encoding["input_ids"]
    else:
        all_ids = [_ids(tokenizer, chat.text) for chat in chats]
        ranges = [
            [_tokens_of_prefix(tokenizer, chat.text, ids, span) for span in chat.spans]
            for ids, chat in zip(all_ids, chats, strict=True)
        ]
    for ids, token_ranges in zip(all_ids, ranges, strict=True):
        mask = bytearray(len(ids))
        for first, last in token_ranges:
            mask[first:last] = b"\1" * (last - first)
        mask[:1] = bytes(len(mask[:1]))
        yield ids, mask


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The tokens that `skip_special_tokens` leaves out."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special = {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
    return tuple(token for token in special if token)


def _tokens_of(offsets: list[Span], span: Span) -> Span:
    """Range of the tokens that share a character with `span`."""
    first = bisect_right(offsets, span[0], key=lambda offset: offset[1])
    return first, max(first, bisect_left(offsets, span[1], key=lambda offset: offset[0]))


def _tokens_of_prefix(tokenizer: PreTrainedTokenizerBase, text: str, ids: list[int], span: Span) -> Span:
    """`_tokens_of` for tokenizers in Python, without offsets: as far as the ids of a prefix of the text agree."""

    def common(end: int) -> tuple[int, bool]:
        prefix = _ids(tokenizer, text[:end])
        agree = _common_length(prefix, ids)
        return agree, agree == len(prefix)

    first, _ = common(span[0])
    last, exact = common(span[1])
    return first, last if exact else last + 1


def _common_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _check_printed(messages: Messages, tools: Tools, text: str, turn_text: str) -> None:
    """Raise unless `text` prints every prompt and tool name, and `turn_text` all of the last (assistant) turn."""
    _check_prompt_printed(messages, tools, text)
    last, number = messages[-1], len(messages)
    squeezed = _squeeze(turn_text)
    for key in ("content", *_REASONING_KEYS):
        if isinstance(last.get(key), str) and _squeeze(last[key]) not in squeezed:
            raise ValueError(
                f"the chat template does not print all of the {key} of turn {number} (assistant), so the model would "
                "not be trained on it (DeepSeek-R1's template does this to reasoning); set a tokenizer.chat_template "
                f"that prints it. The line has {_shorten(last[key])!r}, the template prints {_shorten(turn_text)!r}"
            )
    if last["content"] is None and turn_text.lstrip().startswith("None"):
        raise ValueError(f"the chat template prints 'None' for the null content of turn {number} (assistant)")
    calls = last.get("tool_calls") or []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call)
        if function["name"] not in turn_text:
            raise ValueError(f"the chat template does not print the tool_calls of turn {number} (assistant)")
        arguments = function.get("arguments")
        if isinstance(arguments, str) and _squeeze(arguments) not in squeezed:
            raise ValueError(
                f"the chat template does not print the tool call arguments of turn {number} as they are written "
                "(a JSON string is quoted once more); give 'arguments' as an object"
            )


def _check_prompt_printed(messages: Messages, tools: Tools, text: str) -> None:
    """Raise unless `text` prints every system and user turn and the name of every tool.

    White space is not compared (templates trim). Assistant turns before the last are not checked: dropping their
    reasoning is what the model meets at inference. Tool results are not: templates may print them as JSON.
    """
    squeezed = _squeeze(text)
    for number, message in enumerate(messages, 1):
        if message["role"] in ("system", "developer", "user") and _squeeze(message["content"]) not in squeezed:
            raise ValueError(
                f"the chat template does not print all of turn {number} ({message['role']}); take the turn out, or set "
                "a tokenizer.chat_template that prints it"
            )
    for tool in tools or []:
        name = tool.get("function", tool).get("name")
        if name and name not in text:
            raise ValueError(f"the chat template does not print the tool {name!r}; it has no support for 'tools'")


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
