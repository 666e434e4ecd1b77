"""Fill a model that is on the meta device from its checkpoint; each rank reads only the byte ranges that it holds.

    model = build_meta_model(directory, torch.bfloat16)
    ...  # shard it in place: nothing is allocated yet
    report = load_weights(model, directory, layout, rank, device=device)

Reading, dequantising (FP8) and casting go strip by strip on threads, so that host memory is that of the workers' strips
(`workers`), and of the model where it is on the CPU. Where tensor parallelism cuts columns, whole rows are read and the
columns taken. What is wrong with names, shapes and dtypes is found before the first strip.
"""

import importlib.util
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from coati_ext.checkpoint_io.checkpoint import read_checkpoint
from coati_ext.checkpoint_io.fp8_format import Block, quantization_of, scale_rows_of
from coati_ext.checkpoint_io.hf_directory import CONFIG_NAME
from coati_ext.checkpoint_io.layout import Layout
from coati_ext.checkpoint_io.load_plan import Read, is_persistent, named_weights, plan_reads
from coati_ext.checkpoint_io.reshard import Spans
from coati_ext.checkpoint_io.safetensors_file import num_bytes
from coati_ext.checkpoint_io.slices import cut_strips
from coati_ext.checkpoint_io.stream import Convert, TensorSpec, row_spans, rows_of
from coati_ext.checkpoint_io.workers import Source, Worker, run_tasks
from coati_ext.kernel.fp8_cast import dequantize_fp8
from coati_ext.moe.experts import MoeExperts
from coati_ext.utils.sizes import format_bytes

_GENERATION = "generation_config.json"

CONFIG_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, StrictDataclassError, TypeError,
    ValueError,
)  # fmt: skip
"""What transformers raises for a config.json whose values are of another type or do not go together."""


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What one rank read."""

    nbytes_read: int
    nbytes_total: int
    """Of the checkpoint's tensors."""
    num_tensors: int
    """Tensors of the checkpoint that this rank read, whole or in part; scales are not counted."""
    num_skipped: int
    """Tensors of the checkpoint that no rank reads: multi-token prediction, and frequencies that are computed."""

    def format(self) -> str:
        percent = 100 * self.nbytes_read / max(self.nbytes_total, 1)
        skipped = f"; left out {self.num_skipped} tensors that training does not use" if self.num_skipped else ""
        read, total = format_bytes(self.nbytes_read), format_bytes(self.nbytes_total)
        return f"read {read} of {total} ({percent:.1f}%){skipped}"


def build_meta_model(pretrained: str | Path, dtype: torch.dtype, *, use_flash_attn: bool = False) -> PreTrainedModel:
    """The model that `from_pretrained` would load, with all weights on the meta device: no memory, no values.

    As there: weights are of `dtype` but for those that the class keeps in fp32, tied weights are tied, buffers that are
    in no checkpoint (rotary frequencies) have their values, and the model is in eval mode. The cache is off.

    Raises:
        OSError: `pretrained` is not on this machine.
        ValueError: flash-attn was asked for and is not installed, a quantised model that is not FP8, or a buffer that
            nothing computes.
    """
    if use_flash_attn and importlib.util.find_spec("flash_attn") is None:
        raise ValueError("use_flash_attn: the package flash-attn is not installed; leave it out to use SDPA")
    config = AutoConfig.from_pretrained(pretrained, local_files_only=True)
    _drop_quantization(config, Path(pretrained))
    config.name_or_path = str(pretrained)
    config.use_cache = False
    attention = "flash_attention_2" if use_flash_attn else None  # None: SDPA where the model has it
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    _keep_in_fp32(model, dtype)
    _compute_buffers(model)
    if (Path(pretrained) / _GENERATION).is_file():
        model.generation_config = GenerationConfig.from_pretrained(pretrained, local_files_only=True)
    return model.eval()


def load_weights(
    model: PreTrainedModel,
    directory: str | Path,
    layout: Layout,
    rank: int,
    *,
    device: torch.device | str,
    show_progress: bool = False,
    num_workers: int | None = None,
) -> LoadReport:
    """Allocate the weights of a meta model, sharded or whole, on `device` and fill them; no collective is called.

    Args:
        model: with transformers' module paths. Modules of other pipeline stages have no parameters, routed experts are
            `MoeExperts` with this rank's or transformers' own with all, matrices are cut as `reshard` cuts them.
        layout, rank: by which the model is sharded.
        num_workers: threads, each with buffers of one strip; default `workers.default_num_workers()`.

    Raises:
        FileNotFoundError: see `read_checkpoint`.
        ValueError: see `plan_reads`; a damaged or shrinking file; tied weights that differ in the checkpoint.
    """
    device = torch.device(device)
    checkpoint = read_checkpoint(directory)
    planned = plan_reads(model, checkpoint, layout, rank)
    allocate(model, device)
    weights = {name: getattr(module, leaf).data for name, module, leaf in named_weights(model)}
    fills, checks = [], []
    for read in planned.reads:
        flat = weights[read.region.name].view(-1)[read.region.start :]
        (fills if read.equals is None else checks).extend(_strips(read, flat, planned.block))
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the workers' streams must not run ahead of what freed this memory
    nbytes = sum(strip.nbytes for strip in fills + checks)
    with tqdm(total=nbytes, unit="B", unit_scale=True, disable=not show_progress, desc="loading") as bar:
        for strips in (fills, checks):
            strips.sort(key=lambda strip: (strip.sources[0].file, strip.sources[0].start))
            tasks = [strip.run for strip in strips]
            run_tasks(tasks, devices=[device], num_workers=num_workers, on_done=bar.update)
    return LoadReport(
        nbytes_read=nbytes,
        nbytes_total=checkpoint.nbytes,
        num_tensors=len({read.entry.name for read in planned.reads}),
        num_skipped=planned.num_skipped,
    )


# --- the meta model


def _drop_quantization(config: PreTrainedConfig, directory: Path) -> None:
    """FP8 is dequantised while it is read; what else is quantised cannot be."""
    found = quantization_of(config.to_dict())
    method = found.get("quant_method") if isinstance(found, dict) else found
    if found is not None and method != "fp8":
        raise ValueError(
            f"{directory / CONFIG_NAME}: quant_method is {method!r}; accepted: 'fp8' (block-scaled, as DeepSeek "
            "publishes it), or a checkpoint in BF16"
        )
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        if hasattr(part, "quantization_config"):
            del part.quantization_config


def kept_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> re.Pattern | None:
    """Whose `search` finds what the class keeps in fp32 beside weights of `dtype`, by the rules of `from_pretrained`
    (transformers/modeling_utils.py); None if it keeps nothing."""
    kept = set(model._keep_in_fp32_modules_strict or ()) if dtype in (torch.float16, torch.bfloat16) else set()
    kept |= set(model._keep_in_fp32_modules or ()) if dtype == torch.float16 else set()
    return re.compile("|".join(name.replace("*", ".*") for name in sorted(kept))) if kept else None


def _keep_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    pattern = kept_in_fp32(model, dtype)
    for name, module, leaf in named_weights(model) if pattern else ():
        tensor = getattr(module, leaf)
        if pattern.search(name) and tensor.is_floating_point():
            tensor.data = tensor.data.float()


def _compute_buffers(model: PreTrainedModel) -> None:
    """Give the buffers that are in no checkpoint their values, on the CPU, by the model's own `_init_weights`."""
    made = {}
    for path, module in model.named_modules():
        for leaf, old in list(module.named_buffers(recurse=False)):
            if not is_persistent(module, leaf):
                made[f"{path}.{leaf}"] = buffer = torch.full_like(old, _unset(old.dtype), device="cpu")
                setattr(module, leaf, buffer)
                module._is_hf_initialized = False
    model.initialize_weights()  # of these modules only, and on the meta device it does nothing
    for name, buffer in made.items():
        unset = buffer.isnan() if buffer.is_floating_point() else buffer == _unset(buffer.dtype)
        if buffer.dtype != torch.bool and unset.any():
            raise ValueError(f"{type(model).__name__}: {name} is in no checkpoint, and _init_weights leaves it unset")


def _unset(dtype: torch.dtype) -> float | int:
    """A value that no buffer is meant to have."""
    return math.nan if dtype.is_floating_point else 0 if dtype == torch.bool else torch.iinfo(dtype).min


# --- memory


def allocate(model: nn.Module, device: torch.device) -> None:
    """Put all tensors on `device`: the weights without values, tied ones once, other buffers with theirs."""
    made: dict[torch.Tensor, torch.Tensor] = {}  # tensors hash by identity
    for _, module, leaf in list(named_weights(model)):
        old = getattr(module, leaf)
        if old not in made:
            made[old] = _empty(old, device)
        setattr(module, leaf, made[old])
    for path, module in model.named_modules():
        for leaf, buffer in list(module.named_buffers(recurse=False)):
            if is_persistent(module, leaf):
                continue
            if not buffer.is_meta:
                setattr(module, leaf, buffer.to(device))
            elif isinstance(module, MoeExperts):
                setattr(module, leaf, torch.zeros_like(buffer, device=device))  # its counts
            else:
                raise ValueError(f"{path}.{leaf} is in no checkpoint and on the meta device; use build_meta_model")


def _empty(old: torch.Tensor, device: torch.device) -> torch.Tensor:
    new = torch.empty(old.shape, dtype=old.dtype, device=device)
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
        new.__dict__.update(old.__dict__)
    return new


# --- strips


@dataclass(frozen=True, kw_only=True)
class _Strip:
    """One unit of work: what `convert` makes of the sources fills the target, or must be equal to it."""

    sources: tuple[Source, ...]
    target: torch.Tensor
    convert: Convert
    read: Read

    @property
    def nbytes(self) -> int:
        return sum(num_bytes(source.dtype, source.shape) for source in self.sources)

    def run(self, worker: Worker) -> int:
        """Returns the bytes read."""
        tensors = worker.read(self.sources)
        with worker.on_device():
            tensors = worker.to_device(tensors)
            target = self.target if self.read.equals is None else torch.empty_like(self.target)
            self.convert(tensors, [target])
            if self.read.equals is not None and not torch.equal(target, self.target):
                one, other = self.read.entry, self.read.equals
                raise ValueError(
                    f"{one.file}: {one.name} differs from {other.name}, but config.json ties them; if they are two "
                    "weights, set tie_word_embeddings to false"
                )
        return self.nbytes


def _strips(read: Read, flat: torch.Tensor, block: Block | None) -> Iterator[_Strip]:
    """The strips that fill the weight whose elements from the region's first on are `flat`."""
    for sources, start, shape, convert in _copies(read) if read.scale is None else _dequantised(read, block):
        target = flat[start : start + math.prod(shape)].view(shape)
        yield _Strip(sources=sources, target=target, convert=convert, read=read)


_Step = tuple[tuple[Source, ...], int, tuple[int, ...], Convert]  # the target's first element in the region, its shape


def _copies(read: Read) -> Iterator[_Step]:
    entry = read.entry
    spec = TensorSpec(name=entry.name, dtype=entry.dtype, shape=read.piece.shape)
    for strip in cut_strips(entry, spec, read.piece.spans):
        sources = tuple(replace(source, dtype=entry.dtype) for source in strip.sources)
        [target] = strip.targets
        yield sources, target.start // entry.dtype.itemsize, target.shape, strip.convert or _cast


def _dequantised(read: Read, block: Block) -> Iterator[_Step]:
    """Strips of whole rows of blocks, matrix by matrix, for a ragged matrix ends within a block."""
    *leading, rows, [(left, right)] = read.piece.spans
    convert = partial(_dequantize, left=left, right=right, block=block)
    width, done = right - left, 0
    for index in itertools.product(*(_indices(spans) for spans in leading)):
        matrix = 0
        for i, size in zip(index, read.entry.shape, strict=False):
            matrix = matrix * size + i
        for start, stop in rows:
            assert start % block[0] == 0, f"{read.entry.name}: the plan cuts within a block"
            for a, b in row_spans(stop - start, read.entry.shape[-1], multiple=block[0]):
                weight = rows_of(read.entry, matrix, start + a, start + b)
                scale = scale_rows_of(read.scale, matrix, start + a, start + b, block)
                yield (weight, scale), done, (b - a, width), convert
                done += (b - a) * width


def _indices(spans: Spans) -> Iterator[int]:
    return itertools.chain.from_iterable(range(start, stop) for start, stop in spans)


def _cast(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    targets[0].copy_(sources[0])


def _dequantize(
    sources: list[torch.Tensor], targets: list[torch.Tensor], *, left: int, right: int, block: Block
) -> None:
    (weight, scale), [target] = sources, targets
    in_place = target.device == weight.device
    values = dequantize_fp8(
        weight[:, left:right],
        scale[:, left // block[1] : math.ceil(right / block[1])],
        block_size=block,
        dtype=target.dtype,
        out=target if in_place else None,
    )
    if not in_place:  # a device that workers have no stream for
        target.copy_(values)
