"""All completions of a collection, in memory until they are trained on."""

from collections.abc import Iterator

import torch

from coati_ext.experience_buffer.experience import Experience


class NaiveExperienceBuffer:
    """Keeps rows in the order they came, so that groups stay together; gives them back in batches.

    Args:
        sample_batch_size: rows of a batch.
        limit: most rows to keep, the oldest go first; 0: no limit.
        cpu_offload: keep them in host memory, for a device that is short of its own.

    Raises:
        ValueError: a size out of range.
    """

    def __init__(self, sample_batch_size: int, limit: int = 0, cpu_offload: bool = True):
        if sample_batch_size < 1:
            raise ValueError(f"sample_batch_size is {sample_batch_size}; expected at least 1")
        if limit < 0:
            raise ValueError(f"limit is {limit}; expected at least 0 (0: no limit)")
        self.sample_batch_size, self.limit, self.cpu_offload = sample_batch_size, limit, cpu_offload
        self.kept: Experience | None = None
        """All rows."""

    def __len__(self) -> int:
        return 0 if self.kept is None else len(self.kept)

    def append(self, experience: Experience) -> None:
        """Add all of its rows."""
        if self.cpu_offload:
            experience = experience.to("cpu")
        parts = [experience] if self.kept is None else [self.kept, experience]
        kept = Experience.cat(parts)
        self.kept = kept.rows(len(kept) - self.limit, len(kept)) if 0 < self.limit < len(kept) else kept

    def clear(self) -> None:
        self.kept = None

    def batches(self, device: torch.device | str, order: list[int] | None = None) -> Iterator[Experience]:
        """Every row once, on `device`, each batch with no more padding than it needs.

        Args:
            order: of the rows; default as they came.
        """
        if self.kept is None:
            return
        index = torch.tensor(list(range(len(self))) if order is None else order)
        for part in index.split(self.sample_batch_size) if len(index) else ():
            yield self.kept.take(part).to(device)

    def lengths(self) -> list[int]:
        """Tokens of each row, as they came."""
        return [] if self.kept is None else self.kept.attention_mask.sum(-1).tolist()

    def state(self) -> dict[str, torch.Tensor]:
        """What `load_state` takes back; empty without rows."""
        return {} if self.kept is None else self.kept.tensors()

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        self.kept = Experience(**state) if state else None
