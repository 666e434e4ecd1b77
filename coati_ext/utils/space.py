"""Whether what a run will save fits the disk and the limit on a file's size. Standard library only."""

import resource
import shutil
from dataclasses import dataclass
from pathlib import Path


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
                f"{flag} {directory}: files may have {_size(limit)} at most here (ulimit -f), and {one.what} "
                f"would be a file of {_size(one.largest_file)}; raise the limit"
            )
    free, needed = shutil.disk_usage(existing).free, sum(one.nbytes for one in saved)
    if needed > free:
        parts = ", ".join(f"{one.what} {_size(one.nbytes)}" for one in saved)
        raise ValueError(
            f"{flag} {directory}: the disk has {_size(free)} free, and {_size(needed)} will be saved ({parts}); free "
            "some space or give another directory"
        )


def _size(nbytes: int) -> str:
    """As in "3.2 GB".

    Example:
        >>> _size(512), _size(3_200_000)
        ('512 bytes', '3.2 MB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} bytes"
