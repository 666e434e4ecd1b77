"""Prompts for reinforcement learning: prompt JSONL -> token ids that end where the model is to go on, and golds.

The ids are those of `apply_chat_template(..., add_generation_prompt=True)`: what a server makes of the same turns. The
tokenizer's own beginning-of-sequence token is therefore not added; the template prints it or there is none. Where a
template prints it and the first turn holds it once more, one is taken out.

A prompt is never cut, because half a question has another answer: too long ones are left out and counted.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from coati_ext.dataset.conversation_template import ConversationTemplate
from coati_ext.dataset.jsonl import OnError, Prompt, iter_prompts
from coati_ext.dataset.line_dataset import LineDataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RawPromptDataset(LineDataset):
    """Prompts of a prompt JSONL file, rendered with a chat template.

    Args:
        tokenizer: must have a chat template, unless `template` has one.
        input_file: prompt JSONL, see `coati_ext.dataset.jsonl`.
        max_length: prompts of more tokens are dropped and counted.
        template: whose chat template and system message are used; a system turn of the line's own comes first.
        require_gold: a line without `gt_answer` is broken. False is for rewards that need none.
        skip_bad_lines: count broken lines and go on, instead of raising at the first.
        template_kwargs: given to the chat template, e.g. {"enable_thinking": False} for Qwen3.
        show_progress: a progress bar while tokenising.

    Attributes:
        num_lines: lines that are not blank, of which `num_bad_lines` broken and skipped.
        num_dropped: prompts longer than `max_length` (not in `len()`).
        num_tokens, max_prompt_length: all tokens, and those of the longest prompt kept.
        notices: what the user should know of the template.

    Raises:
        ValueError: no chat template; a broken line, as `FILE:LINE: ...`; a file without one usable prompt.
        OSError: the file cannot be read.
    """

    _LINE = "prompt"
    _SAMPLES = "prompts"

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        input_file: str | os.PathLike[str],
        max_length: int,
        *,
        template: ConversationTemplate | None = None,
        require_gold: bool = True,
        skip_bad_lines: bool = False,
        template_kwargs: dict[str, Any] | None = None,
        show_progress: bool = False,
    ) -> None:
        from coati_ext.dataset.chat_template import ChatRenderer

        if max_length < 1:
            raise ValueError(f"max_length is {max_length}; expected at least 1")
        super().__init__(tokenizer, input_file, max_length, skip_bad_lines)
        self.require_gold = require_gold
        self._system_message = None if template is None else template.system_message
        self._num_without_system = self._num_other_system = self._num_doubled = 0
        self._texts: list[str] = []
        self._prompts: list[Prompt] = []
        chat_template = None if template is None else template.chat_template
        self._renderer = ChatRenderer(tokenizer, template_kwargs, chat_template=chat_template)
        self._load(show_progress)
        self.max_prompt_length = max(end - start for _, start, end in map(self._bounds, range(len(self))))
        self.notices = [*self._renderer.notices, *self._find_notices()]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """{"input_ids": list of int, "text", "gt_answer", "metadata": other keys of the line, "source": FILE:LINE}."""
        index, start, end = self._bounds(index)
        prompt = self._prompts[index]
        return {
            "input_ids": self._ids[start:end].tolist(),
            "text": self._texts[index],
            "gt_answer": prompt.gt_answer,
            "metadata": prompt.metadata,
            "source": f"{self.input_file}:{prompt.line}",
        }

    def fingerprint(self) -> str:
        """sha256 over the tokens, golds and metadata of all prompts, in order."""
        digest = hashlib.sha256(self._ids.tobytes())
        digest.update(self._ends.tobytes())
        for prompt in self._prompts:
            digest.update(json.dumps([prompt.gt_answer, prompt.metadata], sort_keys=True).encode())
        return digest.hexdigest()

    def show_sample(self, index: int = 0) -> str:
        """The prompt as the model meets it, special tokens and all, with its gold."""
        item = self[index]
        text = self.tokenizer.decode(item["input_ids"], skip_special_tokens=False)
        gold = json.dumps(item["gt_answer"], ensure_ascii=False)
        return f"prompt {index} ({item['source']}): {len(item['input_ids'])} tokens, gt_answer {gold}\n{text}"

    def _read(self, on_error: OnError) -> Iterator[Prompt]:
        return iter_prompts(self.input_file, require_gold=self.require_gold, on_error=on_error)

    def _render(self, line: Prompt) -> list[str]:
        has_system = line.messages[0]["role"] in ("system", "developer")
        if not has_system and self._system_message is not None:
            line = replace(line, messages=[{"role": "system", "content": self._system_message}, *line.messages])
        text = self._renderer.render_prompt(line)
        self._num_without_system += not has_system
        self._num_other_system += has_system and line.messages[0]["content"] != self._system_message
        return [self._without_double_bos(text)]

    def _add_chunk(self, chunk: list[tuple[Prompt, str]]) -> None:
        texts = [text for _, text in chunk]
        all_ids = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        for (prompt, text), ids in zip(chunk, all_ids, strict=True):
            if len(ids) > self.max_length:
                self._drop(prompt.line, ids)
                continue
            self._keep(prompt.line, ids)
            self._texts.append(text)
            self._prompts.append(replace(prompt, messages=[], tools=None))  # the text has them

    def _without_double_bos(self, text: str) -> str:
        bos = self.tokenizer.bos_token
        self._num_doubled += bool(bos) and text.startswith(bos + bos)
        while bos and text.startswith(bos + bos):
            text = text[len(bos) :]
        return text

    def _find_notices(self) -> Iterator[str]:
        if self._system_message is None:
            yield from self._default_prompt_notices(self._num_without_system)
        elif self._num_other_system:
            yield (
                f"{self._num_other_system:,} prompts keep a system turn of their own: the template's system_message "
                "is not put before them"
            )
        bos = self.tokenizer.bos_token
        if self._num_doubled:
            yield f"{self._num_doubled:,} prompts began with {bos!r} twice; one is taken out"
        if self._adds_bos() and not self._texts[0].startswith(bos):
            yield f"the tokenizer puts {bos!r} before plain text, the chat template does not: prompts begin without it"

    def _adds_bos(self) -> bool:
        bos = self.tokenizer.bos_token_id
        return bos is not None and self.tokenizer("a", verbose=False)["input_ids"][:1] == [bos]

    def _totals(self) -> str:
        mean = self.num_tokens / len(self)
        return f"{self.num_tokens:,} tokens, {mean:.0f} a prompt, {self.max_prompt_length:,} at most"

    def _counts(self) -> list[str]:
        if not self.num_dropped:
            return []
        return [f"{self.num_dropped:,} dropped, longer than {self.max_length} tokens (first: {self._first_dropped})"]
