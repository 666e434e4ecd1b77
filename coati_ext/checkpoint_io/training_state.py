"""Training checkpoints that survive any crash and load into any layout.

    save_training_state(root, step, pieces=..., rank_state=..., shared_state=..., keep_last=2, group=world)
    state = agree_on_training_state(root, world)       # None: nothing there, a fresh start
    for piece, tensor in state.read(pieces_of_this_rank):
        ...

Every rank writes its own file of flat arrays (`Piece`), so nothing is gathered; a rank of another layout reads the byte
ranges that it needs from the files that have them. `state_manifest` says how a checkpoint becomes complete.
Left out: collecting and restoring what the state consists of, which is the trainer's.
"""

import json
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from coati_ext.checkpoint_io.state_file import (
    Digest,
    StoredPiece,
    check_file,
    check_pieces,
    encode_state,
    read_index,
    read_ranges,
    read_rank_state,
    write_rank_file,
)
from coati_ext.checkpoint_io.state_manifest import (
    STATE_NAME,
    Manifest,
    begin,
    checkpoint_name,
    checkpoints,
    commit,
    is_checkpoint,
    rank_file_name,
    step_name,
    work_directory,
)
from coati_ext.checkpoint_io.state_pieces import Copy, Piece, plan_copies
from coati_ext.utils.collective import errors_everywhere, rank_and_size
from coati_ext.utils.launch import print_rank_0

__all__ = ["Piece", "TrainingState", "agree_on_training_state", "find_training_state", "save_training_state"]


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """A complete checkpoint. Opening it reads its small files only."""

    directory: Path
    step: int
    num_ranks: int
    shared_state: dict[str, Any]
    files: dict[str, Digest]
    messages: tuple[str, ...] = ()
    """Newer checkpoints that were passed over, and why."""
    _indices: dict[str, list[StoredPiece]] = field(default_factory=dict, repr=False, compare=False)

    def read(self, wanted: Iterable[Piece], *, rank: int | None = None) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Each wanted piece with its array on the CPU, one at a time, put together from whatever pieces were saved.

        Args:
            rank: whose file to look into first. If it holds every wanted piece as it is, as in the layout that was
                saved, no other file is opened.

        Raises:
            ValueError: at once: no rank saved some part of a piece, or the whole tensor was of another shape, or parts
                are of different dtypes; later: a damaged file.
        """
        wanted = list(wanted)
        sources = self._sources(wanted, rank)
        plans = [(piece, *self._plan(piece, sources.get(piece.key, []))) for piece in wanted]
        return self._read(plans)

    def rank_state(self, rank: int, *, num_ranks: int | None = None) -> dict[str, Any] | None:
        """What `rank` saved for itself; None if there are now another number of ranks than then.

        Args:
            num_ranks: ranks there are now; those of the default process group if None.
        """
        if num_ranks is None:
            num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        return read_rank_state(self.directory / rank_file_name(rank)) if num_ranks == self.num_ranks else None

    def _index(self, rank: int) -> list[StoredPiece]:
        name = rank_file_name(rank)
        if name not in self._indices:
            self._indices[name] = read_index(self.directory / name)
        return self._indices[name]

    def _sources(self, wanted: list[Piece], rank: int | None) -> dict[tuple[str, str], list[StoredPiece]]:
        """Of each wanted tensor, by its key, the parts to make it from."""
        ranks: Iterable[int] = range(self.num_ranks)
        if rank is not None and rank < self.num_ranks:
            own = {stored.piece for stored in self._index(rank)}
            ranks = [rank] if own.issuperset(wanted) else ranks
        sources: dict[tuple[str, str], list[StoredPiece]] = {piece.key: [] for piece in wanted}
        for one in ranks:
            for stored in self._index(one):
                if stored.piece.key in sources:
                    sources[stored.piece.key].append(stored)
        return sources

    def _plan(self, piece: Piece, sources: list[StoredPiece]) -> tuple[torch.dtype, list[tuple[StoredPiece, list]]]:
        if not sources:
            raise ValueError(f"{self.directory} has no {piece.title}: was another model or optimizer trained?")
        try:
            plan = plan_copies(piece, [stored.piece for stored in sources])
        except ValueError as error:
            raise ValueError(f"{self.directory}: {error}") from None
        reads = [(sources[i], copies) for i, copies in plan.items()]
        dtypes = {stored.entry.dtype for stored, _ in reads} or {sources[0].entry.dtype}
        if len(dtypes) > 1:
            raise ValueError(f"{self.directory}: parts of {piece.title} have different dtypes: {dtypes}")
        return dtypes.pop(), reads

    def _read(
        self, plans: list[tuple[Piece, torch.dtype, list[tuple[StoredPiece, list[Copy]]]]]
    ) -> Iterator[tuple[Piece, torch.Tensor]]:
        for piece, dtype, reads in plans:
            tensor = torch.empty(piece.numel, dtype=dtype)
            for stored, copies in reads:
                read_ranges(stored.entry, copies, tensor)
            yield piece, tensor


# --- save


def save_training_state(
    root: str | Path,
    step: int,
    *,
    pieces: Mapping[Piece, torch.Tensor],
    rank_state: dict[str, Any],
    shared_state: dict[str, Any],
    keep_last: int,
    group: dist.ProcessGroup | None,
) -> Path:
    """Write `root/step-...`, which appears when it is complete, and then delete all but the newest `keep_last`.

    A collective: all ranks of `group` call it, and all of them raise if it fails on one; what was saved before is then
    untouched. A checkpoint of the same step is replaced.

    Args:
        root: directory of the run's checkpoints, on a file system that all hosts share; made if missing.
        pieces: this rank's flat arrays, on any device; taken to the CPU one at a time. Ranks may hold the same part.
        rank_state: this rank's own: JSON and tensors, e.g. states of random generators.
        shared_state: JSON; rank 0's is written, to `state.json`.
        group: all ranks that call; None in a single process.

    Raises:
        ValueError: a tensor that does not fit its piece, a state that JSON would change.
        OSError: the disk.
    """
    root = Path(root).absolute()
    rank, size = rank_and_size(group)
    work = work_directory(root, step)
    try:
        with errors_everywhere(group):
            if keep_last < 1 or step < 0:
                raise ValueError(f"keep_last must be at least 1 and step at least 0, got {keep_last} and {step}")
            check_pieces(pieces)
            encode_state(rank_state, "rank_state", {})
            state_text = json.dumps(encode_state(shared_state, "shared_state", None), indent=1) + "\n"
            if rank == 0:
                begin(root, step)
        with errors_everywhere(group):
            if not work.is_dir():
                raise OSError(f"{work}, made by rank 0, is not there: do all hosts share the file system?")
            digest = write_rank_file(work / rank_file_name(rank), pieces, rank_state)
        digests: list[Digest] = [digest] * size
        if group is not None:
            dist.gather_object(digest, digests if rank == 0 else None, group=group, group_dst=0)
        with errors_everywhere(group):
            if rank == 0:
                commit(root, step=step, state_text=state_text, ranks=digests, keep_last=keep_last)
    except Exception:
        if rank == 0:
            shutil.rmtree(work, ignore_errors=True)  # a full disk stays full otherwise
        raise
    return root / step_name(step)


# --- find

_Opened = tuple[TrainingState | None, str | None]  # the state, or what is wrong with it


def find_training_state(
    root_or_dir: str | Path, *, which: str | Path = "latest", files: Container[str] | None = None
) -> TrainingState | None:
    """The newest usable checkpoint of a directory of them, or the one that is named; None if there is none at all.

    A checkpoint is usable if its manifest is whole, every file is there and of its size, and the contents of `files`
    have the right sha256. One that is not is passed over if the newest was asked for, with a line in `messages`.

    Args:
        root_or_dir: directory of checkpoints; or one of them, which is then taken or refused.
        which: "latest", or the directory of one checkpoint.
        files: names of files to hash (`state.json` always is); all if None.

    Raises:
        ValueError: the one that is named is damaged, or all are; each is named with what is wrong.
    """

    def open_one(directory: Path) -> _Opened:
        try:
            state = _open(directory)
            for name, digest in state.files.items():
                check_file(directory / name, digest, content=files is None or name in files)
        except (ValueError, OSError) as error:
            return None, str(error)
        return state, None

    return _first_usable(_candidates(root_or_dir, which), root_or_dir, which, open_one)


def agree_on_training_state(
    root_or_dir: str | Path, group: dist.ProcessGroup | None, *, which: str | Path = "latest"
) -> TrainingState | None:
    """`find_training_state` for all ranks, which come to the same answer; each hashes its share of the files.

    A collective. Rank 0 prints which checkpoints were passed over.
    """
    rank, size = rank_and_size(group)
    found: list[list[Path]] = [[]]
    with errors_everywhere(group):
        if rank == 0:
            found[0] = _candidates(root_or_dir, which)
    if group is not None:
        dist.broadcast_object_list(found, group=group, group_src=0)

    def open_one(directory: Path) -> _Opened:
        state, problem = None, None
        try:
            state = _open(directory)
            for name in sorted(state.files)[rank::size]:
                check_file(directory / name, state.files[name], content=True)
        except (ValueError, OSError) as error:
            problem = str(error)
        problems: list[str | None] = [problem] * size
        if group is not None:
            dist.all_gather_object(problems, problem, group=group)
        told = list(dict.fromkeys(text for text in problems if text is not None))
        return (None, "; ".join(told)) if told else (state, None)

    state = _first_usable(found[0], root_or_dir, which, open_one)
    if state is not None and state.messages:
        print_rank_0(*state.messages)
    return state


def _candidates(root_or_dir: str | Path, which: str | Path) -> list[Path]:
    """Checkpoints to try, in this order."""
    root = Path(root_or_dir)
    if which == "latest":
        return [root] if is_checkpoint(root) else checkpoints(root)
    directory = Path(which)
    if not directory.is_dir():
        raise ValueError(f"{directory}: no such directory; a checkpoint is one, and {root} has {_names(root)}")
    if not is_checkpoint(directory):
        raise ValueError(f"{directory} is no checkpoint; it has {_names(directory)} in it, {root} has {_names(root)}")
    return [directory]


def _names(root: Path) -> str:
    return ", ".join(checkpoint_name(directory) for directory in checkpoints(root)) or "none"


def _first_usable(
    candidates: list[Path], root_or_dir: str | Path, which: str | Path, open_one: Callable[[Path], _Opened]
) -> TrainingState | None:
    damaged: list[str] = []
    for directory in candidates:
        state, problem = open_one(directory)
        if state is not None:
            going_on = f"going on from {checkpoint_name(directory)}"
            return replace(state, messages=tuple(f"checkpoint {text}: {going_on}" for text in damaged))
        damaged.append(f"{checkpoint_name(directory)} is damaged ({problem})")
    if damaged and which != "latest":
        raise ValueError(f"{which}: checkpoint {damaged[0]}; {root_or_dir} has {_names(Path(root_or_dir))}")
    if damaged:
        raise ValueError(f"{root_or_dir}: no checkpoint can be used: {', '.join(damaged)}. Move them to start anew.")
    return None


def _open(directory: Path) -> TrainingState:
    """Raises: ValueError for a manifest or a state that is missing or damaged. Looks at no rank's file."""
    manifest = Manifest.read(directory)
    check_file(directory / STATE_NAME, manifest.files[STATE_NAME], content=True)
    return TrainingState(
        directory=directory,
        step=manifest.step,
        num_ranks=manifest.num_ranks,
        shared_state=json.loads((directory / STATE_NAME).read_bytes()),
        files=manifest.files,
    )
