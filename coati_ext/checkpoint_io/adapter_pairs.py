"""Read an adapter of an MoE, in any form, into the LoRA of every linear and of every expert's projection.

Names and shapes are checked against the base model, of which config.json alone is read. Scalings are those that PEFT
gives a module by the adapter's config, patterns and rsLoRA included.
"""

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from peft import LoraConfig
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from coati_ext.checkpoint_io.adapter_config import read_shapes
from coati_ext.checkpoint_io.names import FACTORS, PREFIX, LoraTensor, from_disk, to_disk
from coati_ext.checkpoint_io.stacked_experts import (
    StackedLora,
    has_blocks,
    split_gate_up,
    split_shared,
    tell_orientation,
    unstack,
)
from coati_ext.moe.experts import is_experts_module
from coati_ext.utils.adapter_files import CONFIG_FILE

_PARAMETERS = ("gate_up_proj", "down_proj")
_STACKED_KEY = re.compile(rf"{re.escape(PREFIX)}(?P<path>.+?\.experts)(?P<below>(\.base_layer)?\.lora_[AB])\.weight")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One LoRA: the weight (out, in) changes by scaling · lora_B (out, r) @ lora_A (r, in)."""

    lora_A: torch.Tensor
    lora_B: torch.Tensor
    scaling: float


Pairs = dict[LoraTensor, Pair]  # the place (its factor means nothing) -> the LoRA there


# --- the base model


@dataclass(frozen=True, kw_only=True)
class Base:
    """Names and shapes of the base model as transformers builds it."""

    model_type: str
    modules: set[str]
    parameters: dict[str, tuple[int, ...]]
    experts: set[str]
    """Paths of the stacked experts modules: gate_up_proj (E, 2I, H), down_proj (E, H, I)."""

    def num_experts(self, path: str) -> int:
        return self.parameters[f"{path}.down_proj"][0]

    def widths(self, place: LoraTensor) -> tuple[int, int] | None:
        """(out, in) of the weight at this place; None if the model has no such weight."""
        if place.projection is None:
            shape = self.parameters.get(f"{place.path}.weight", ())
            return shape if len(shape) == 2 else None
        if place.path not in self.experts:
            return None
        _, out, in_ = self.parameters[f"{place.path}.down_proj"]
        return (out, in_) if place.projection == "down_proj" else (in_, out)


def read_base(pretrained: str | Path | None) -> Base:
    """Names and shapes from config.json alone: the model is built on the meta device.

    Raises:
        ValueError: no such config on this machine, or no causal language model of transformers.
    """
    if pretrained is None:
        raise ValueError("the adapter names no base model: pass its directory with --pretrained")
    try:
        config = AutoConfig.from_pretrained(str(pretrained), local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"base model {pretrained} cannot be read on this machine ({reason}); "
            "pass a directory that has its config.json with --pretrained"
        ) from None
    modules = dict(model.named_modules())
    return Base(
        model_type=config.model_type,
        modules=set(modules) - {""},
        parameters={n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)},
        experts={path for path, module in modules.items() if is_experts_module(module)},
    )


# --- read


@dataclass(frozen=True, kw_only=True)
class _Source:
    """What the tensors of a file are read by."""

    file: Path
    config: LoraConfig
    base: Base
    peft_orientation: str | None

    def scaling(self, key: str, rank: int) -> float:
        """PEFT's scaling of what it calls `key`, which has this rank in the file."""
        ranks, alphas = self.config.rank_pattern or {}, self.config.alpha_pattern or {}
        r = ranks.get(get_pattern_key(ranks, key), self.config.r)
        alpha = alphas.get(get_pattern_key(alphas, key), self.config.lora_alpha)
        if r != rank:
            raise ValueError(f"{self.file}: {key} has rank {rank}, but {CONFIG_FILE} and the base model make it {r}")
        return alpha / (math.sqrt(r) if self.config.use_rslora else r)

    def targets(self, parameter: str) -> bool:
        """Whether PEFT takes the parameter of this name for one of `target_parameters`."""
        return any(f".{parameter}".endswith(f".{target}") for target in self.config.target_parameters or ())

    def pair(self, place: LoraTensor, lora_A: torch.Tensor, lora_B: torch.Tensor) -> Pair:
        """A pair of the per-expert file, its shapes checked."""
        key, rank, widths = to_disk(place, self.base.model_type), lora_A.shape[0], self.base.widths(place)
        if widths is None:
            raise ValueError(f"{self.file}: {key} belongs to no weight of the base model ({self.base.model_type})")
        if place.expert is not None and place.expert >= self.base.num_experts(place.path):
            raise ValueError(
                f"{self.file}: {key}: the base model has {self.base.num_experts(place.path)} experts there"
            )
        if (lora_B.shape, lora_A.shape) != ((widths[0], rank), (rank, widths[1])):
            raise ValueError(
                f"{self.file}: {key} has shape {tuple(lora_A.shape)} and its lora_B {tuple(lora_B.shape)}; "
                f"expected (r, {widths[1]}) and ({widths[0]}, r)"
            )
        num_fused = 1
        if place.projection is None:
            name = f"{place.path}.weight" if self.targets(f"{place.path}.weight") else place.path
        else:
            name = f"{place.path}.{'down_proj' if place.projection == 'down_proj' else 'gate_up_proj'}"
            if not self.targets(name):  # the names of transformers 4, where each expert is a module
                name = key.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            elif place.projection != "down_proj":
                num_fused = 2  # PEFT joins gate and up when it loads them
        return Pair(lora_A=lora_A, lora_B=lora_B, scaling=self.scaling(name, num_fused * rank))


def read_pairs(
    file: Path, config: LoraConfig, base: Base, *, peft_orientation: str | None = None
) -> tuple[Pairs, int, str, list[str]]:
    """The LoRAs of a file, the number of its tensors, the form that it has, and notes for the user.

    Every tensor is used, or it is an error.

    Args:
        peft_orientation: of `ORIENTATIONS`, for a stacked adapter whose shapes and `peft_version` do not tell it.

    Raises:
        ValueError: a tensor that is unknown, not finite, without its partner, of another shape or rank than base and
            config give it; experts that are missing; an orientation that cannot be told.
    """
    if not read_shapes(file):
        raise ValueError(f"{file} holds no tensor")
    tensors = load_file(file)
    source = _Source(file=file, config=config, base=base, peft_orientation=peft_orientation)
    plain, stacked = _sorted(tensors, source)
    pairs = _plain_pairs(plain, source)
    of_experts = [place for place in pairs if place.projection is not None]
    if stacked and of_experts:
        raise ValueError(f"{file} has routed experts in the stacked form and in the per-expert form as well")
    if stacked:
        more, found, notes = _stacked_pairs(stacked, source)
        return pairs | more, len(tensors), found, notes
    if peft_orientation is not None:
        raise ValueError(f"--peft-orientation is for stacked adapters; {file} is none")
    if not of_experts:
        return pairs, len(tensors), "no LoRA on routed experts", []
    _refuse_gaps(of_experts, source)
    newer = any(source.targets(f"{place.path}.{parameter}") for place in of_experts for parameter in _PARAMETERS)
    config_form = "config of transformers 5" if newer else "plain names (transformers 4, vLLM)"
    return pairs, len(tensors), f"per-expert, {config_form}", []


def _sorted(
    tensors: dict[str, torch.Tensor], source: _Source
) -> tuple[dict[LoraTensor, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """Tensors of linears and single experts by name, and of each stacked experts module by the key below it."""
    plain: dict[LoraTensor, torch.Tensor] = {}
    stacked: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{source.file}: {key} is not finite")
        match = _STACKED_KEY.fullmatch(key)
        if match is not None:
            if match["path"] not in source.base.experts:
                raise ValueError(f"{source.file}: {key}: {source.base.model_type} has no routed experts there")
            stacked.setdefault(match["path"], {})[match["below"]] = tensor
            continue
        try:
            name = from_disk(key)
        except ValueError as error:
            raise ValueError(f"{source.file}: {error}") from None
        if name in plain:
            raise ValueError(f"{source.file}: {key} is there under another name too")
        plain[name] = tensor
    return plain, stacked


def _plain_pairs(tensors: dict[LoraTensor, torch.Tensor], source: _Source) -> Pairs:
    pairs: Pairs = {}
    for place in dict.fromkeys(replace(name, factor="lora_A") for name in tensors):
        names = [replace(place, factor=factor) for factor in FACTORS]
        for name in names:
            if name not in tensors:
                key = to_disk(name, source.base.model_type)
                raise ValueError(f"{source.file}: {key} is missing (lora_A and lora_B come in pairs)")
        pairs[place] = source.pair(place, *(tensors[name] for name in names))
    return pairs


def _refuse_gaps(places: list[LoraTensor], source: _Source) -> None:
    """Every expert needs what one of its layer has, and gate_proj needs up_proj: one stacked parameter holds them."""
    for path in dict.fromkeys(place.path for place in places):
        found = {(place.projection, place.expert) for place in places if place.path == path}
        projections = {projection for projection, _ in found}
        if "gate_proj" in projections or "up_proj" in projections:
            projections |= {"gate_proj", "up_proj"}
        for projection in sorted(projections):
            missing = [e for e in range(source.base.num_experts(path)) if (projection, e) not in found]
            if missing:
                raise ValueError(
                    f"{source.file}: {path} has no LoRA on {projection} of expert(s) {missing}; expected all experts, "
                    "and gate_proj and up_proj together"
                )


def _stacked_pairs(stacked: dict[str, dict[str, torch.Tensor]], source: _Source) -> tuple[Pairs, str, list[str]]:
    loras = [lora for path, tensors in stacked.items() for lora in _stacked_loras(path, tensors, source)]
    version = json.loads((source.file.parent / CONFIG_FILE).read_text()).get("peft_version")  # LoraConfig fills it in
    orientation, reason = tell_orientation(
        loras, peft_version=version, asked=source.peft_orientation, source=str(source.file)
    )
    factors = [unstack(lora, orientation) for lora in loras]
    gate_up = [both for lora, both in zip(loras, factors, strict=True) if lora.parameter == "gate_up_proj"]
    blocks = all(map(has_blocks, gate_up)) and any(torch.any(b) for _, lora_B in gate_up for b in lora_B)
    pairs: Pairs = {}
    for lora, both in zip(loras, factors, strict=True):
        parts = {"down_proj": both}
        if lora.parameter == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), (split_gate_up if blocks else split_shared)(both), strict=True))
        scaling = source.scaling(f"{lora.path}.{lora.parameter}", lora.rank)
        for projection, part in parts.items():
            for expert, (lora_A, lora_B) in enumerate(zip(*part, strict=True)):
                place = LoraTensor(path=lora.path, projection=projection, expert=expert)
                pairs[place] = Pair(lora_A=lora_A, lora_B=lora_B, scaling=scaling)
    notes = []
    if orientation == "0.18":
        notes.append(f"orientation of PEFT 0.18, {reason}: the roles of lora_A and lora_B are swapped back")
    if gate_up and not blocks:
        notes.append("gate_proj and up_proj share the lora_A of gate_up_proj")
    return pairs, f"stacked, orientation of PEFT {'>= 0.19' if orientation == '0.19' else '< 0.19'} ({reason})", notes


def _stacked_loras(path: str, tensors: dict[str, torch.Tensor], source: _Source) -> list[StackedLora]:
    """The LoRAs of one experts module. PEFT nests: of two parameters the first, gate_up_proj, is the base layer."""
    targeted = [parameter for parameter in _PARAMETERS if source.targets(f"{path}.{parameter}")]
    below = dict.fromkeys(targeted, "")
    if len(targeted) == 2:
        below["gate_up_proj"] = ".base_layer"
    expected = {f"{prefix}.{factor}" for prefix in below.values() for factor in FACTORS}
    if expected != set(tensors):
        raise ValueError(
            f"{source.file}: {path} has {sorted(tensors)}, but target_parameters "
            f"{sorted(source.config.target_parameters or ())} of {CONFIG_FILE} make it {sorted(expected)}"
        )
    return [
        StackedLora(
            path=path,
            parameter=parameter,
            lora_A=tensors[f"{prefix}.lora_A"],
            lora_B=tensors[f"{prefix}.lora_B"],
            shape=source.base.parameters[f"{path}.{parameter}"],
        )
        for parameter, prefix in below.items()
    ]
