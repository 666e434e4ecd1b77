"""W + scaling·B·A for whole checkpoints: the base's shards and names, for BF16 and for block-scaled FP8 bases.

Streams like the FP8 tools; of the adapter only the factors of the rows in work are in memory. The sum is made in
float32 and rounded once; with an FP8 base it is quantised again with new scales, or written in BF16. Weights whose B is
zero, such as those of experts that no token visited, are copied byte for byte.

Legend: r rank.
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from coati_ext.checkpoint_io.adapter_config import lora_config_from_adapter
from coati_ext.checkpoint_io.bf16_to_fp8 import FLOATS, quantize_named
from coati_ext.checkpoint_io.checkpoint import Checkpoint
from coati_ext.checkpoint_io.fp8_format import (
    DEFAULT_BLOCK,
    FP8_DTYPES,
    SCALE_SUFFIX,
    Block,
    block_size,
    fp8_specs,
    is_power_of_two,
    quantization_of,
    scale_rows_of,
    scale_rows_to,
    scales_of,
)
from coati_ext.checkpoint_io.fp8_to_bf16 import bf16_config, dequantized
from coati_ext.checkpoint_io.model_card import full_model_card
from coati_ext.checkpoint_io.names import PREFIX
from coati_ext.checkpoint_io.rewrite import WorkOptions, fingerprints, rewrite_checkpoint
from coati_ext.checkpoint_io.safetensors_file import TensorEntry, read_exactly, read_header
from coati_ext.checkpoint_io.stream import OutputShard, Strip, TensorSpec, row_spans, rows_of, rows_to, spans
from coati_ext.checkpoint_io.workers import bytes_of
from coati_ext.kernel.fp8_cast import dequantize_fp8
from coati_ext.utils.adapter_files import adapter_file

OutputDtype = Literal["same", "bf16"]
_SUM_ELEMENTS = 2 << 20  # a float32 copy of so much of a strip is in memory at a time
_LISTED = 3
_WRITTEN_SCALES = (torch.float32, torch.float8_e8m0fnu)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The factors of one weight: (r, in) and (out, r)."""

    lora_A: TensorEntry
    lora_B: TensorEntry


@dataclass(frozen=True, kw_only=True)
class MergeReport:
    """What was merged."""

    num_adapter_tensors: int
    num_changed: int
    num_zero: int
    """Weights whose lora_B is zero."""
    num_weights: int
    """All tensors of the base."""
    scaling: float

    def format(self) -> str:
        zero = f", {self.num_zero} have lora_B = 0 and stay as they are" if self.num_zero else ""
        return (
            f"{self.num_adapter_tensors} adapter tensors, all used: {self.num_changed} of {self.num_weights} tensors "
            f"of the base changed by {self.scaling:g}·B·A{zero}"
        )


def merge_adapter(
    checkpoint: Checkpoint, adapter: Path, output: Path, *, output_dtype: OutputDtype = "same", options: WorkOptions
) -> MergeReport:
    """Write the merged model; see `rewrite_checkpoint` for how, and what it raises besides.

    Args:
        adapter: a PEFT directory with one pair of 2-D tensors for each linear and each expert's projection.
        output_dtype: "bf16" writes an FP8 base's weights in BF16.

    Raises:
        ValueError: not such an adapter, a tensor of it that fits no weight of the base, an adapter without effect, a
            sum that is not finite; names the tensor.
    """
    config = lora_config_from_adapter(adapter)
    scaling = config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)
    if not math.isfinite(scaling) or scaling == 0:
        raise ValueError(f"{adapter}: lora_alpha {config.lora_alpha} gives the scaling {scaling}; nothing to merge")
    pairs = read_pairs(adapter, checkpoint)
    zero = {name for name, pair in pairs.items() if _is_zero(pair.lora_B)}
    if len(zero) == len(pairs):
        raise ValueError(
            f"{adapter}: every lora_B is zero, so there is nothing to merge; was it saved before training?"
        )
    changed = {name: pair for name, pair in pairs.items() if name not in zero}
    if output_dtype == "bf16" and not any(entry.dtype in FP8_DTYPES for entry in checkpoint.tensors.values()):
        raise ValueError(f"--output_dtype bf16: {checkpoint.directory} is not FP8; leave the flag out")
    report = MergeReport(
        num_adapter_tensors=2 * len(pairs),
        num_changed=len(changed),
        num_zero=len(zero),
        num_weights=len(checkpoint.tensors),
        scaling=scaling,
    )
    details = {"Adapter": f"{adapter.absolute()}, rank {config.r}, scaling {scaling:g}", "Merged": report.format()}
    rewrite_checkpoint(
        checkpoint,
        output,
        shards=_plan(checkpoint, changed, scaling, output_dtype),
        config=bf16_config(checkpoint.config(), mtp="keep") if output_dtype == "bf16" else checkpoint.config(),
        identity={"tool": "merge", "output_dtype": output_dtype, "scaling": scaling, **_fingerprint(adapter)},
        options=options,
        inputs=[adapter],
        card=full_model_card(checkpoint.directory, "with a LoRA adapter merged in", details),
    )
    return report


def read_pairs(adapter: Path, checkpoint: Checkpoint) -> dict[str, Pair]:
    """Weight of the base -> its factors; every tensor of the adapter is in exactly one pair.

    Raises:
        ValueError: a tensor without its partner, without a weight in the base, or of a shape that does not fit.
    """
    file = adapter_file(adapter)
    entries = {entry.name: entry for entry in read_header(file)[0]}
    paths = {key.removesuffix(f".{factor}.weight") for key in entries for factor in ("lora_A", "lora_B")} - set(entries)
    pairs, unused = {}, []
    for path in sorted(paths):
        factors = [entries.get(f"{path}.{factor}.weight") for factor in ("lora_A", "lora_B")]
        if None in factors:
            raise ValueError(f"{file}: {path} has only one of lora_A and lora_B")
        name = f"{path.removeprefix(PREFIX)}.weight"
        weight = checkpoint.tensors.get(name)
        if weight is None:
            unused += [factor.name for factor in factors]
            continue
        pairs[name] = Pair(lora_A=factors[0], lora_B=factors[1])
        _check_fit(weight, pairs[name], file)
    if unused:
        more = f" and {len(unused) - _LISTED} more" if len(unused) > _LISTED else ""
        raise ValueError(
            f"{file}: {len(unused)} tensors belong to no weight of {checkpoint.directory}: "
            f"{', '.join(unused[:_LISTED])}{more}"
        )
    return pairs


def _check_fit(weight: TensorEntry, pair: Pair, file: Path) -> None:
    if weight.dtype not in (*FLOATS, *FP8_DTYPES):
        raise ValueError(f"{weight.file}: {weight.name} is {weight.dtype}; accepted: bf16, fp16, fp32 or FP8")
    for factor in (pair.lora_A, pair.lora_B):
        if factor.dtype not in FLOATS:
            raise ValueError(f"{file}: {factor.name} is {factor.dtype}; accepted: bf16, fp16, fp32")
    rank = pair.lora_A.shape[0]
    expected = ((rank, weight.shape[-1]), (weight.shape[0], rank))
    if len(weight.shape) != 2 or (pair.lora_A.shape, pair.lora_B.shape) != expected:
        raise ValueError(
            f"{file}: {pair.lora_A.name} {list(pair.lora_A.shape)} and lora_B {list(pair.lora_B.shape)} do not fit the "
            f"weight {list(weight.shape)} in {weight.file}; is it another model's adapter?"
        )


def _is_zero(entry: TensorEntry) -> bool:
    values = torch.empty(entry.shape, dtype=entry.dtype)
    with entry.file.open("rb") as file:
        read_exactly(file.fileno(), bytes_of(values), entry.start, entry.file)
    return not torch.any(values).item()


def _plan(
    checkpoint: Checkpoint, pairs: dict[str, Pair], scaling: float, output_dtype: OutputDtype
) -> list[OutputShard]:
    is_fp8 = any(entry.dtype in FP8_DTYPES for entry in checkpoint.tensors.values())
    block = block_size(checkpoint) if is_fp8 else DEFAULT_BLOCK
    scales = scales_of(checkpoint, block)
    ue8m0 = is_power_of_two(quantization_of(checkpoint.config()) or {})
    shards = []
    for name, entries in checkpoint.shards.items():
        shard = OutputShard(name=name, metadata={**checkpoint.metadata[name], "format": "pt"})
        here = {entry.name for entry in entries}
        for entry in entries:
            weight = checkpoint.tensors[entry.name.removesuffix(SCALE_SUFFIX)]
            scale, pair = scales.get(weight.name), pairs.get(weight.name)
            to_bf16 = scale is not None and output_dtype == "bf16"
            if entry is scale and (to_bf16 or (pair is not None and weight.name in here)):
                continue  # not needed any more, or made together with the weight
            if pair is not None:
                merged = _Merged(weight, scale, pair, scaling, block, ue8m0=ue8m0, to_bf16=to_bf16)
                shard.add(*merged.plan({entry.name, scale.name} & here if scale is not None else {entry.name}))
            elif to_bf16:
                shard.add(*dequantized(entry, scale, block))
            else:
                shard.copy(entry)
        shards.append(shard)
    return shards


class _Merged:
    """One weight to change, FP8 if it has scales."""

    def __init__(
        self,
        weight: TensorEntry,
        scale: TensorEntry | None,
        pair: Pair,
        scaling: float,
        block: Block,
        *,
        ue8m0: bool,
        to_bf16: bool,
    ) -> None:
        self._weight, self._scale, self._pair = weight, scale, pair
        self._scaling, self._block = scaling, block
        self._to_fp8 = scale is not None and not to_bf16
        if self._to_fp8 and weight.dtype != torch.float8_e4m3fn:
            raise ValueError(
                f"{weight.file}: {weight.name} is {weight.dtype}; FP8 is written as e4m3: pass --output_dtype bf16"
            )
        if self._to_fp8 and scale.dtype not in _WRITTEN_SCALES:
            raise ValueError(
                f"{scale.file}: {scale.name} is {scale.dtype}; scales are written in {_WRITTEN_SCALES}: pass "
                "--output_dtype bf16"
            )
        self._ue8m0 = ue8m0 or (scale is not None and scale.dtype == torch.float8_e8m0fnu)
        dtype = torch.bfloat16 if to_bf16 else weight.dtype
        self._specs = [TensorSpec(name=weight.name, dtype=dtype, shape=weight.shape)]
        if self._to_fp8:
            self._specs = list(fp8_specs(weight.name, weight.shape, block, scale.dtype))

    def plan(self, names: set[str]) -> tuple[list[TensorSpec], list[Strip]]:
        """The tensors of these names (weight, scales or both) and the strips that make them."""
        specs = [spec for spec in self._specs if spec.name in names]
        spans = row_spans(*self._weight.shape, multiple=self._block[0])
        return specs, [self._strip(specs, start, stop) for start, stop in spans]

    def _strip(self, specs: list[TensorSpec], start: int, stop: int) -> Strip:
        sources = [
            rows_of(self._pair.lora_A, 0, 0, self._pair.lora_A.shape[0]),
            rows_of(self._pair.lora_B, 0, start, stop),
            rows_of(self._weight, 0, start, stop),
        ]
        if self._scale is not None:
            sources.append(scale_rows_of(self._scale, 0, start, stop, self._block))
        targets = [
            scale_rows_to(spec, 0, start, stop, self._block)
            if spec.shape != self._weight.shape
            else rows_to(spec, 0, start, stop)
            for spec in specs
        ]
        convert = partial(self._merge, names=[spec.name for spec in specs])
        return Strip(sources=tuple(sources), targets=tuple(targets), convert=convert)

    def _merge(self, sources: list[torch.Tensor], targets: list[torch.Tensor], *, names: list[str]) -> None:
        lora_A, lora_B, weight, *scale = sources
        lora_A, lora_B = lora_A.float(), lora_B.float()
        block_rows = self._block[0]
        step = max(_SUM_ELEMENTS // max(weight.shape[1], 1) // block_rows, 1) * block_rows
        for start, stop in spans(len(weight), step=step):
            blocks = slice(start // block_rows, math.ceil(stop / block_rows))
            rows = weight[start:stop]
            if scale:
                rows = dequantize_fp8(rows, scale[0][blocks], block_size=self._block, dtype=torch.float32)
            merged = rows.float().addmm_(lora_B[start:stop], lora_A, alpha=self._scaling)
            made = {self._weight.name: (merged, slice(start, stop))}
            if self._to_fp8:
                quantised, scales = quantize_named(
                    merged, block=self._block, power_of_two=self._ue8m0, name=self._weight.name
                )
                made = {self._weight.name: (quantised, slice(start, stop)), self._scale.name: (scales, blocks)}
            for name, target in zip(names, targets, strict=True):
                value, place = made[name]
                target[place].copy_(value)
                if not self._to_fp8 and not torch.isfinite(target[place]).all():
                    raise ValueError(f"{name}: not finite in {target.dtype} after the merge")


def _fingerprint(adapter: Path) -> dict[str, Any]:
    return fingerprints([adapter_file(adapter).resolve()])
