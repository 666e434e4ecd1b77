"""Directories of training checkpoints: which there are, which are complete, and changes that survive a kill.

    ROOT/step-00000120/rank-00003.safetensors    its pieces of tensors, and its own state
                       state.json                what all ranks share
                       manifest.json             size and sha256 of every file; written last
    ROOT/.step-00000130.incomplete               being written or deleted, or left by a killed run
    ROOT/.step-00000120.replaced                 being replaced by another of the same step; counts until that arrives

A directory gets its name `step-...` when it is complete and on the disk, and loses it before anything in it is deleted.
"""

import hashlib
import json
import re
import shutil
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coati_ext.checkpoint_io.state_file import Digest, check_file, sync_directory, write_text

MANIFEST_NAME, STATE_NAME = "manifest.json", "state.json"
_FORMAT_VERSION = 1
_NAME = re.compile(r"step-(\d{8,})")
_LEFT = re.compile(r"\.(step-\d{8,})\.(incomplete|replaced)")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a complete checkpoint consists of."""

    step: int
    sequence: int
    """Counts the checkpoints saved to a directory: the newest has the highest, even if it went back some steps."""
    num_ranks: int
    files: dict[str, Digest]

    def write(self, directory: Path) -> None:
        content = {"format_version": _FORMAT_VERSION, **asdict(self)}
        write_text(directory / MANIFEST_NAME, _text({**content, "sha256": _checksum(content)}))

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Raises: ValueError, beginning with the file's name, if it is missing, damaged or of another version."""
        try:
            content = json.loads((directory / MANIFEST_NAME).read_bytes())
            damaged = content.pop("sha256") != _checksum(content)
        except FileNotFoundError:
            raise ValueError(f"{MANIFEST_NAME}: missing") from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            damaged = True
        if damaged:
            raise ValueError(f"{MANIFEST_NAME}: damaged")
        version = content.pop("format_version")
        if version != _FORMAT_VERSION:
            raise ValueError(f"{MANIFEST_NAME}: format version {version}, this program reads {_FORMAT_VERSION}")
        files = {name: Digest(**digest) for name, digest in content.pop("files").items()}
        return cls(files=files, **content)


def _text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(_text(content).encode()).hexdigest()


def rank_file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def checkpoint_name(directory: Path) -> str:
    """`step-...`, also of a directory that is being replaced."""
    left = _LEFT.fullmatch(directory.name)
    return left[1] if left else directory.name


def is_checkpoint(directory: Path) -> bool:
    """Whether it looks like one checkpoint and not like a directory of them."""
    return _NAME.fullmatch(directory.name) is not None or (directory / MANIFEST_NAME).exists()


def checkpoints(root: Path) -> list[Path]:
    """The checkpoints in a directory, complete or damaged, newest first; [] if it is not there.

    Those whose manifest cannot be read come first: what is older than what is not known.
    """
    if root.exists() and not root.is_dir():
        raise ValueError(f"{root} is a file; checkpoints are in a directory: give another path")

    def age(directory: Path) -> tuple[bool, int, str]:
        try:
            return False, Manifest.read(directory).sequence, directory.name
        except (ValueError, OSError):
            return True, 0, checkpoint_name(directory)

    found = [entry for entry in root.iterdir() if entry.is_dir()] if root.exists() else []
    named = [entry for entry in found if _NAME.fullmatch(entry.name)]
    replaced = [entry for entry in found if entry.name.endswith(".replaced") and _LEFT.fullmatch(entry.name)]
    named += [entry for entry in replaced if not entry.with_name(checkpoint_name(entry)).exists()]
    return sorted(named, key=age, reverse=True)


# --- change


def begin(root: Path, step: int) -> Path:
    """Make the directory to write the checkpoint of `step` into, and clear up after killed runs.

    Raises:
        OSError: the disk, or a file in the way.
    """
    final = root / step_name(step)
    if final.exists() and not final.is_dir():
        raise FileExistsError(f"{final} is a file, in the way of a checkpoint: move it away")
    if not root.exists():
        root.mkdir(parents=True)
        sync_directory(root.parent)
    _clear(root)
    work = work_directory(root, step)
    work.mkdir()
    return work


def work_directory(root: Path, step: int) -> Path:
    return root / f".{step_name(step)}.incomplete"


def commit(root: Path, *, step: int, state_text: str, ranks: list[Digest], keep_last: int) -> Path:
    """Complete what the ranks have written, give it its name, and delete all but the newest `keep_last`."""
    work, final = work_directory(root, step), root / step_name(step)
    files = {rank_file_name(rank): digest for rank, digest in enumerate(ranks)}
    for name, digest in files.items():
        try:
            check_file(work / name, digest, content=False)
        except ValueError as error:
            raise OSError(f"{work}: {error}; the directory must be on a file system that all hosts share") from None
    files[STATE_NAME] = write_text(work / STATE_NAME, state_text)
    sequence = 1 + max((manifest.sequence for _, manifest in _readable(root)), default=0)
    Manifest(step=step, sequence=sequence, num_ranks=len(ranks), files=files).write(work)
    sync_directory(work)
    if final.exists():
        final.rename(root / f".{final.name}.replaced")
    work.rename(final)
    sync_directory(root)
    _clear(root)
    _keep_newest(root, keep_last)
    return final


def _readable(root: Path) -> list[tuple[Path, Manifest]]:
    """Checkpoints whose manifest can be read, newest first."""
    found = []
    for directory in checkpoints(root):
        try:
            found.append((directory, Manifest.read(directory)))
        except (ValueError, OSError):
            continue  # not known to be ours to count or delete; its step is replaced when training gets there
    return found


def _keep_newest(root: Path, keep_last: int) -> None:
    kept = 0
    for directory, manifest in _readable(root):
        try:
            for name, digest in manifest.files.items():
                check_file(directory / name, digest, content=False)
            kept += 1
            is_wanted = kept <= keep_last
        except ValueError:  # a file is missing or cut short: of no use, however new
            is_wanted = False
        except OSError:  # not known
            is_wanted = True
        if not is_wanted:
            _delete(directory)


def _clear(root: Path) -> None:
    """Delete what killed runs left; one that was to be replaced by what never came is put back."""
    for entry in list(root.iterdir()):
        if _LEFT.fullmatch(entry.name) is None:
            continue
        final = entry.with_name(checkpoint_name(entry))
        if entry.name.endswith(".replaced") and not final.exists():
            entry.rename(final)
        else:
            _delete(entry)


def _delete(directory: Path) -> None:
    """Delete a checkpoint, under a name that says that it is no longer complete."""
    try:
        if _NAME.fullmatch(directory.name):
            directory = directory.rename(directory.with_name(f".{directory.name}.incomplete"))
        shutil.rmtree(directory)
    except OSError as error:  # what was saved is complete, and the next save tries this again
        warnings.warn(f"{directory} could not be deleted: {error}", stacklevel=2)
