"""Names of adapter tensors: one table, read in both directions, between our modules and the PEFT file.

On disk every expert has 2-D tensors of its own under the names that the family's checkpoint has:
`base_model.model.model.layers.3.mlp.experts.7.gate_proj.lora_A.weight`, or for Mixtral-like families
`base_model.model.model.layers.3.block_sparse_moe.experts.7.w1.lora_A.weight`. That is the form that stock PEFT, vLLM
and SGLang read. PEFT's stacked form changed between 0.18 and 0.19 under the same keys; `convert_adapter` reads
and writes it.

A new family whose names differ is one more row in `EXPERT_NAMES`.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN, _MOE_TARGET_MODULE_MAPPING

PREFIX = "base_model.model."
FACTORS = ("lora_A", "lora_B")
_MODULE_END = ".mlp.experts"  # where transformers 5 and PEFT's conversion have the experts module in these families


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """What one conversion pattern of transformers calls the experts' block and projections on disk."""

    block: str
    gate_proj: str
    up_proj: str
    down_proj: str


EXPERT_NAMES = {
    "mixtral": ExpertNames(block="block_sparse_moe", gate_proj="w1", up_proj="w3", down_proj="w2"),
    "qwen2_moe": ExpertNames(block="mlp", gate_proj="gate_proj", up_proj="up_proj", down_proj="down_proj"),
}
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_FROM_DISK = {
    (names.block, getattr(names, projection)): projection
    for names in EXPERT_NAMES.values()
    for projection in _PROJECTIONS
}


@dataclass(frozen=True, kw_only=True, order=True)
class LoraTensor:
    """One tensor of an adapter file; for routed experts `path` is their module, and projection and expert are set."""

    path: str
    projection: str | None = None
    expert: int | None = None
    factor: Literal["lora_A", "lora_B"] = "lora_A"

    @property
    def target(self) -> str:
        """The path of `models.targets.Candidate` that this tensor belongs to."""
        return self.path if self.projection is None else f"{self.path}.{self.projection}"


def conversion_pattern(model_type: str) -> str:
    """The name of the family's row in PEFT's and transformers' conversion tables (itself where it has none)."""
    return _MODEL_TO_CONVERSION_PATTERN.get(model_type, model_type)


def rewritten_targets(model_type: str) -> set[str]:
    """Module names that PEFT takes for routed experts when they stand in `target_modules` (huggingface/peft#3711)."""
    return set(_MOE_TARGET_MODULE_MAPPING.get(conversion_pattern(model_type), ()))


def expert_names(model_type: str) -> ExpertNames:
    """The family's names on disk.

    Raises:
        ValueError: a family that PEFT's conversion does not know: it would drop the experts' tensors without a word.
    """
    names = EXPERT_NAMES.get(conversion_pattern(model_type))
    if names is None:
        converted = {t for t, pattern in _MODEL_TO_CONVERSION_PATTERN.items() if pattern in EXPERT_NAMES}
        known = sorted(converted | EXPERT_NAMES.keys())  # qwen2_moe stands for a pattern and has no row of its own
        raise ValueError(
            f"model_type {model_type!r}: an adapter with routed experts cannot be exported, because the installed PEFT "
            f"has no conversion for this family and would drop the experts' tensors. Accepted: {known}."
        )
    return names


def to_disk(tensor: LoraTensor, model_type: str) -> str:
    """The key in `adapter_model.safetensors`.

    Raises:
        ValueError: routed experts of a family, or under a path, that PEFT's conversion does not know.

    Example:
        >>> to_disk(LoraTensor(path="model.layers.0.mlp.experts", projection="up_proj", expert=2), "mixtral")
        'base_model.model.model.layers.0.block_sparse_moe.experts.2.w3.lora_A.weight'
    """
    if tensor.projection is None:
        return f"{PREFIX}{tensor.path}.{tensor.factor}.weight"
    names = expert_names(model_type)
    if not tensor.path.endswith(_MODULE_END):
        raise ValueError(
            f"{tensor.path}: routed experts of {model_type!r} must be at '*{_MODULE_END}' for PEFT to load an adapter"
        )
    block = f"{tensor.path.removesuffix(_MODULE_END)}.{names.block}"
    leaf = getattr(names, tensor.projection)
    return f"{PREFIX}{block}.experts.{tensor.expert}.{leaf}.{tensor.factor}.weight"


def from_disk(key: str) -> LoraTensor:
    """The inverse of `to_disk`; needs no model type, for the families' names are disjoint.

    Raises:
        ValueError: the key is no per-expert or per-module LoRA weight.
    """
    match = re.fullmatch(rf"{re.escape(PREFIX)}(?P<path>.+)\.(?P<factor>lora_[AB])\.weight", key)
    if match is None:
        raise ValueError(f"tensor {key!r} is no LoRA weight ('{PREFIX}<module>.lora_A.weight' or lora_B)")
    path, factor = match["path"], match["factor"]
    if re.search(r"\.experts(\.base_layer)?$", path):
        raise ValueError(
            f"tensor {key!r} is in PEFT's fused expert form, whose meaning depends on the PEFT version that wrote it. "
            "Accepted: one 2-D tensor per expert ('...experts.0.gate_proj.lora_A.weight'); "
            "applications/convert_adapter.py --to per-expert makes them."
        )
    expert = re.fullmatch(r"(?P<above>.+)\.(?P<block>\w+)\.experts\.(?P<expert>\d+)\.(?P<leaf>\w+)", path)
    if expert is None:
        return LoraTensor(path=path, factor=factor)
    projection = _FROM_DISK.get((expert["block"], expert["leaf"]))
    if projection is None:
        accepted = sorted(f"{block}.experts.N.{leaf}" for block, leaf in _FROM_DISK)
        raise ValueError(f"tensor {key!r} is of an expert with an unknown name. Accepted: {accepted}.")
    path = f"{expert['above']}{_MODULE_END}"
    return LoraTensor(path=path, projection=projection, expert=int(expert["expert"]), factor=factor)


def shortest_selectors(targets: Collection[str], universe: Collection[str], *, min_parts: int = 1) -> list[str]:
    """Names that, matched as PEFT does (equal, or the end after a dot), select these targets of the universe only.

    Never begins with a layer's number: where no shorter name will do, the whole path is given.

    Example:
        >>> shortest_selectors(["l.0.q", "l.1.q", "l.0.up"], ["l.0.q", "l.1.q", "l.0.up", "l.1.up"])
        ['l.0.up', 'q']
    """
    in_universe = Counter(end for path in universe for end in _ends(path))
    in_targets = Counter(end for path in targets for end in _ends(path))
    chosen = set()
    for path in targets:
        fitting = (
            end for end in _ends(path) if in_universe[end] == in_targets[end] and end.count(".") + 1 >= min_parts
        )
        chosen.add(next(fitting, path))
    return sorted(chosen)


def _ends(path: str) -> Iterator[str]:
    parts = path.split(".")
    for start in range(len(parts) - 1, -1, -1):
        if not parts[start].isdigit():
            yield ".".join(parts[start:])
