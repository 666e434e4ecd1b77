"""Whether what a run will save fits the disk and the limit on a file's size. Standard library only."""

import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

from coati_ext.utils.sizes import format_bytes


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Something that will be saved."""

    what: str
    """As it is called in an error, such as "the adapter"."""
    nbytes: int
    """On the disk, over all files."""
    largest_file: int


def check_space(flag: str, directory: str | Path, saved: list[Saved]) -> None:
    """Raises ValueError if the disk of `directory` or `ulimit -f` is too small; the directory may not be there yet.

    Args:
        flag: named in the error.
    """
    existing = Path(directory).absolute()
    while not existing.exists():
        existing = existing.parent
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    for one in saved:
        if limit != resource.RLIM_INFINITY and one.largest_file > limit:
            raise ValueError(
                f"{flag} {directory}: files may have {format_bytes(limit)} at most here (ulimit -f), and {one.what} "
                f"would be a file of {format_bytes(one.largest_file)}; raise the limit"
            )
    free, needed = shutil.disk_usage(existing).free, sum(one.nbytes for one in saved)
    if needed > free:
        parts = ", ".join(f"{one.what} {format_bytes(one.nbytes)}" for one in saved)
        raise ValueError(
            f"{flag} {directory}: the disk has {format_bytes(free)} free, and {format_bytes(needed)} will be saved "
            f"({parts}); free some space or give another directory"
        )
