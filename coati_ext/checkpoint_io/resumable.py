"""An output directory that a killed run leaves to be continued.

Work goes to `OUTPUT.incomplete`, which becomes `OUTPUT` when everything is there: a directory under its final name is
complete. Beside the finished files lies a journal: first what is being made of which input, then one line for each
finished file with its checksum.
"""

import fcntl
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from coati_ext.checkpoint_io.hf_directory import CONFIG_NAME

JOURNAL_NAME = ".coati_ext-journal.jsonl"
SUFFIX = ".incomplete"


class ResumableDirectory:
    """What `resumable_directory` yields: the directory to write into, and which files in it were finished before."""

    def __init__(self, path: Path, finished: dict[str, str], journal: TextIO) -> None:
        self.path = path
        self.finished = finished
        self._journal = journal
        self._lock = threading.Lock()

    def record(self, name: str, checksum: str) -> None:
        """Note that the file `name` is complete under its final name; from any thread."""
        with self._lock:
            self._journal.write(json.dumps({"file": name, "checksum": checksum}) + "\n")
            self._journal.flush()


@contextmanager
def resumable_directory(
    output: Path, *, identity: dict[str, Any], inputs: Iterable[Path] = (), overwrite: bool = False
) -> Iterator[ResumableDirectory]:
    """Yield the directory to work in; it becomes `output` when the block ends without an error, else it stays.

    Args:
        identity: JSON that says what is being made: the tool, its options, the input files with sizes and times. Only
            an earlier run with the same identity is continued.
        inputs: files and directories that are read, and so must survive.
        overwrite: replace a model directory at `output`, and start anew where the earlier run was another.

    Raises:
        FileExistsError: `output` is not empty; or an earlier run of another identity was left unfinished.
        ValueError: the output is inside an input, or holds one.
        RuntimeError: another process is at work on the same output.
    """
    output = output.resolve()
    work = output.with_name(output.name + SUFFIX)
    check_apart(inputs, output, work)
    _check_output(output, overwrite=overwrite)
    work.mkdir(parents=True, exist_ok=True)
    with (work / JOURNAL_NAME).open("a+", encoding="utf-8") as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"another process is writing {work}; wait for it or choose another output") from None
        finished = _continued(work, journal, identity, overwrite=overwrite)
        try:
            yield ResumableDirectory(work, finished, journal)
        except BaseException:
            if [entry.name for entry in work.iterdir()] == [JOURNAL_NAME]:  # nothing to continue
                shutil.rmtree(work)
            raise
        _check_output(output, overwrite=overwrite)  # it may have appeared meanwhile
        old = Path(tempfile.mkdtemp(prefix=f".{output.name}.old-", dir=output.parent))
        if output.exists():
            output.rename(old / output.name)
        work.rename(output)
        (output / JOURNAL_NAME).unlink()
    shutil.rmtree(old)


def check_apart(inputs: Iterable[Path], *outputs: Path) -> None:
    """ValueError if an output is an input or inside one, or holds an input, links followed."""
    for path in sorted({path.resolve() for path in inputs}):  # a folder before what is in it
        for output in outputs:
            if output.resolve().is_relative_to(path):
                raise ValueError(f"the output {output} is inside the input {path}, which is never written to")
            if path.is_relative_to(output.resolve()):
                raise ValueError(f"the output {output} holds the input {path}, which must survive; choose another")


def _check_output(output: Path, *, overwrite: bool) -> None:
    if os.path.ismount(output):
        raise FileExistsError(f"{output} is a mount point, which cannot be renamed into place; give a folder below it")
    occupied = output.exists() and not (output.is_dir() and not any(output.iterdir()))
    if occupied and not overwrite:
        raise FileExistsError(f"{output} exists and is not empty; choose another output or pass --overwrite")
    if occupied and not (output / CONFIG_NAME).is_file():
        raise FileExistsError(f"{output} has no {CONFIG_NAME}, so it is not a model directory: not overwritten")


def _continued(work: Path, journal: TextIO, identity: dict[str, Any], *, overwrite: bool) -> dict[str, str]:
    """File name -> checksum of what an earlier run finished; begins the journal if there was none."""
    journal.seek(0)
    try:
        lines = list(_whole_lines(journal))
        finished = {line["file"]: line["checksum"] for line in lines[1:]}
        damaged = any(not isinstance(line, dict) for line in lines) or any(not isinstance(n, str) for n in finished)
    except (KeyError, TypeError, ValueError):
        damaged = True
    if damaged:
        raise FileExistsError(f"{work / JOURNAL_NAME} is damaged, so {work} cannot be continued; delete it")
    if not lines and any(entry.name != JOURNAL_NAME for entry in work.iterdir()):
        raise FileExistsError(f"{work} is in the way and is not an unfinished run's; move it or choose another output")
    if lines and lines[0] != identity and not overwrite:
        differing = sorted(key for key in {*lines[0], *identity} if lines[0].get(key) != identity.get(key))
        raise FileExistsError(
            f"{work} was left by a run with another {', '.join(differing)}; delete it, choose another output, or pass "
            "--overwrite to start anew"
        )
    if lines and lines[0] == identity:
        return finished
    for entry in work.iterdir():
        if entry.name != JOURNAL_NAME:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    journal.truncate(0)
    journal.write(json.dumps(identity) + "\n")
    journal.flush()
    return {}


def _whole_lines(journal: TextIO) -> Iterator[dict[str, Any]]:
    """Parsed lines; the last may have been cut short by a kill, and is then dropped."""
    text = journal.read()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        journal.truncate(len(whole.encode()))
        journal.seek(0, os.SEEK_END)
    for line in whole.splitlines():
        yield json.loads(line)
