"""One rank's file of a training checkpoint: a safetensors file with its pieces, and its own state in the metadata.

It is written front to back, one tensor at a time, and hashed on the way; of a file that is read, only the byte ranges
asked for are. Nothing is pickled.
"""

import dataclasses
import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coati_ext.checkpoint_io.safetensors_file import DTYPE_NAMES, TensorEntry, make_header, read_exactly, read_header
from coati_ext.checkpoint_io.state_pieces import Copy, Piece

_PIECES, _RANK_STATE = "pieces", "rank_state"  # in the metadata
_TENSOR = "__tensor__"  # {_TENSOR: key} stands in the JSON for a tensor of the file
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Digest:
    """What the manifest says of a file."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class StoredPiece:
    """A piece, and where its array lies."""

    piece: Piece
    entry: TensorEntry


# --- write


def check_pieces(pieces: Mapping[Piece, torch.Tensor]) -> None:
    """ValueError for a tensor that is not the flat array of its piece."""
    for piece, tensor in pieces.items():
        if tuple(tensor.shape) != (piece.numel,):
            raise ValueError(f"{piece.title}: its piece is of shape {(piece.numel,)}, the tensor {tuple(tensor.shape)}")
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"{piece.title}: {tensor.dtype} has no name in safetensors")


def encode_state(value: Any, path: str, tensors: dict[str, torch.Tensor] | None) -> Any:
    """A state as JSON that comes back equal; its tensors go to `tensors` under the names that stand for them.

    Raises:
        ValueError: what JSON would change (a tuple, a key that is no text) or cannot hold, named by its path; a tensor
            where `tensors` is None.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [encode_state(item, f"{path}[{i}]", tensors) for i, item in enumerate(value)]
    if type(value) is dict and _TENSOR not in value and all(type(key) is str for key in value):
        return {key: encode_state(item, f"{path}.{key}", tensors) for key, item in value.items()}
    if isinstance(value, torch.Tensor) and tensors is not None and value.dtype in DTYPE_NAMES:
        tensors[path] = value
        return {_TENSOR: path}
    accepted = "None, bool, int, float, str, and lists and dicts (with text as keys) of them"
    accepted += "" if tensors is None else ", and tensors"
    raise ValueError(
        f"{path} is {type(value).__name__} ({str(value)[:80]}), which a checkpoint cannot hold: {accepted}"
    )


def write_rank_file(file: Path, pieces: Mapping[Piece, torch.Tensor], rank_state: dict[str, Any]) -> Digest:
    """Write a file that is not there yet, and wait for the disk."""
    tensors: dict[str, torch.Tensor] = {}
    state = encode_state(rank_state, _RANK_STATE, tensors)
    described = {}
    for i, (piece, tensor) in enumerate(pieces.items()):
        key = f"{i:06d} {piece.kind} {piece.name}"
        tensors[key], described[key] = tensor, dataclasses.asdict(piece)
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    metadata = {"format": "pt", _PIECES: json.dumps(described), _RANK_STATE: json.dumps(state)}
    header, _ = make_header([(key, tensor.dtype, tensor.shape) for key, tensor in ordered.items()], metadata)
    return _write(file, _parts(header, ordered.values()))


def _parts(header: bytes, tensors: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    yield memoryview(header)
    for tensor in tensors:
        yield _bytes(tensor.detach().cpu().contiguous())


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def write_text(file: Path, text: str) -> Digest:
    """Write a file that is not there yet, and wait for the disk."""
    return _write(file, [memoryview(text.encode())])


def _write(file: Path, parts: Iterable[memoryview]) -> Digest:
    digest, size = hashlib.sha256(), 0
    with file.open("xb") as opened:
        for part in parts:
            opened.write(part)
            digest.update(part)
            size += len(part)
        opened.flush()
        os.fsync(opened.fileno())
    return Digest(size=size, sha256=digest.hexdigest())


def sync_directory(directory: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that has no such call for directories
            raise
    finally:
        os.close(descriptor)


# --- read


def check_file(file: Path, expected: Digest, *, content: bool) -> None:
    """ValueError, beginning with the file's name, if it is missing, of another size or (with `content`) hash."""
    if not file.is_file():
        raise ValueError(f"{file.name}: missing")
    size = file.stat().st_size
    if size != expected.size:
        raise ValueError(f"{file.name}: {size} bytes instead of {expected.size}")
    if not content:
        return
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != expected.sha256:
        raise ValueError(f"{file.name}: sha256 differs")


def read_index(file: Path) -> list[StoredPiece]:
    """The pieces in a rank's file; reads the header alone."""
    entries, metadata = read_header(file)
    by_key = {entry.name: entry for entry in entries}
    stored = [
        StoredPiece(piece=Piece(**fields), entry=by_key[key])
        for key, fields in _metadata(file, metadata, _PIECES).items()
    ]
    for one in stored:
        if one.entry.shape != (one.piece.numel,):
            raise ValueError(f"{file}: {one.piece.title} has {one.piece.numel} elements, its array {one.entry.shape}")
    return stored


def read_rank_state(file: Path) -> dict[str, Any]:
    """The rank's own state, with its tensors."""
    entries, metadata = read_header(file)
    by_key = {entry.name: entry for entry in entries}

    def decode(value: Any) -> Any:
        if isinstance(value, list):
            return [decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        if _TENSOR not in value:
            return {key: decode(item) for key, item in value.items()}
        entry = by_key[value[_TENSOR]]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        flat = Copy(source=0, destination=0, length=tensor.numel())
        read_ranges(entry, [flat], tensor)
        return tensor

    return decode(_metadata(file, metadata, _RANK_STATE))


def _metadata(file: Path, metadata: dict[str, str], key: str) -> dict[str, Any]:
    if key not in metadata:
        raise ValueError(f"{file} has no {key} in its metadata: it is no file of a training checkpoint")
    return json.loads(metadata[key])


def read_ranges(entry: TensorEntry, copies: Iterable[Copy], destination: torch.Tensor) -> None:
    """Read ranges of the elements of a tensor on the disk into a contiguous one here."""
    buffer, width = _bytes(destination), entry.dtype.itemsize
    with entry.file.open("rb", buffering=0) as opened:
        for copy in copies:
            first, last = copy.destination * width, (copy.destination + copy.length) * width
            read_exactly(opened.fileno(), buffer[first:last], entry.start + copy.source * width, entry.file)
