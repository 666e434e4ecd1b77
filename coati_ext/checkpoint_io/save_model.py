"""Save a fully fine-tuned, sharded model as a Hugging Face checkpoint; each rank writes only the bytes that it holds.

    save_model(model, directory, pretrained=base, layout=layout, rank=rank, group=dist.group.WORLD)

The inverse of `load_weights`. Every rank plans the output's files from the headers of the base (`save_plan`), the first
makes them at their full size, and then each writes its slices at their places. Nothing is gathered, and memory is that
of the workers' strips (`workers`).
Left out: LoRA (`adapter`), and what a training needs to go on (`training_state`).
"""

import json
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coati_ext.checkpoint_io.bf16_to_fp8 import FLOATS
from coati_ext.checkpoint_io.checkpoint import Checkpoint, read_checkpoint
from coati_ext.checkpoint_io.fp8_format import quantization_of
from coati_ext.checkpoint_io.fp8_to_bf16 import bf16_config
from coati_ext.checkpoint_io.hf_directory import (
    CARD_NAME,
    CONFIG_NAME,
    DEFAULT_MAX_SHARD_BYTES,
    copy_side_files,
    new_directory,
)
from coati_ext.checkpoint_io.layout import Layout
from coati_ext.checkpoint_io.load_plan import named_weights
from coati_ext.checkpoint_io.model_card import full_model_card
from coati_ext.checkpoint_io.resumable import check_apart
from coati_ext.checkpoint_io.rewrite import write_index
from coati_ext.checkpoint_io.safetensors_file import write_exactly
from coati_ext.checkpoint_io.save_plan import Copy, SavePlan, Write, plan_save
from coati_ext.checkpoint_io.state_file import sync_directory
from coati_ext.checkpoint_io.stream import OutputShard
from coati_ext.checkpoint_io.workers import Worker, bytes_of, run_tasks
from coati_ext.utils.collective import errors_everywhere, rank_and_size

_SIDE_BYTES = 64 << 20  # room for tokenizer, index and config in the check of the disk


def save_model(
    model: PreTrainedModel,
    directory: str | Path,
    *,
    pretrained: str | Path,
    layout: Layout,
    rank: int,
    group: dist.ProcessGroup | None,
    dtype: torch.dtype | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_shard_size: int = DEFAULT_MAX_SHARD_BYTES,
    show_progress: bool = False,
    card: dict[str, str] | None = None,
) -> None:
    """Write the model under the base's tensor names to `directory`, which appears or is replaced when all is written.

    A collective: all ranks of `group` call it, and all of them raise if it fails on one; what was at `directory` is
    then untouched. Tensors of the base that the model has not (multi-token prediction) are copied from it. What was FP8
    is BF16 in the output, and its scales are left out.

    Args:
        model: as `load_weights` filled it and training changed it; its weights on any device.
        directory: on a file system that all hosts share; a model directory there is replaced whole.
        pretrained: directory of the base checkpoint that the model was loaded from.
        layout, rank: by which the model is sharded. Ranks of the group that share a `rank` hold the same.
        group: all ranks that call; None in a single process.
        dtype: of the weights; default: each as the base has it. Tensors of another dtype than most of the base's, and
            those that the model class keeps in fp32, keep theirs.
        tokenizer: saved over the base's.
        max_shard_size: bytes of a file, if no single tensor has more.
        card: lines for the model card, e.g. {"Data": ..., "Loss": ..., "Layout": ...}.

    Raises:
        FileExistsError: something is at `directory` that is no model directory.
        ValueError: LoRA in the model, a tensor that is not finite, a model or layout that does not fit the base (see
            `plan_save`), or an output inside the base; names the tensor or path.
        OSError: the disk is too small, or fails.
    """
    directory, is_first = Path(directory), rank_and_size(group)[0] == 0
    with errors_everywhere(group):
        _check_arguments(model, directory, Path(pretrained), dtype, max_shard_size)
        checkpoint = read_checkpoint(pretrained)
        plan = plan_save(model, checkpoint, layout, rank, dtype=dtype, max_shard_size=max_shard_size)
    is_writer = _agree(plan, checkpoint, layout, rank, group)
    with ExitStack() as stack:
        work: list[Path | None] = [None]
        with errors_everywhere(group):
            if is_first:
                needed = plan.nbytes_total + _SIDE_BYTES
                work[0] = stack.enter_context(new_directory(directory, needed_bytes=needed, overwrite=True))
                for shard in plan.shards:
                    _create(work[0] / shard.name, shard)
        if group is not None:
            dist.broadcast_object_list(work, group=group, group_src=0)
        with errors_everywhere(group):
            if is_writer:
                _write(plan, work[0], model, show_progress=show_progress)
        with errors_everywhere(group):
            if is_first:
                _complete(work[0], plan, checkpoint, dtype, tokenizer, card or {})
                stack.close()  # which gives it its name
                sync_directory(directory.resolve().parent)


def _check_arguments(
    model: nn.Module, directory: Path, pretrained: Path, dtype: torch.dtype | None, max_shard_size: int
) -> None:
    check_apart([pretrained], directory)
    if max_shard_size < 1:
        raise ValueError(f"max_shard_size is a number of bytes, at least 1; got {max_shard_size}")
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(f"dtype is {dtype}; accepted: {', '.join(map(str, FLOATS))}")
    for name, module, leaf in named_weights(model):
        if ".lora_" in name:
            raise ValueError(f"{name}: save_model is for models without LoRA; save the adapter and merge it instead")
        if getattr(module, leaf).is_meta:
            raise ValueError(f"{name} is on the meta device: it has no values to save")


def _agree(plan: SavePlan, checkpoint: Checkpoint, layout: Layout, rank: int, group: dist.ProcessGroup | None) -> bool:
    """Whether this rank writes, or leaves it to another that holds the same; ValueError on all ranks alike."""
    own, size = rank_and_size(group)
    mine = (rank, (plan.digest(), layout), plan.nbytes)
    found = [mine] * size
    if group is not None:
        dist.all_gather_object(found, mine, group=group)
    ranks, outputs, nbytes = zip(*found, strict=True)
    other = next((i for i, output in enumerate(outputs) if output != outputs[0]), None)
    if other is not None:
        raise ValueError(
            f"save_model: ranks 0 and {other} would write different files; layout, dtype and max_shard_size must be "
            f"the same on all ranks, and the base {checkpoint.directory} on all hosts"
        )
    missing = sorted(set(range(layout.world_size)) - set(ranks))
    if missing:
        raise ValueError(
            f"save_model: rank {missing[0]} of the layout's {layout.world_size} is not in the group; all must call it"
        )
    written = sum(dict(zip(ranks, nbytes, strict=True)).values())
    assert written == plan.nbytes_total, f"the plans of all ranks write {written} of {plan.nbytes_total} bytes"
    return ranks.index(rank) == own


# --- write


def _create(file: Path, shard: OutputShard) -> None:
    """The file with its header, at its full size."""
    header, _ = shard.header
    with file.open("xb") as opened:
        opened.write(header)
        opened.truncate(len(header) + shard.nbytes)


def _write(plan: SavePlan, directory: Path, model: nn.Module, *, show_progress: bool) -> None:
    """Write this rank's bytes, and wait for the disk."""
    if not directory.is_dir():
        raise OSError(f"{directory}, made by rank 0, is not there: do all hosts share the file system?")
    devices = list({getattr(module, leaf).device for _, module, leaf in named_weights(model)})
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the workers' streams must not run ahead of the last step
    work = sorted((*plan.writes, *plan.copies), key=lambda one: (one.place.file, one.start))
    tasks: list[Callable[[Worker], int]] = [
        partial(_write_values if isinstance(one, Write) else _copy, one, directory) for one in work
    ]
    with tqdm(total=plan.nbytes, unit="B", unit_scale=True, disable=not show_progress, desc="saving") as bar:
        run_tasks(tasks, devices=devices, on_done=bar.update)
    for file in sorted({one.place.file for one in work}):
        descriptor = os.open(directory / file, os.O_WRONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_values(write: Write, directory: Path, worker: Worker) -> int:
    """Returns the bytes written."""
    with worker.on_device():
        values = write.values.to(write.place.dtype)
        extremes = torch.stack(torch.aminmax(values))  # NaN if there is one; ten times as fast as isfinite of all
        if not extremes.isfinite().all():
            raise ValueError(f"{write.place.name} is not finite in {values.dtype}; nothing is saved")
        host = values
        if values.device.type != "cpu":
            [host] = worker.buffers("out", [(values.dtype, tuple(values.shape))])
            host.copy_(values)
    return _pwrite(directory / write.place.file, write.ranges(bytes_of(host)))


def _copy(copy: Copy, directory: Path, worker: Worker) -> int:
    """Returns the bytes written."""
    sources = outputs = worker.read(copy.strip.sources)
    if copy.strip.convert is not None:
        outputs = worker.buffers("out", [(target.dtype, target.shape) for target in copy.strip.targets])
        worker.convert(copy.strip.convert, sources, outputs)
    [output] = outputs
    return _pwrite(directory / copy.place.file, [(copy.start, bytes_of(output))])


def _pwrite(file: Path, ranges: Iterable[tuple[int, memoryview]]) -> int:
    """Write bytes at their places in a file that is there; returns their number."""
    nbytes = 0
    descriptor = os.open(file, os.O_WRONLY)
    try:
        for start, content in ranges:
            write_exactly(descriptor, content, start)
            nbytes += len(content)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error
    finally:
        os.close(descriptor)
    return nbytes


def _complete(
    directory: Path,
    plan: SavePlan,
    checkpoint: Checkpoint,
    dtype: torch.dtype | None,
    tokenizer: PreTrainedTokenizerBase | None,
    card: dict[str, str],
) -> None:
    """Add all that makes the weights a model directory."""
    config = checkpoint.config()
    if quantization_of(config) is not None:
        config = bf16_config(config, mtp="keep")
    if dtype is not None:
        config = _with_dtype({"dtype": None, **config}, str(dtype).removeprefix("torch."))
    write_index(directory, plan.shards)
    copy_side_files(checkpoint.directory, directory)
    (directory / CONFIG_NAME).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    if tokenizer is not None:
        tokenizer.save_pretrained(str(directory))
    (directory / CARD_NAME).write_text(full_model_card(checkpoint.directory, "fully fine-tuned", card))
    sync_directory(directory)


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    parts = {key: _with_dtype(part, dtype) if isinstance(part, dict) else part for key, part in config.items()}
    return parts | {key: dtype for key in ("dtype", "torch_dtype") if key in parts}
