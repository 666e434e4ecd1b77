"""Errors that all ranks meet together, so that none waits for a rank that has failed."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

_KEPT = {"ValueError": ValueError, "OSError": OSError}


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """(0, 1) for None, which stands for a single process."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def raise_everywhere(error: Exception | None, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank if one rank has an error; also a barrier.

    The rank's own error is raised as it is. Others raise that of the first rank with one, as a ValueError or OSError if
    it is one, else as a RuntimeError.
    """
    if error is not None and group is None:
        raise error
    if group is None:
        return
    kind = next((name for name, kept in _KEPT.items() if isinstance(error, kept)), "RuntimeError")
    mine = None if error is None else (kind, str(error))
    found: list[tuple[str, str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    if error is not None:
        raise error
    for rank, failure in enumerate(found):
        if failure is not None:
            name, text = failure
            raise _KEPT.get(name, RuntimeError)(f"rank {rank}: {text}")


@contextmanager
def errors_everywhere(group: dist.ProcessGroup | None) -> Iterator[None]:
    """A block that all ranks of `group` enter and leave together; inside, no collective may follow what can fail."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    raise_everywhere(error, group)
