"""Replace an adapter directory by a complete new one, and keep what else lies in it."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Readable, with sorted keys: the same content gives the same bytes."""
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


@contextmanager
def replace_directory(directory: Path) -> Iterator[Path]:
    """Yield a new directory that becomes `directory` when the block ends without an error.

    It is written beside it under a hidden name and renamed. Entries of the old directory that the new one does not
    have (other than `adapter_model.*`, which would be stale weights) are moved over, so a checkpoint's other files
    survive. What a killed run left is taken up by the next call: a half-written directory is deleted, an old one whose
    replacement had not arrived is put back.

    Raises:
        ValueError: `directory` is a file.
        OSError: it cannot be written or renamed (a mount point cannot: save to a folder below it).
    """
    directory = directory.absolute()
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file; an adapter is a directory: give another path")
    new = directory.with_name(f".{directory.name}.incomplete")
    old = directory.with_name(f".{directory.name}.replaced")
    directory.parent.mkdir(parents=True, exist_ok=True)
    if old.exists():
        if directory.exists():
            _move_over(old, directory)
        else:
            old.rename(directory)
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    try:
        yield new
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    if directory.exists():
        directory.rename(old)
    new.rename(directory)
    if old.exists():
        _move_over(old, directory)


def _move_over(old: Path, directory: Path) -> None:
    for entry in old.iterdir():
        if not (directory / entry.name).exists() and not entry.name.startswith("adapter_model."):
            entry.rename(directory / entry.name)
    shutil.rmtree(old)
