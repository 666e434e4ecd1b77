"""Supervised fine-tuning data: chat JSONL -> token ids and labels, loss on assistant turns only.

Everything is done in the constructor. Tokens are kept as 5 bytes each (int32 id, 1 byte of mask), 1M samples of 500
tokens in 2.5 GB; each rank does this for itself.

No system prompt is ever added here. A chat template may print a default one of its own (SmolLM2, Qwen2.5): it stays,
because a server that uses the same template prints it too, and `summary()` says so with its text. To be rid of it give
the line a system turn, or change `tokenizer.chat_template`.
"""

import hashlib
import os
import sys
from array import array
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from coati_ext.dataset.collator import IGNORE_INDEX
from coati_ext.dataset.jsonl import Conversation, OnError, iter_conversations
from coati_ext.dataset.line_dataset import LineDataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from coati_ext.dataset.chat_template import RenderedChat


class RawConversationDataset(LineDataset):
    """Samples of a chat JSONL file, rendered with the tokenizer's own chat template.

    Args:
        tokenizer: must have a chat template.
        input_file: chat JSONL, see `coati_ext.dataset.jsonl`; which tokens are supervised: `...chat_template`.
        max_length: longer samples are cut on the right; one that keeps no supervised token is dropped and counted.
        skip_bad_lines: count broken lines and go on, instead of raising at the first.
        template_kwargs: given to the chat template, e.g. {"enable_thinking": False} for Qwen3.
        show_progress: a progress bar while tokenising.

    Attributes:
        num_lines: lines that are not blank, of which `num_bad_lines` broken and skipped.
        num_split_lines: lines that became one sample per assistant turn because the template rewrites earlier turns.
        num_truncated, num_dropped: samples cut to `max_length`, and samples left out (not in `len()`).
        num_tokens, num_supervised_tokens: over all samples kept; the latter is the number of labels in the loss.
        notices: what the user should know of the template.

    Raises:
        ValueError: no chat template; a broken line, as `FILE:LINE: ...`; a file without one usable sample.
        OSError: the file cannot be read.
    """

    _LINE = "conversation"
    _SAMPLES = "samples"

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        input_file: str | os.PathLike[str],
        max_length: int,
        *,
        skip_bad_lines: bool = False,
        template_kwargs: dict[str, Any] | None = None,
        show_progress: bool = False,
    ) -> None:
        from coati_ext.dataset.chat_template import ChatRenderer

        if max_length < 2:
            raise ValueError(f"max_length is {max_length}; expected at least 2 (one token predicts the next)")
        super().__init__(tokenizer, input_file, max_length, skip_bad_lines)
        self.num_split_lines = self.num_truncated = 0
        self._num_without_system = 0
        self._mask = bytearray()
        self._renderer = ChatRenderer(tokenizer, template_kwargs)
        self._load(show_progress)
        self.num_supervised_tokens = sum(self._mask)
        self.notices = [*self._renderer.notices, *self._default_prompt_notices(self._num_without_system)]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """{"input_ids": (S,), "labels": (S,)}, int64; labels are -100 where not supervised."""
        ids, mask = self._sample(index)
        input_ids = torch.tensor(ids, dtype=torch.long)
        supervised = torch.tensor(mask, dtype=torch.bool)
        return {"input_ids": input_ids, "labels": input_ids.masked_fill(~supervised, IGNORE_INDEX)}

    def fingerprint(self) -> str:
        """sha256 over all samples as they are trained."""
        digest = hashlib.sha256(self._ids.tobytes())
        digest.update(self._mask)
        digest.update(self._ends.tobytes())
        return digest.hexdigest()

    def show_sample(self, index: int = 0, *, color: bool | None = None) -> str:
        """The sample as text with the supervised part marked: {+like this+}, or green if `color`.

        `color` None: as stdout is a terminal and NO_COLOR is not set.
        """
        if color is None:
            color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        opening, closing = ("\x1b[32m", "\x1b[0m") if color else ("{+", "+}")
        ids, mask = self._sample(index)
        shown = []
        for supervised, run in groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1]):
            text = self.tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
            shown.append(f"{opening}{text}{closing}" if supervised else text)
        line = self._lines[index]
        return (
            f"sample {index} (line {line}): {len(ids)} tokens, {sum(mask)} supervised, marked "
            f"{opening}like this{closing}\n" + "".join(shown)
        )

    def _sample(self, index: int) -> tuple[array, bytearray]:
        _, start, end = self._bounds(index)
        return self._ids[start:end], self._mask[start:end]

    def _read(self, on_error: OnError) -> Iterator[Conversation]:
        return iter_conversations(self.input_file, on_error=on_error)

    def _render(self, line: Conversation) -> list["RenderedChat"]:
        chats = self._renderer.render(line)
        self.num_split_lines += len(chats) > 1
        self._num_without_system += line.messages[0]["role"] != "system"
        return chats

    def _add_chunk(self, chunk: list[tuple[Conversation, "RenderedChat"]]) -> None:
        from coati_ext.dataset.chat_template import tokenize_chats

        tokens = tokenize_chats(self.tokenizer, [chat for _, chat in chunk])
        for (conversation, _), (ids, mask) in zip(chunk, tokens, strict=True):
            self._add(conversation.line, ids, mask)

    def _add(self, line: int, ids: list[int], mask: bytearray) -> None:
        if not any(mask[: self.max_length]):
            self._drop(line, ids)
            return
        self.num_truncated += len(ids) > self.max_length
        self._keep(line, ids[: self.max_length])
        self._mask += mask[: self.max_length]

    def _totals(self) -> str:
        share = 100 * self.num_supervised_tokens / self.num_tokens
        return f"{self.num_tokens:,} tokens, {self.num_supervised_tokens:,} supervised ({share:.0f}%)"

    def _counts(self) -> list[str]:
        parts = []
        if self.num_split_lines:
            parts.append(
                f"{self.num_split_lines:,} lines split by assistant turn (the template rewrites earlier turns)"
            )
        if self.num_truncated:
            parts.append(f"{self.num_truncated:,} cut to {self.max_length} tokens")
        if self.num_dropped:
            parts.append(
                f"{self.num_dropped:,} dropped, no assistant token within {self.max_length} tokens "
                f"(first: {self._first_dropped})"
            )
        return parts
