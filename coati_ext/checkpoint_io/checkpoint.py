"""A Hugging Face checkpoint as a table of byte ranges: every tensor, its file, dtype, shape and place."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coati_ext.checkpoint_io.hf_directory import CONFIG_NAME, INDEX_NAME, SINGLE_NAME
from coati_ext.checkpoint_io.safetensors_file import TensorEntry, read_header

_LISTED = 3  # names shown in an error


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Headers only; no weight is read.

    `tensors` maps names to places; `shards` maps file names, sorted, to their tensors in the order of the bytes.
    """

    directory: Path
    tensors: dict[str, TensorEntry]
    shards: dict[str, list[TensorEntry]]
    metadata: dict[str, dict[str, str]]
    has_index: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, headers aside."""
        return sum(entry.nbytes for entry in self.tensors.values())

    def config(self) -> dict[str, Any]:
        """The parsed `config.json`."""
        return read_json(self.directory / CONFIG_NAME)


def read_checkpoint(directory: str | Path) -> Checkpoint:
    """Read the index, where there is one, and the header of every shard that it lists.

    Files that the index does not list are no part of the checkpoint, whatever their names.

    Raises:
        FileNotFoundError: no directory, no safetensors checkpoint in it, or a shard that the index lists is missing.
        ValueError: a damaged file, or an index that disagrees with the shards; names the file and the tensor.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is not a directory; expected a local Hugging Face model directory")
    index = directory / INDEX_NAME
    if index.is_file():
        weight_map = _weight_map(index)
        files = sorted(set(weight_map.values()))
    elif (directory / SINGLE_NAME).is_file():
        weight_map, files = None, [SINGLE_NAME]
    else:
        raise FileNotFoundError(
            f"{directory} holds neither {INDEX_NAME} nor {SINGLE_NAME}; "
            "load the model with transformers and save_pretrained it to get safetensors"
        )
    shards, metadata = {}, {}
    for name in files:
        file = directory / name
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing, but {index.name} lists it; copy the whole checkpoint again")
        shards[name], metadata[name] = read_header(file)
    found = {entry.name: entry for entries in shards.values() for entry in entries}
    if weight_map is not None:
        _check_index(weight_map, shards, index)
    return Checkpoint(
        directory=directory, tensors=found, shards=shards, metadata=metadata, has_index=weight_map is not None
    )


def read_json(file: Path) -> dict[str, Any]:
    """A JSON mapping.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no JSON, or no mapping; names the file.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing; expected a complete Hugging Face model directory")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: expected a JSON mapping, found {type(content).__name__}")
    return content


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(f"{index}: {name} is in {file!r}; expected the name of a .safetensors file beside it")
    return weight_map


def _check_index(weight_map: dict[str, str], shards: dict[str, list[TensorEntry]], index: Path) -> None:
    placed = {(entry.name, file) for file, entries in shards.items() for entry in entries}
    listed = set(weight_map.items())
    for problem, pairs in (("lists, but they are not there", listed - placed), ("does not list", placed - listed)):
        if pairs:
            shown = ", ".join(f"{name} in {file}" for name, file in sorted(pairs)[:_LISTED])
            more = " ..." if len(pairs) > _LISTED else ""
            raise ValueError(f"{index.parent}: {len(pairs)} tensors that {index.name} {problem}: {shown}{more}")
