"""What data sets made of JSONL lines have in common: two passes, counts, and tokens in one flat array.

Everything is done in the constructor. The first pass only parses and checks (some 50 times faster than tokenising), so
that a broken last line is found in seconds. The second renders and tokenises, because the sampler must know which
samples are left.
"""

import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from coati_ext.dataset.jsonl import Conversation, OnError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from coati_ext.dataset.chat_template import ChatRenderer

_CHUNK = 256  # lines per call of the tokenizer


class LineDataset(Dataset, ABC):
    """Token ids of the lines that are usable, and counts of those that are not.

    A subclass says what a line is, renders it and adds its tokens; its constructor sets `_renderer` and calls `_load`.
    """

    _LINE: str  # what a line holds, and what becomes of it
    _SAMPLES: str
    _renderer: "ChatRenderer"

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        input_file: str | os.PathLike[str],
        max_length: int,
        skip_bad_lines: bool,
    ) -> None:
        self.tokenizer = tokenizer
        self.input_file = os.fspath(input_file)
        self.max_length = max_length
        self.skip_bad_lines = skip_bad_lines
        self.num_lines = self.num_bad_lines = self.num_dropped = 0
        self.num_tokens = 0
        self.notices: list[str] = []
        self._first_bad = self._first_dropped = ""
        self._ids = array("i")
        self._ends = array("q")
        self._lines = array("q")

    @abstractmethod
    def _read(self, on_error: OnError) -> Iterator[Conversation]:
        """The lines of the file."""

    @abstractmethod
    def _render(self, line: Any) -> list[Any]:
        """What is to be tokenised of one line. Raises ValueError for a line that the template refuses."""

    @abstractmethod
    def _add_chunk(self, chunk: list[tuple[Any, Any]]) -> None:
        """Tokenise (line, rendering) pairs and keep or drop each with `_keep` or `_drop`."""

    @abstractmethod
    def _counts(self) -> list[str]:
        """Counts of what was changed or left out, for people."""

    @abstractmethod
    def _totals(self) -> str:
        """Sizes of what was kept, for people."""

    def __len__(self) -> int:
        return len(self._ends)

    def max_token_id(self) -> int:
        return max(self._ids)

    def summary(self) -> str:
        """One line for the terminal: counts, what was left out, and notices on the template."""
        notes = (f"note: {notice}" for notice in self.notices)
        return "; ".join((f"{self.input_file}: {self._all_counts()}", self._totals(), *notes))

    def _load(self, show_progress: bool) -> None:
        for _ in self._read(self._on_bad_line):
            self.num_lines += 1
        self.num_lines += self.num_bad_lines
        if self.num_lines == 0:
            raise ValueError(f"{self.input_file}: the file is empty; expected one {self._LINE} a line")
        rendered = self._render_all(show_progress)
        while chunk := list(islice(rendered, _CHUNK)):
            self._add_chunk(chunk)
        if not self._ends:
            advice = "Raise max_length" if self.num_dropped else "Mend the lines"
            raise ValueError(f"{self.input_file}: no usable {self._SAMPLES[:-1]}. {self._all_counts()}. {advice}")
        self.num_tokens = len(self._ids)

    def _render_all(self, show_progress: bool) -> Iterator[tuple[Any, Any]]:
        """Yield (line, rendering); lines that the template refuses are broken lines."""
        from tqdm import tqdm

        lines = self._read(lambda error: None)  # broken lines were counted in the first pass
        total = self.num_lines - self.num_bad_lines
        for line in tqdm(lines, total=total, desc="tokenise", unit="line", disable=not show_progress):
            try:
                renderings = self._render(line)
            except ValueError as error:
                self._on_bad_line(ValueError(f"{self.input_file}:{line.line}: {error}"))
                continue
            yield from ((line, rendering) for rendering in renderings)

    def _on_bad_line(self, error: ValueError) -> None:
        if not self.skip_bad_lines:
            raise error
        self.num_bad_lines += 1
        self._first_bad = self._first_bad or str(error)

    def _keep(self, line: int, ids: list[int]) -> None:
        self._ids.extend(ids)
        self._ends.append(len(self._ids))
        self._lines.append(line)

    def _drop(self, line: int, ids: list[int]) -> None:
        self.num_dropped += 1
        self._first_dropped = self._first_dropped or f"line {line}, {len(ids)} tokens"

    def _bounds(self, index: int) -> tuple[int, int, int]:
        """(index from 0, first token, token behind the last) of a sample."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self._SAMPLES[:-1]} {index} of {len(self)}")
        index %= len(self)
        return index, self._ends[index - 1] if index else 0, self._ends[index]

    def _default_prompt_notices(self, num_without_system: int) -> Iterator[str]:
        default = self._renderer.default_system_prompt
        if num_without_system and default:
            yield (
                f"the chat template adds its own system prompt to the {num_without_system:,} lines without one: "
                f"{default!r}"
            )

    def _all_counts(self) -> str:
        parts = [f"{self.num_lines:,} lines -> {len(self):,} {self._SAMPLES}"]
        if self.num_bad_lines:
            parts.append(f"{self.num_bad_lines:,} bad lines skipped (first: {self._first_bad})")
        return ", ".join([*parts, *self._counts()])
