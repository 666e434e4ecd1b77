"""Find the token of a completion that completes a stop string, wherever the string begins and ends inside tokens."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

# Beside the tokens that hold a string, of which each is a byte or more: some begin a character that needs more bytes,
# or give no text, and some tokenizers strip the first of a decoded list.
_MARGIN = 8


class StopStrings:
    """Looks at the decoded end of a completion, special tokens included."""

    def __init__(self, strings: Sequence[str], tokenizer: PreTrainedTokenizerBase | None):
        """Raises: ValueError for strings without a tokenizer to decode with."""
        if strings and tokenizer is None:
            raise ValueError(f"stop_strings={tuple(strings)} need a tokenizer to look for them in text")
        self.strings = tuple(strings)
        self._tokenizer = tokenizer
        self._num_tokens = max((len(string.encode()) for string in strings), default=0) + _MARGIN

    def suspects(self, completions: list[list[int]], num_new: int) -> list[bool]:
        """Whether a stop string is near the end of each: only there the last `num_new` tokens need a look each."""
        if not self.strings:
            return [False] * len(completions)
        texts = self._decode([ids[-(self._num_tokens + num_new) :] for ids in completions])
        return [any(string in text for string in self.strings) for text in texts]

    def completed_by_last(self, ids: list[int]) -> bool:
        """Whether the last token completes a stop string; one that ended before it does not count."""
        tail = ids[-self._num_tokens :]
        before, text = self._decode([tail[:-1], tail])
        before = before.rstrip("\ufffd")  # stands for the bytes of a character that is not whole yet
        return any(text.find(string, max(0, len(before) - len(string) + 1)) >= 0 for string in self.strings)

    def _decode(self, ids: list[list[int]]) -> list[str]:
        return self._tokenizer.batch_decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
