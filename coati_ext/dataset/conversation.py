"""Supervised fine-tuning data: chat JSONL -> token ids and labels, loss on assistant turns only.

Everything is done in the constructor, in two passes. The first only parses and checks (some 50 times faster than
tokenising), so that a broken last line is found in seconds. The second renders and tokenises, because the sampler must
know which samples are left. Tokens are kept as 5 bytes each (int32 id, 1 byte of mask), 1M samples of 500 tokens in
2.5 GB; each rank does this for itself.

No system prompt is ever added here. A chat template may print a default one of its own (SmolLM2, Qwen2.5): it stays,
because a server that uses the same template prints it too, and `summary()` says so with its text. To be rid of it give
the line a system turn, or change `tokenizer.chat_template`.
"""

import hashlib
import os
import sys
from array import array
from collections.abc import Iterator
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from coati_ext.dataset.collator import IGNORE_INDEX
from coati_ext.dataset.jsonl import Conversation, iter_conversations

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from coati_ext.dataset.chat_template import RenderedChat

_CHUNK = 256  # conversations per call of the tokenizer


class RawConversationDataset(Dataset):
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
        self.tokenizer = tokenizer
        self.input_file = os.fspath(input_file)
        self.max_length = max_length
        self.skip_bad_lines = skip_bad_lines
        self.num_lines = self.num_bad_lines = self.num_split_lines = 0
        self.num_truncated = self.num_dropped = 0
        self._num_without_system = 0
        self._first_bad = self._first_dropped = ""
        self._ids = array("i")
        self._mask = bytearray()
        self._ends = array("q")
        self._lines = array("q")
        renderer = ChatRenderer(tokenizer, template_kwargs)

        for _ in iter_conversations(self.input_file, on_error=self._on_bad_line):
            self.num_lines += 1
        self.num_lines += self.num_bad_lines
        if self.num_lines == 0:
            raise ValueError(f"{self.input_file}: the file is empty; expected one conversation a line")
        self._fill(renderer, show_progress)
        if not self._ends:
            raise ValueError(f"{self.input_file}: no usable sample. {self._counts()}. {self._advice()}")
        self.num_tokens = len(self._ids)
        self.num_supervised_tokens = sum(self._mask)
        self.notices = renderer.notices
        if self._num_without_system and renderer.default_system_prompt:
            self.notices.append(
                f"the chat template adds its own system prompt to the {self._num_without_system:,} lines without one: "
                f"{renderer.default_system_prompt!r}"
            )

    def __len__(self) -> int:
        return len(self._ends)

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

    def max_token_id(self) -> int:
        return max(self._ids)

    def summary(self) -> str:
        """One line for the terminal: counts, what was left out, and notices on the template."""
        share = 100 * self.num_supervised_tokens / self.num_tokens
        parts = [
            f"{self.input_file}: {self._counts()}",
            f"{self.num_tokens:,} tokens, {self.num_supervised_tokens:,} supervised ({share:.0f}%)",
            *(f"note: {notice}" for notice in self.notices),
        ]
        return "; ".join(parts)

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
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        start, end = (self._ends[index - 1] if index else 0), self._ends[index]
        return self._ids[start:end], self._mask[start:end]

    def _on_bad_line(self, error: ValueError) -> None:
        if not self.skip_bad_lines:
            raise error
        self.num_bad_lines += 1
        self._first_bad = self._first_bad or str(error)

    def _fill(self, renderer: Any, show_progress: bool) -> None:
        from tqdm import tqdm

        from coati_ext.dataset.chat_template import tokenize_chats

        # Broken lines were counted in the first pass.
        conversations = iter_conversations(self.input_file, on_error=lambda error: None)
        total = self.num_lines - self.num_bad_lines
        progress = tqdm(conversations, total=total, desc="tokenise", unit="line", disable=not show_progress)
        rendered = self._render(renderer, progress)
        while chunk := list(islice(rendered, _CHUNK)):
            tokens = tokenize_chats(self.tokenizer, [chat for _, chat in chunk])
            for (line, _), (ids, mask) in zip(chunk, tokens, strict=True):
                self._add(line, ids, mask)

    def _render(self, renderer: Any, conversations: Iterator[Conversation]) -> Iterator[tuple[int, "RenderedChat"]]:
        """Yield (line, rendering); lines that the template refuses are broken lines."""
        for conversation in conversations:
            try:
                chats = renderer.render(conversation)
            except ValueError as error:
                self._on_bad_line(ValueError(f"{self.input_file}:{conversation.line}: {error}"))
                continue
            self.num_split_lines += len(chats) > 1
            self._num_without_system += conversation.messages[0]["role"] != "system"
            yield from ((conversation.line, chat) for chat in chats)

    def _add(self, line: int, ids: list[int], mask: bytearray) -> None:
        if not any(mask[: self.max_length]):
            self.num_dropped += 1
            self._first_dropped = self._first_dropped or f"line {line}, {len(ids)} tokens"
            return
        self.num_truncated += len(ids) > self.max_length
        self._ids.extend(ids[: self.max_length])
        self._mask += mask[: self.max_length]
        self._ends.append(len(self._ids))
        self._lines.append(line)

    def _counts(self) -> str:
        parts = [f"{self.num_lines:,} lines -> {len(self):,} samples"]
        if self.num_split_lines:
            parts.append(
                f"{self.num_split_lines:,} lines split by assistant turn (the template rewrites earlier turns)"
            )
        if self.num_bad_lines:
            parts.append(f"{self.num_bad_lines:,} bad lines skipped (first: {self._first_bad})")
        if self.num_truncated:
            parts.append(f"{self.num_truncated:,} cut to {self.max_length} tokens")
        if self.num_dropped:
            parts.append(
                f"{self.num_dropped:,} dropped, no assistant token within {self.max_length} tokens "
                f"(first: {self._first_dropped})"
            )
        return ", ".join(parts)

    def _advice(self) -> str:
        return "Raise max_length" if self.num_dropped else "Mend the lines"
