"""Read and write Hugging Face model directories of safetensors, whole or not at all.

Written under a temporary name and renamed when finished: a directory that exists is complete, whatever was killed.
Weights pass through one shard at a time, so memory does not grow with the model.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from coati_ext.utils.sizes import format_bytes

CONFIG_NAME = "config.json"
CARD_NAME = "README.md"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
DEFAULT_MAX_SHARD_BYTES = 5_000_000_000

# Everything a model directory holds beside weights and config.json that is still true of a copy of the model.
_SIDE_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "*.model",  # sentencepiece and tiktoken vocabularies
    "*.tiktoken",
    "*.py",  # remote code
    "*processor_config.json",
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
)


def weight_files(model_dir: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it, from the index where there is one.

    Raises: FileNotFoundError for a missing directory, index shard or checkpoint; ValueError for a damaged file.
    """
    if not model_dir.is_dir():
        raise FileNotFoundError(f"{model_dir} is not a directory; expected a local Hugging Face model directory")
    index, single = model_dir / INDEX_NAME, model_dir / SINGLE_NAME
    if index.is_file():
        files = {name: model_dir / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        for file in sorted(set(files.values())):
            if not file.is_file():
                raise FileNotFoundError(f"{file} is missing, but {index} lists it; copy the whole checkpoint again")
        return files
    if not single.is_file():
        raise FileNotFoundError(
            f"{model_dir} holds neither {INDEX_NAME} nor {SINGLE_NAME}; "
            "load the model with transformers and save_pretrained it to get safetensors"
        )
    with open_shard(single) as shard:
        return dict.fromkeys(shard.keys(), single)


def open_shard(file: Path) -> safe_open:
    """`safe_open` for torch; a file cut short is a ValueError that names it."""
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}); copy or convert it again") from error


def copy_side_files(source: Path, target: Path) -> None:
    """Copy tokenizer, chat templates, generation config and licence; weights and config.json are the caller's."""
    for pattern in _SIDE_FILES:
        for file in source.glob(pattern):
            if file.is_symlink() and not file.exists():
                raise FileNotFoundError(f"{file} links to {file.readlink()}, which is not there; copy the model again")
            if file.is_file() and file.suffix != ".safetensors":  # links are followed: caches link to blobs
                shutil.copyfile(file, target / file.name)
    templates = source / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, target / templates.name, dirs_exist_ok=True)


@contextmanager
def new_directory(path: Path, *, needed_bytes: int, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary directory beside `path` that becomes `path` when the block ends without an error.

    What a killed run left is taken up: a half-written directory is deleted, an old one without its successor put back.

    Raises: FileExistsError if `path` is not empty (with `overwrite`: if it is not a model directory); OSError if the
    disk has less than `needed_bytes` free.
    """
    path = path.resolve()
    partial, old = path.with_name(f".{path.name}.partial"), path.with_name(f".{path.name}.old")
    if old.exists() and not path.exists():  # a run was killed between the two renames below
        old.rename(path)
    occupied = path.exists() and not (path.is_dir() and not any(path.iterdir()))
    if occupied and not overwrite:
        raise FileExistsError(f"{path} exists and is not empty; choose another --output or pass --overwrite")
    if occupied and not (path / CONFIG_NAME).is_file():
        raise FileExistsError(f"{path} has no {CONFIG_NAME}, so it is not a model directory: not overwritten")
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    free = shutil.disk_usage(path.parent).free
    if free < needed_bytes:
        raise OSError(
            f"{path.parent} has {format_bytes(free)} free, {path.name} needs {format_bytes(needed_bytes)}; "
            "free some space or choose another --output"
        )
    partial.mkdir()
    try:
        yield partial
        if path.exists():
            path.rename(old)
        partial.rename(path)
    except BaseException:
        if old.exists() and not path.exists():
            old.rename(path)
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


class ShardWriter:
    """Write tensors in the order given, into shards of at most `max_shard_bytes`, named as transformers names them.

    Example:
        writer = ShardWriter(directory)
        writer.add("model.norm.weight", tensor)
        writer.close()
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
        metadata: dict[str, str] | None = None,
    ) -> None:
        self._directory = directory
        self._max_shard_bytes = max_shard_bytes
        self._metadata = {"format": "pt", **(metadata or {})}
        self._shard: dict[str, torch.Tensor] = {}
        self._shard_bytes = 0
        self._written: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Queue a contiguous tensor that shares memory with no other; a full shard goes to disk first."""
        if self._shard and self._shard_bytes + tensor.nbytes > self._max_shard_bytes:
            self._flush()
        self._shard[name] = tensor
        self._shard_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def close(self) -> None:
        """Write the last shard, give the shards their final names, and write the index if there are several."""
        self._flush()
        count = len(self._written)
        weight_map = {}
        for i, names in enumerate(self._written):
            final = SINGLE_NAME if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            self._unnamed(i).rename(self._directory / final)
            weight_map |= dict.fromkeys(names, final)
        if count > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            (self._directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")

    def _flush(self) -> None:
        shard = self._unnamed(len(self._written))
        save_file(self._shard, shard, metadata=self._metadata)
        shard.chmod(self._directory.stat().st_mode & 0o666)  # safetensors 0.8 leaves it readable by the owner only
        self._written.append(list(self._shard))
        self._shard, self._shard_bytes = {}, 0

    def _unnamed(self, i: int) -> Path:
        return self._directory / f"shard-{i}.safetensors"
