"""Split a Hugging Face checkpoint into what the ranks of a layout hold, and join it again, byte for byte.

    O/manifest.json                      layout, parts and what is in them, which rank has which parts, checksums
    O/stage-000.safetensors              what every rank of a pipeline stage holds
    O/stage-000-ep-003.safetensors       what its ranks at one expert parallel coordinate hold (-tp-: tensor parallel)
    O/config.json, tokenizer.json, ...   as in the checkpoint
    O/source/                            the index and the headers of the original shards, as they were

A part is named by what its ranks have in common, so every byte of the checkpoint is in one part, and a rank reads one
to four of them. `coati_ext.checkpoint_io.reshard` says which tensor is where; the manifest states it too, so that
joining needs no model and no rules.
"""

import dataclasses
import difflib
import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from coati_ext import __version__
from coati_ext.checkpoint_io import stream
from coati_ext.checkpoint_io.checkpoint import Checkpoint, read_checkpoint, read_json
from coati_ext.checkpoint_io.hf_directory import CONFIG_NAME, INDEX_NAME, copy_side_files
from coati_ext.checkpoint_io.layout import Layout
from coati_ext.checkpoint_io.reshard import Part, Plan, plan
from coati_ext.checkpoint_io.resumable import JOURNAL_NAME, ResumableDirectory, resumable_directory
from coati_ext.checkpoint_io.rewrite import fingerprints
from coati_ext.checkpoint_io.safetensors_file import DTYPES, read_header
from coati_ext.checkpoint_io.slices import Slice, cut_strips, join_strips
from coati_ext.checkpoint_io.stream import OutputShard, TensorSpec
from coati_ext.checkpoint_io.workers import default_num_workers
from coati_ext.utils.sizes import format_bytes

MANIFEST_NAME = "manifest.json"
SOURCE_DIR = "source"
_FORMAT = "coati_ext split checkpoint 1"
_SIDE_BYTES = 64 << 20  # room for headers, manifest and tokenizer in the check of the disk
_HASH_BYTES = 4 << 20  # read at a time
_LISTED = 3  # names shown in an error
_PART_FILE = re.compile(r"stage-.*\.safetensors")


@dataclass(frozen=True, kw_only=True)
class SplitReport:
    """What was written."""

    num_parts: int
    num_ranks: int
    nbytes: int
    rank_bytes: tuple[int, int]
    """The least and the most that a rank holds."""
    left_out: list[str]
    """Files of the model directory that are neither the checkpoint nor known to belong to it."""

    def format(self) -> str:
        least, most = (format_bytes(n) for n in self.rank_bytes)
        lines = [
            f"{self.num_parts} files, {format_bytes(self.nbytes)}, for {self.num_ranks} ranks of {least} to {most} each"
        ]
        return "\n".join(lines + [f"not copied: {', '.join(self.left_out)}"] * bool(self.left_out))


def read_layout(file: str | Path) -> Layout:
    """The layout of a YAML file with the keys ep, pp, tp, dp and num_layers_per_stage, all optional.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no mapping, an unknown key, or a layout that cannot be; names the file.
    """
    import yaml

    known = [field.name for field in dataclasses.fields(Layout)]
    try:
        values = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"expected a mapping with the keys {', '.join(known)}, found {type(values).__name__}")
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"accepted: {', '.join(known)}"
                raise ValueError(f"unknown key {key!r}; {hint}")
        return Layout(**values)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{file}: {error}") from None


def part_file(part: Part) -> str:
    """The file that a part is in.

    Example:
        >>> part_file(Part(stages=(0, 7), ep=None, tp=1))
        'stage-000+007-tp-001.safetensors'
    """
    stages = "+".join(f"{stage:03d}" for stage in part.stages)
    axes = ((name, index) for name, index in (("ep", part.ep), ("tp", part.tp)) if index is not None)
    return f"stage-{stages}{''.join(f'-{name}-{index:03d}' for name, index in axes)}.safetensors"


def split_checkpoint(
    pretrained: str | Path,
    output: str | Path,
    layout: Layout,
    *,
    num_workers: int | None = None,
    overwrite: bool = False,
    show_progress: bool = True,
) -> SplitReport:
    """Write the parts of `pretrained` and their manifest to `output`; an interrupted run is continued.

    Args:
        num_workers: threads; default one a CPU core, 16 at most.
        overwrite: replace an existing output, and start an interrupted run anew if it was another.

    Raises:
        FileExistsError, RuntimeError: see `resumable_directory`.
        FileNotFoundError, ValueError: the checkpoint is damaged, or `layout` does not fit it.
        OSError: the disk is too small, or fails.
    """
    checkpoint, output = read_checkpoint(pretrained), Path(output)
    made = plan(checkpoint.config(), checkpoint.tensors, layout)
    shards = [_part_shard(part, made, checkpoint) for part in made.parts]
    inputs = {checkpoint.directory / name for name in (*checkpoint.shards, CONFIG_NAME)}
    identity = {"coati_ext": __version__, "tool": "split", "layout": dataclasses.asdict(layout), **fingerprints(inputs)}
    identity = json.loads(json.dumps(identity))  # as the journal will have it: lists, no tuples
    read = [checkpoint.directory, *inputs]
    with resumable_directory(output, identity=identity, inputs=read, overwrite=overwrite) as directory:
        _run(shards, directory, num_workers, "split" if show_progress else None)
        files = _copy_files(checkpoint, directory.path)
        names = [shard.name for shard in shards]
        digests = _sha256([directory.path / name for name in names + files], num_workers, show_progress)
        manifest = _manifest(made, checkpoint, directory.path, dict(zip(names + files, digests, strict=True)))
        text = json.dumps({**manifest, "sha256": _sha256_of_json(manifest)}, ensure_ascii=False)
        (directory.path / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")
    sizes = [sum(manifest["parts"][name]["nbytes"] for name in names) for names in manifest["ranks"]]
    present = {entry.name for entry in checkpoint.directory.iterdir() if not entry.name.startswith(".")}
    return SplitReport(
        num_parts=len(shards),
        num_ranks=layout.world_size,
        nbytes=sum(shard.nbytes for shard in shards),
        rank_bytes=(min(sizes), max(sizes)),
        left_out=sorted(present - {*checkpoint.shards, INDEX_NAME, *(name.partition("/")[0] for name in files)}),
    )


def join_checkpoint(
    directory: str | Path,
    output: str | Path,
    *,
    num_workers: int | None = None,
    overwrite: bool = False,
    show_progress: bool = True,
) -> int:
    """Write the checkpoint that `split_checkpoint` made `directory` of, with the same files and bytes.

    All files are compared with the manifest's checksums before anything is written. Returns the bytes of tensors.

    Raises:
        FileExistsError, RuntimeError: see `resumable_directory`.
        FileNotFoundError: no manifest, or a part or file of it is missing; names it.
        ValueError: a part or file is not what was written, or no manifest of this tool; names it.
        OSError: the disk is too small, or fails.
    """
    directory, output = Path(directory), Path(output)
    manifest_file = directory / MANIFEST_NAME
    if not manifest_file.is_file():
        raise FileNotFoundError(f"{directory} has no {MANIFEST_NAME}; expected what split_checkpoint wrote")
    manifest = read_json(manifest_file)
    if manifest.get("format") != _FORMAT:
        raise ValueError(f"{manifest_file}: format is {manifest.get('format')!r}; expected {_FORMAT!r}")
    if manifest.pop("sha256", None) != _sha256_of_json(manifest):
        raise ValueError(f"{manifest_file} is not what was written (its sha256 differs); copy it again, or split again")
    _check_files(directory, manifest, num_workers, show_progress)
    pieces = _pieces(directory, manifest)
    shards = [_original_shard(name, directory, pieces) for name in manifest["shards"]]
    identity = {"coati_ext": __version__, "tool": "join", "manifest": _sha256_of(manifest_file)}
    with resumable_directory(output, identity=identity, inputs=[directory], overwrite=overwrite) as work:
        _run(shards, work, num_workers, "join" if show_progress else None)
        for name in manifest["files"]:
            if name.endswith(".header"):
                continue
            target = work.path / name.removeprefix(f"{SOURCE_DIR}/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(directory / name, target)
    return sum(shard.nbytes for shard in shards)


def _run(shards: list[OutputShard], directory: ResumableDirectory, num_workers: int | None, title: str | None) -> None:
    total = sum(shard.nbytes for shard in shards)
    if directory.finished:
        print(f"continuing {directory.path}: {len(directory.finished)} of {len(shards)} files were finished")
    with tqdm(total=total, unit="B", unit_scale=True, desc=title, disable=title is None, smoothing=0.05) as bar:
        stream.run(
            shards,
            directory,
            devices=[torch.device("cpu")],  # bytes are moved only
            num_workers=num_workers,
            extra_bytes=_SIDE_BYTES,
            progress=bar.update,
        )


def _part_shard(part: Part, made: Plan, checkpoint: Checkpoint) -> OutputShard:
    shard = OutputShard(name=part_file(part))
    for piece in made.pieces_of(part):
        entry = checkpoint.tensors[piece.name]
        spec = TensorSpec(name=piece.name, dtype=entry.dtype, shape=piece.shape)
        shard.add([spec], list(cut_strips(entry, spec, piece.spans)))
    return shard


def _copy_files(checkpoint: Checkpoint, work: Path) -> list[str]:
    """Copy all that is no weight; returns the names, relative to `work`."""
    copy_side_files(checkpoint.directory, work)
    for name in (CONFIG_NAME, "README.md"):
        if (checkpoint.directory / name).is_file():
            shutil.copyfile(checkpoint.directory / name, work / name)
    source = work / SOURCE_DIR
    source.mkdir(exist_ok=True)
    if checkpoint.has_index:
        shutil.copyfile(checkpoint.directory / INDEX_NAME, source / INDEX_NAME)
    for name in checkpoint.shards:
        with (checkpoint.directory / name).open("rb") as file:
            length = file.read(8)
            (source / f"{name}.header").write_bytes(length + file.read(int.from_bytes(length, "little")))
    ours = {JOURNAL_NAME, MANIFEST_NAME}
    files = (str(file.relative_to(work)) for file in work.rglob("*") if file.is_file())
    return sorted(name for name in files if name not in ours and not _PART_FILE.fullmatch(name))


def _manifest(made: Plan, checkpoint: Checkpoint, work: Path, digests: dict[str, str]) -> dict[str, Any]:
    parts = {}
    for part in made.parts:
        name = part_file(part)
        tensors = {}
        for piece in made.pieces_of(part):
            whole = piece.shape == tuple(made.tensors[piece.name].shape)
            tensors[piece.name] = None if whole else piece.spans
        size = (work / name).stat().st_size
        parts[name] = {**part._asdict(), "nbytes": size, "sha256": digests.pop(name), "tensors": tensors}
    return {
        "format": _FORMAT,
        "coati_ext": __version__,
        "layout": dataclasses.asdict(made.layout),
        "shards": list(checkpoint.shards),
        "files": digests,
        "ranks": [[part_file(part) for part in made.parts_of(rank)] for rank in range(made.layout.world_size)],
        "parts": parts,
    }


def _check_files(directory: Path, manifest: dict[str, Any], num_workers: int | None, show_progress: bool) -> None:
    expected = manifest["files"] | {name: part["sha256"] for name, part in manifest["parts"].items()}
    missing = [name for name in expected if not (directory / name).is_file()]
    if missing:
        shown = ", ".join(missing[:_LISTED]) + (" ..." if len(missing) > _LISTED else "")
        raise FileNotFoundError(
            f"{directory}: {len(missing)} files of {MANIFEST_NAME} are missing: {shown}; copy them again"
        )
    for name, part in manifest["parts"].items():
        size = (directory / name).stat().st_size
        if size != part["nbytes"]:
            raise ValueError(f"{directory / name} has {size} bytes, not the {part['nbytes']} written; copy it again")
    digests = _sha256([directory / name for name in expected], num_workers, show_progress)
    damaged = [name for (name, digest), found in zip(expected.items(), digests, strict=True) if digest != found]
    if damaged:
        shown = ", ".join(damaged[:_LISTED]) + (" ..." if len(damaged) > _LISTED else "")
        raise ValueError(
            f"{directory}: the bytes of {shown} are not those written (sha256 differs from {MANIFEST_NAME}); "
            "copy them again, or split again"
        )


def _pieces(directory: Path, manifest: dict[str, Any]) -> dict[str, list[Slice]]:
    """Tensor -> its slices: where each is, and what of the tensor it is (None: all)."""
    found: dict[str, list[Slice]] = {}
    for name, part in manifest["parts"].items():
        for entry in read_header(directory / name)[0]:
            spans = part["tensors"][entry.name]
            exact = None if spans is None else [tuple((start, stop) for start, stop in dim) for dim in spans]
            found.setdefault(entry.name, []).append((entry, exact))
    return found


def _original_shard(name: str, directory: Path, pieces: dict[str, list[Slice]]) -> OutputShard:
    header = (directory / SOURCE_DIR / f"{name}.header").read_bytes()
    content = json.loads(header[8:])
    content.pop("__metadata__", None)
    offsets = {tensor: len(header) + value["data_offsets"][0] for tensor, value in content.items()}
    shard = OutputShard(name=name, header=(header, offsets))
    for tensor, value in content.items():
        spec = TensorSpec(name=tensor, dtype=DTYPES[value["dtype"]], shape=tuple(value["shape"]))
        slices = pieces.get(tensor, [])
        held = sum(math.prod(entry.shape) for entry, _ in slices)
        if held != math.prod(spec.shape):
            raise ValueError(
                f"{directory / MANIFEST_NAME} lists {held} of the {math.prod(spec.shape)} elements of {tensor}; damaged"
            )
        shard.add([spec], list(join_strips(spec, slices)))
    return shard


def _sha256(files: list[Path], num_workers: int | None, show_progress: bool) -> list[str]:
    total = sum(file.stat().st_size for file in files)
    with (
        ThreadPoolExecutor(num_workers or default_num_workers()) as pool,
        tqdm(total=total, unit="B", unit_scale=True, desc="checksums", disable=not show_progress) as bar,
    ):
        return list(pool.map(lambda file: _sha256_of(file, bar.update), files))


def _sha256_of_json(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sha256_of(file: Path, progress: Callable[[int], Any] = lambda nbytes: None) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_HASH_BYTES))
    with file.open("rb", buffering=0) as opened:
        while count := opened.readinto(buffer):
            digest.update(buffer[:count])
            progress(count)
    return digest.hexdigest()
