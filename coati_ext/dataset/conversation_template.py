"""Conversation templates as ColossalChat has them: how a prompt is written, where its completion stops, what it holds.

A template file is one JSON object:

    chat_template           jinja; null or absent: the tokenizer's own
    system_message          put before conversations without a system turn; null or absent: none
    stop_ids                token ids that end a completion
    end_of_assistant        the text that ends an assistant turn; the token it ends in is one of stop_ids
    response_format_tags    {name: {"text": "<think>", "num_occur": 1}, ...}: what a completion must hold, how often
"""

import difflib
import json
import os
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from coati_ext.dataset.jsonl import Conversation

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

Tags = dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class ConversationTemplate:
    """How prompts of a model are written and its completions read.

    Raises:
        ValueError: a field of the wrong kind, by name. What needs the tokenizer is checked by `check`.
    """

    stop_ids: tuple[int, ...]
    """Token ids, any of which ends a completion."""
    end_of_assistant: str
    """The text that ends an assistant turn."""
    chat_template: str | None = None
    """Jinja; None: the tokenizer's own."""
    system_message: str | None = None
    """Put before conversations without a system turn."""
    response_format_tags: Tags = field(default_factory=dict)
    """{name: {"text": ..., "num_occur": ...}}; empty: no format is asked for."""

    def __post_init__(self) -> None:
        stop_ids = self.stop_ids
        if not isinstance(stop_ids, list | tuple) or not stop_ids or not all(type(token) is int for token in stop_ids):
            raise ValueError(f"'stop_ids' is {stop_ids!r}; expected a list of one or more token ids")
        if not isinstance(self.end_of_assistant, str) or not self.end_of_assistant.strip():
            raise ValueError(f"'end_of_assistant' is {self.end_of_assistant!r}; expected the text that ends a turn")
        for name in ("chat_template", "system_message"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value.strip()):
                raise ValueError(f"{name!r} is {value!r}; expected text, or null for none")
        if not isinstance(self.response_format_tags, dict):
            raise ValueError(f"'response_format_tags' is {self.response_format_tags!r}; expected an object of tags")
        for name, tag in self.response_format_tags.items():
            _check_tag(name, tag)
        object.__setattr__(self, "stop_ids", tuple(dict.fromkeys(stop_ids)))  # each once, and hashable

    def check(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Raise ValueError for what does not fit the tokenizer.

        That is stop ids outside the vocabulary, an end of turn that is no token or does not stop a completion, and a
        chat template that does not render a question.
        """
        from coati_ext.dataset.chat_template import ChatRenderer

        size = max(len(tokenizer), *(token + 1 for token in getattr(tokenizer, "added_tokens_decoder", {})), 0)
        for token in self.stop_ids:
            if not 0 <= token < size:
                raise ValueError(
                    f"'stop_ids' has {token}, but the tokenizer {tokenizer.name_or_path!r} has tokens 0 to {size - 1}: "
                    "the template is of another model"
                )
        token = _last_token(tokenizer, self.end_of_assistant)
        if token is None:
            raise ValueError(
                f"'end_of_assistant' is {self.end_of_assistant!r}, which neither is nor ends in a special token of the "
                f"tokenizer {tokenizer.name_or_path!r}: no completion would end with it"
            )
        if token not in self.stop_ids:
            raise ValueError(
                f"'end_of_assistant' {self.end_of_assistant!r} ends in token {token}, which is not in 'stop_ids' "
                f"{list(self.stop_ids)}: completions would run past it; add {token}"
            )
        messages = [{"role": "user", "content": "2 + 2?"}]
        if self.system_message is not None:
            messages.insert(0, {"role": "system", "content": self.system_message})
        renderer = ChatRenderer(tokenizer, chat_template=self.chat_template)
        renderer.render_prompt(Conversation(messages=messages, tools=None, line=0))


def read_conversation_template(
    file: str | os.PathLike[str], tokenizer: "PreTrainedTokenizerBase"
) -> ConversationTemplate:
    """The template of a JSON file, checked against the tokenizer.

    Raises:
        ValueError: no JSON object, an unknown or missing key, or a value that does not fit; names the file and the key.
        OSError: the file cannot be read.
    """
    path = os.fspath(file)
    try:
        with open(path, encoding="utf-8-sig") as stream:
            template = _from_json(json.load(stream))
        template.check(tokenizer)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return template


def template_of(
    tokenizer: "PreTrainedTokenizerBase", generation_config: "GenerationConfig | None" = None
) -> ConversationTemplate:
    """The template that a model brings itself: its tokenizer's chat template, no system message, no tags.

    A completion stops at the token with which the chat template ends an assistant turn, at the eos tokens of
    `generation_config`, and at the tokenizer's.

    Raises:
        ValueError: no chat template, none of these tokens, or one outside the vocabulary.
    """
    end_of_turn = _end_of_turn(tokenizer)
    end_of_assistant = end_of_turn or tokenizer.eos_token
    eos = getattr(generation_config, "eos_token_id", None)
    stop_ids = [
        _last_token(tokenizer, end_of_turn) if end_of_turn else None,
        *(eos if isinstance(eos, list | tuple) else [eos]),
        tokenizer.eos_token_id,
    ]
    stop_ids = [token for token in stop_ids if token is not None]
    if end_of_assistant is None or not stop_ids:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} has no eos token and its chat template ends a turn with no "
            "special token, so completions would never stop; give a conversation template with 'stop_ids'"
        )
    template = ConversationTemplate(stop_ids=tuple(stop_ids), end_of_assistant=end_of_assistant)
    template.check(tokenizer)
    return template


def _from_json(value: Any) -> ConversationTemplate:
    known = [item.name for item in fields(ConversationTemplate)]
    if not isinstance(value, dict):
        raise ValueError(f"expected an object with the keys {', '.join(known)}, found {type(value).__name__}")
    for key in value:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise ValueError(f"unknown key {key!r}; {hint}")
    for key in ("stop_ids", "end_of_assistant"):
        if key not in value:
            raise ValueError(f"no {key!r}; it is required")
    if value.get("response_format_tags") is None:
        value = {key: item for key, item in value.items() if key != "response_format_tags"}
    return ConversationTemplate(**value)


def _check_tag(name: str, tag: Any) -> None:
    where = f"'response_format_tags': {name!r}"
    if not isinstance(tag, dict) or set(tag) != {"text", "num_occur"}:
        raise ValueError(f'{where} is {tag!r}; expected {{"text": ..., "num_occur": ...}}')
    if not isinstance(tag["text"], str) or not tag["text"].strip():
        raise ValueError(f"{where} has the text {tag['text']!r}; expected some")
    if type(tag["num_occur"]) is not int or tag["num_occur"] < 1:
        raise ValueError(f"{where} has num_occur {tag['num_occur']!r}; expected 1 or more")


def _last_token(tokenizer: "PreTrainedTokenizerBase", text: str) -> int | None:
    """The id of the special or added token that `text` ends in, white space aside."""
    from coati_ext.dataset.chat_template import special_tokens

    added = map(str, getattr(tokenizer, "added_tokens_decoder", {}).values())
    matches = [token for token in {*special_tokens(tokenizer), *added} if token and text.rstrip().endswith(token)]
    return tokenizer.convert_tokens_to_ids(max(matches, key=len)) if matches else None


def _end_of_turn(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """The special token with which the chat template ends an assistant turn."""
    from coati_ext.dataset.chat_template import ChatRenderer

    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is 4."}]
    (chat,) = ChatRenderer(tokenizer).render(Conversation(messages=messages, tools=None, line=0))
    token = _last_token(tokenizer, chat.text)
    return None if token is None else tokenizer.convert_ids_to_tokens(token)
