"""The safetensors format at the level of bytes: where each tensor lies, and headers for files written piece by piece.

`safetensors` itself maps a file and saves a dict that is wholly in memory. Converters that stream want the byte ranges:
they read with `pread` into buffers of their own and write each piece at its place, so memory does not grow with a file.

Format: 8 bytes little-endian header length, a JSON header (blanks after it allowed), then the tensors' bytes;
https://github.com/huggingface/safetensors#format.
"""

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# Whole-byte types. A file with another (F4, F6_E2M3, ...) is refused.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_ALIGNMENT = 8


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Where a tensor lies: `start` is the absolute offset in `file` of its `nbytes` bytes, row-major."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return num_bytes(self.dtype, self.shape)


def num_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Bytes of a contiguous tensor."""
    return math.prod(shape) * dtype.itemsize


def read_header(file: Path) -> tuple[list[TensorEntry], dict[str, str]]:
    """The tensors of a safetensors file in the order of their bytes, and its metadata; reads the header alone.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no safetensors file, cut short, longer than its header says, tensors that overlap or leave holes,
            or an unknown dtype; each names the file and the tensor.
    """
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > _MAX_HEADER_BYTES:
            raise ValueError(f"{file} is no safetensors file (of {size} bytes, the first 8 claim a header of {length})")
        if 8 + length > size:
            raise ValueError(f"{file} is cut short within its header ({size} bytes); copy it again")
        header = _parse(opened.read(length), file)
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise ValueError(f"{file}: __metadata__ in the header is {type(metadata).__name__}, not a mapping; damaged")
    entries = [_entry(name, value, file, 8 + length) for name, value in header.items()]
    entries.sort(key=lambda entry: (entry.start, entry.nbytes))
    end = 8 + length
    for entry in entries:
        if entry.start != end:
            raise ValueError(f"{file}: {entry.name} begins at byte {entry.start} where {end} was expected; damaged")
        end += entry.nbytes
        if end > size:
            raise ValueError(
                f"{file} is cut short: {entry.name} ends at byte {end}, the file at {size}; copy the file again"
            )
    if end != size:
        raise ValueError(f"{file} has {size - end} bytes after its last tensor; damaged: copy the file again")
    return entries, metadata


def _parse(text: bytes, file: Path) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except ValueError as error:  # of JSON or UTF-8
        raise ValueError(f"{file} is no safetensors file: its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise ValueError(f"{file} is no safetensors file: its header is not a mapping")
    return header


def _entry(name: str, value: Any, file: Path, data_start: int) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        whole = all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise ValueError(f"{file}: the header's entry for {name} is damaged: {value!r}")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{file}: {name} has the unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    entry = TensorEntry(name=name, file=file, dtype=DTYPES[dtype], shape=shape, start=data_start + begin)
    if end - begin != entry.nbytes:
        raise ValueError(
            f"{file}: {name} has {end - begin} bytes, but {dtype} of shape {list(shape)} takes {entry.nbytes}; damaged"
        )
    return entry


def make_header(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: dict[str, str]
) -> tuple[bytes, dict[str, int]]:
    """(The bytes before the tensors, name -> absolute offset) of a file holding these tensors in this order.

    Give wider types first: readers view the bytes as the dtype, so an offset must be a multiple of its size.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offsets, offset = {}, 0
    for name, dtype, shape in tensors:
        end = offset + num_bytes(dtype, shape)
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offsets[name], offset = offset, end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + start for name, start in offsets.items()}


def read_exactly(descriptor: int, buffer: memoryview, offset: int, file: Path) -> None:
    """Fill `buffer` from `offset`; ValueError if the file ends before (it shrank since its header was read)."""
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if count == 0:
            size = os.fstat(descriptor).st_size
            raise ValueError(f"{file} ends at byte {size}, while it is being read: was it replaced?")
        done += count


def write_exactly(descriptor: int, buffer: memoryview, offset: int) -> None:
    """Write all of `buffer` at `offset`."""
    done = 0
    while done < len(buffer):
        done += os.pwritev(descriptor, [buffer[done:]], offset + done)
