"""A complete model directory made from another: planned shards, index, config and all else that belongs to it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from coati_ext import __version__
from coati_ext.checkpoint_io import stream
from coati_ext.checkpoint_io.checkpoint import Checkpoint
from coati_ext.checkpoint_io.hf_directory import CARD_NAME, CONFIG_NAME, INDEX_NAME, SINGLE_NAME, copy_side_files
from coati_ext.checkpoint_io.resumable import resumable_directory
from coati_ext.checkpoint_io.stream import OutputShard

_SIDE_BYTES = 64 << 20  # room for tokenizer, index and config in the check of the disk


@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """How a checkpoint tool works, not what it makes."""

    device: str = "auto"
    """"auto" (all GPUs, or else the CPU), "cpu", "cuda" (all of them) or "cuda:N"."""
    num_workers: int | None = None
    """Threads; default one a CPU core, 16 at most."""
    overwrite: bool = False
    """Replace an existing output, and start an interrupted run anew if it was another."""
    show_progress: bool = True

    def devices(self) -> list[torch.device]:
        """The devices that strips are spread over.

        Raises:
            ValueError: no such device here.
        """
        count = torch.cuda.device_count()
        if self.device == "cpu" or (self.device == "auto" and count == 0):
            return [torch.device("cpu")]
        if self.device in ("auto", "cuda") and count:
            return [torch.device("cuda", i) for i in range(count)]
        if self.device in [f"cuda:{i}" for i in range(count)]:
            return [torch.device(self.device)]
        raise ValueError(f"device {self.device!r} is not here; accepted: auto, cpu, cuda, cuda:N ({count} GPUs found)")


def rewrite_checkpoint(
    checkpoint: Checkpoint,
    output: Path,
    *,
    shards: Sequence[OutputShard],
    config: dict[str, Any],
    identity: dict[str, Any],
    options: WorkOptions,
    inputs: Sequence[Path] = (),
    card: str | None = None,
) -> None:
    """Write the shards and all that makes them a model directory; an interrupted run is continued.

    Args:
        config: the output's `config.json`.
        identity: what besides the input files decides the output's bytes: the tool and its options.
        inputs: what is read besides the checkpoint, and must survive too.
        card: the output's model card.

    Raises:
        FileExistsError, RuntimeError: see `resumable_directory`.
        OSError: the disk is too small, or fails.
        ValueError: `output` is inside an input or holds one; damage that is found only while reading; an input that
            changed meanwhile.
    """
    devices = options.devices()
    files = {entry.file for entries in checkpoint.shards.values() for entry in entries}
    files |= {file for file in [checkpoint.directory / CONFIG_NAME] if file.is_file()}
    before = fingerprints(files)
    identity = {"coati_ext": __version__, **identity, **before}
    total = sum(shard.nbytes for shard in shards)
    read = [checkpoint.directory, *files, *inputs]
    with resumable_directory(output, identity=identity, inputs=read, overwrite=options.overwrite) as directory:
        if directory.finished:
            print(f"continuing {directory.path}: {len(directory.finished)} of {len(shards)} files were finished")
        with tqdm(total=total, unit="B", unit_scale=True, disable=not options.show_progress, smoothing=0.05) as bar:
            stream.run(
                shards,
                directory,
                devices=devices,
                num_workers=options.num_workers,
                extra_bytes=_SIDE_BYTES,
                progress=bar.update,
            )
        if fingerprints(files) != before:
            raise ValueError(f"{checkpoint.directory} was changed while it was read; run again to begin anew")
        copy_side_files(checkpoint.directory, directory.path)
        write_index(directory.path, shards)
        (directory.path / CONFIG_NAME).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        if card is not None:
            (directory.path / CARD_NAME).write_text(card)


def write_index(directory: Path, shards: Sequence[OutputShard]) -> None:
    """Write `model.safetensors.index.json`, unless the model is one file of the name that needs none."""
    if [shard.name for shard in shards] == [SINGLE_NAME]:
        return
    weight_map = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
    total = sum(shard.nbytes for shard in shards)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n")


def fingerprints(files: Sequence[Path] | set[Path]) -> dict[str, list[int]]:
    """File name -> size in bytes and time of the last change in ns; tells a changed input without reading it."""
    found = {str(file.resolve()): file.stat() for file in sorted(files)}
    return {name: [status.st_size, status.st_mtime_ns] for name, status in found.items()}
