"""Convert a LoRA adapter of an MoE between the per-expert form, PEFT's stacked form and the vLLM form.

* per-expert: 2-D tensors of every expert and the two configs of `save_adapter`; stock PEFT, vLLM and SGLang load it.
* stacked: what PEFT >= 0.19 saves for `target_parameters`, two tensors for each stacked parameter of an experts module
  (`stacked_experts`). Gate and up are one parameter, gate_up_proj.
* vllm: the per-expert tensors with the plain names of transformers 4 as the only config.

All are read into (lora_A, lora_B, scaling) of every linear and every expert's projection, and written from that. Gate
and up with a LoRA each are stacked as one of twice the rank whose lora_B is block diagonal; of a stacked LoRA without
those blocks, gate and up both get the lora_A. Both are exact, and so is the way back.

The adapter is held in memory; of the base model only config.json is read.
"""

import shutil
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch.nn.functional import pad

from coati_ext.checkpoint_io.adapter import TRANSFORMERS4_DIR, write_files
from coati_ext.checkpoint_io.adapter_config import (
    DERIVED_FIELDS,
    config_transformers4,
    config_transformers5,
    read_config,
    refuse_changed_base,
)
from coati_ext.checkpoint_io.adapter_directory import replace_directory, write_json
from coati_ext.checkpoint_io.adapter_pairs import Base, Pair, Pairs, read_base, read_pairs
from coati_ext.checkpoint_io.model_card import package_versions
from coati_ext.checkpoint_io.names import FACTORS, PREFIX, to_disk
from coati_ext.checkpoint_io.stacked_experts import Factors, join_gate_up, join_shared, stack
from coati_ext.models.lora import refuse_unsupported
from coati_ext.utils.adapter_files import CONFIG_FILE, WEIGHTS_FILE, adapter_file

Form = Literal["per-expert", "stacked", "vllm"]
FORMS: tuple[Form, ...] = ("per-expert", "stacked", "vllm")

_TOKENIZER_FILES = {".json", ".jinja", ".model", ".txt"}


@dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """What was found and written, for the terminal."""

    adapter: Path
    output: Path
    found: str
    written: Form
    num_tensors_in: int
    num_tensors_out: int
    num_expert_pairs: int
    rank: int
    scaling: float
    notes: list[str] = field(default_factory=list)

    def format(self) -> str:
        lines = [
            f"adapter   {self.adapter}: {self.found}",
            f"output    {self.output}: {self.written}",
            f"tensors   {self.num_tensors_in} in -> {self.num_tensors_out} out, "
            f"with LoRA on {self.num_expert_pairs} projections of routed experts",
            f"rank      {self.rank}, scaling {self.scaling:g}",
        ]
        return "\n".join([*lines, *(f"note      {note}" for note in self.notes)])


def convert_adapter(
    adapter: str | Path,
    output: str | Path,
    *,
    to: Form,
    pretrained: str | Path | None = None,
    peft_orientation: str | None = None,
    overwrite: bool = False,
) -> ConversionReport:
    """Write the adapter to the directory `output` in another form; `adapter` stays as it is.

    Args:
        pretrained: directory of the base model, of which config.json is read; by default the one that the adapter
            names. Shapes and names are checked against it.
        peft_orientation: of `ORIENTATIONS`, for a stacked adapter whose shapes and `peft_version` do not tell it.
        overwrite: replace an adapter at `output`.

    Raises:
        ValueError: a tensor or a config option that cannot be converted, by name; an orientation that cannot be told.
        OSError: the disk.
    """
    adapter, output = Path(adapter), Path(output)
    file = adapter_file(adapter)
    if to not in FORMS:
        raise ValueError(f"--to {to} is unknown; accepted: {', '.join(FORMS)}")
    _refuse_output(adapter, output, overwrite)
    config = read_config(adapter)
    _refuse_options(config, adapter / CONFIG_FILE)
    base = read_base(pretrained or config.base_model_name_or_path)
    pairs, num_tensors, found, notes = read_pairs(file, config, base, peft_orientation=peft_orientation)
    pairs, rank, scaling, more = _even_out(pairs)
    notes += more
    if to != "stacked":
        pairs |= _padding(pairs, base)
    tensors, shares_lora_A = _stacked(pairs, base) if to == "stacked" else (_per_expert(pairs, base), False)
    name = config.base_model_name_or_path or str(pretrained)
    newer, older = _configs(pairs, base, rank, scaling, name)
    if shares_lora_A:
        newer |= {"rank_pattern": {}, "alpha_pattern": {}}
    elif to == "stacked" and newer["rank_pattern"]:
        notes.append(f"gate_proj and up_proj are stacked as one LoRA of rank {2 * rank} (rank_pattern)")
    kept = {name: getattr(config, name) for name in ("task_type", "revision") if getattr(config, name)}
    _save(output, to, tensors, newer | kept, older | kept, companions=_companions(adapter))
    if to == "vllm":
        notes.append("for vLLM, SGLang and transformers 4 alone: PEFT on transformers 5 would drop the experts")
    return ConversionReport(
        adapter=adapter,
        output=output,
        found=found,
        written=to,
        num_tensors_in=num_tensors,
        num_tensors_out=len(tensors),
        num_expert_pairs=sum(place.projection is not None for place in pairs),
        rank=rank,
        scaling=scaling,
        notes=notes,
    )


def _refuse_output(adapter: Path, output: Path, overwrite: bool) -> None:
    if adapter.resolve().is_relative_to(output.resolve()):
        raise ValueError(f"--output {output} holds the adapter that is read, {adapter}: give another directory")
    if output.exists() and not overwrite:
        raise ValueError(f"--output {output} is there already: give another directory, or --overwrite")


def _refuse_options(config: LoraConfig, file: Path) -> None:
    refuse_changed_base(config, file)
    try:
        refuse_unsupported(LoraConfig(**{k: v for k, v in config.to_dict().items() if k not in DERIVED_FIELDS}))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


# --- one rank and one scaling, which all readers but stock PEFT need


def _even_out(pairs: Pairs) -> tuple[Pairs, int, float, list[str]]:
    """The largest rank for all, by zeros, and the scaling of the linears for all, by multiplying lora_B."""
    rank = max(len(pair.lora_A) for pair in pairs.values())
    found = [pair.scaling for place, pair in pairs.items() if pair.scaling and place.projection is None]
    found = found or [pair.scaling for pair in pairs.values() if pair.scaling] or [1.0]
    scaling = Counter(found).most_common(1)[0][0]
    even: Pairs = {}
    ratios, num_rounded, num_padded = set(), 0, 0
    for place, pair in pairs.items():
        lora_A, lora_B = pair.lora_A, pair.lora_B
        if pair.scaling != scaling:
            ratios.add(pair.scaling / scaling)
            exact = lora_B.double() * (pair.scaling / scaling)
            lora_B = exact.to(lora_B.dtype)
            if not torch.isfinite(lora_B).all():
                raise ValueError(f"{place.target}: lora_B times {pair.scaling / scaling:g} overflows {lora_B.dtype}")
            num_rounded += not torch.equal(exact, lora_B.double())
        num_zeros = rank - len(lora_A)
        num_padded += num_zeros > 0
        lora_A, lora_B = pad(lora_A, (0, 0, 0, num_zeros)), pad(lora_B, (0, num_zeros))
        even[place] = Pair(lora_A=lora_A, lora_B=lora_B, scaling=scaling)
    notes = []
    if ratios:
        by = ", ".join(f"{ratio:g}" for ratio in sorted(ratios))
        rounded = f"{num_rounded} tensors rounded" if num_rounded else "exact"
        notes.append(f"scalings differ: lora_B is multiplied by {by} where the scaling is not {scaling:g} ({rounded})")
    if num_padded:
        notes.append(f"ranks differ: {num_padded} LoRAs filled up with zeros to rank {rank}")
    return even, rank, scaling, notes


# --- write


def _padding(pairs: Pairs, base: Base) -> Pairs:
    """A down_proj of zeros for experts with gate and up alone, without which PEFT cannot place per-expert tensors."""
    padding: Pairs = {}
    for place, pair in pairs.items():
        down = replace(place, projection="down_proj")
        if place.projection == "gate_proj" and down not in pairs:
            out, in_ = base.widths(down)
            zeros = pair.lora_A.new_zeros
            rank = len(pair.lora_A)
            padding[down] = Pair(lora_A=zeros(rank, in_), lora_B=zeros(out, rank), scaling=pair.scaling)
    return padding


def _configs(pairs: Pairs, base: Base, rank: int, scaling: float, name: str) -> tuple[dict, dict]:
    common = {"model_type": base.model_type, "rank": rank, "scaling": scaling, "base_model_name_or_path": name}
    newer = config_transformers5(pairs, modules=base.modules, parameters=base.parameters, **common)
    return newer, config_transformers4(pairs, **common)


def _per_expert(pairs: Pairs, base: Base) -> dict[str, torch.Tensor]:
    return {
        to_disk(replace(place, factor=factor), base.model_type): getattr(pair, factor)
        for place, pair in pairs.items()
        for factor in FACTORS
    }


def _stacked(pairs: Pairs, base: Base) -> tuple[dict[str, torch.Tensor], bool]:
    """The tensors, and whether gate and up share lora_A in all of them (so that the rank is not doubled)."""
    tensors = _per_expert({place: pair for place, pair in pairs.items() if place.projection is None}, base)
    layers: dict[str, dict[str, Factors]] = {}
    for place, pair in pairs.items():  # experts of a projection come in any order
        if place.projection is not None:
            empty = [None] * base.num_experts(place.path)
            both = layers.setdefault(place.path, {}).setdefault(place.projection, (empty, [*empty]))
            both[0][place.expert], both[1][place.expert] = pair.lora_A, pair.lora_B
    with_gate = [layer for layer in layers.values() if "gate_proj" in layer]
    shared = bool(with_gate) and all(
        torch.equal(*both)
        for layer in with_gate
        for both in zip(layer["gate_proj"][0], layer["up_proj"][0], strict=True)
    )
    for path, layer in layers.items():
        below = {"down_proj": layer["down_proj"]} if "down_proj" in layer else {}
        if "gate_proj" in layer:
            join = join_shared if shared else join_gate_up
            below["gate_up_proj"] = join(layer["gate_proj"], layer["up_proj"])
        for parameter, both in below.items():
            prefix = ".base_layer" if parameter == "gate_up_proj" and "down_proj" in below else ""
            for factor, tensor in zip(FACTORS, stack(both), strict=True):
                tensors[f"{PREFIX}{path}{prefix}.{factor}.weight"] = tensor
    return tensors, shared


def _companions(adapter: Path) -> list[Path]:
    """The tokenizer, which belongs to the adapter in any form; the model card tells of one form only."""
    return [f for f in adapter.iterdir() if f.is_file() and f.suffix in _TOKENIZER_FILES and f.name != CONFIG_FILE]


def _save(
    output: Path, to: Form, tensors: dict[str, torch.Tensor], newer: dict, older: dict, *, companions: list[Path]
) -> None:
    tensors = {key: tensor.clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()}
    with replace_directory(output) as new:
        for file in companions:
            shutil.copyfile(file, new / file.name)
        if to == "per-expert":
            write_files(new, tensors, (newer, older))
            return
        weights = new / WEIGHTS_FILE
        save_file(tensors, weights, metadata={"format": "pt", **package_versions()})
        weights.chmod(new.stat().st_mode & 0o666)  # safetensors 0.8 leaves it readable by the owner only
        write_json(new / CONFIG_FILE, older if to == "vllm" else newer)
    if (output / TRANSFORMERS4_DIR).exists():  # of the adapter that was there before
        shutil.rmtree(output / TRANSFORMERS4_DIR)
