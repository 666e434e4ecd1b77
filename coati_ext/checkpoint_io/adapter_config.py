"""The two `adapter_config.json` of an exported adapter, and the way back to a `LoraConfig` for `inject_lora`.

One file of tensors, two configs:

* `adapter_config.json` for transformers 5 with stock PEFT. Routed experts are stacked parameters there, so they go to
  `target_parameters`; gate and up are one parameter, hence twice the rank and twice the alpha. In families whose
  gate_proj/up_proj/down_proj PEFT takes for routed experts, shared experts and dense layers are targeted through their
  `weight` parameters: PEFT saves and loads that under the ordinary names.
* `transformers4/adapter_config.json` with plain names, for vLLM, SGLang and transformers 4. A name that covers more
  than was trained is harmless there: what has no tensor in the file stays as it is.
"""

import json
import math
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import peft
import torch
from peft import LoraConfig
from safetensors import SafetensorError, safe_open

from coati_ext.checkpoint_io.names import (
    LoraTensor,
    expert_names,
    from_disk,
    rewritten_targets,
    shortest_selectors,
)
from coati_ext.models.lora import refuse_unsupported
from coati_ext.utils.adapter_files import CONFIG_FILE, adapter_file

# Starts that change the base weights: such an adapter is right on the changed base only.
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")

# Fields that the tensors' names and shapes decide, or that only say how an adapter begins.
DERIVED_FIELDS = {
    "target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern",
    "alpha_pattern", "init_lora_weights", "use_rslora", "r", "lora_alpha",
}  # fmt: skip


def config_transformers5(
    tensors: Iterable[LoraTensor],
    *,
    model_type: str,
    modules: Collection[str],
    parameters: Collection[str],
    rank: int,
    scaling: float,
    base_model_name_or_path: str | None,
) -> dict[str, Any]:
    """The config that stock PEFT on transformers 5 loads exactly.

    Args:
        tensors: what is in the file; the targets are derived from it.
        modules, parameters: all names of the model as transformers builds it, so that no other is selected.
    """
    reserved = rewritten_targets(model_type)
    target_modules, target_parameters = set(), set()
    for tensor in tensors:
        if tensor.projection is not None:
            stacked = "down_proj" if tensor.projection == "down_proj" else "gate_up_proj"
            target_parameters.add(f"{tensor.path}.{stacked}")
        elif tensor.path.rpartition(".")[2] in reserved:
            target_parameters.add(f"{tensor.path}.weight")
        else:
            target_modules.add(tensor.path)
    alpha = lora_alpha(rank, scaling)
    config = _common(rank, alpha, base_model_name_or_path) | {
        "peft_version": peft.__version__,
        "target_modules": shortest_selectors(target_modules, modules),
        "target_parameters": shortest_selectors(target_parameters, parameters, min_parts=2) or None,
    }
    if any(name.endswith("experts.gate_up_proj") for name in target_parameters):
        config["rank_pattern"] = {r".*\.experts\.gate_up_proj": 2 * rank}
        config["alpha_pattern"] = {r".*\.experts\.gate_up_proj": 2 * alpha}
    return config


def config_transformers4(
    tensors: Iterable[LoraTensor], *, model_type: str, rank: int, scaling: float, base_model_name_or_path: str | None
) -> dict[str, Any]:
    """The config for vLLM, SGLang and transformers 4: plain names, and no field that PEFT 0.13 does not know."""
    names = set()
    for tensor in tensors:
        leaf = tensor.path.rpartition(".")[2]
        names.add(leaf if tensor.projection is None else getattr(expert_names(model_type), tensor.projection))
    return _common(rank, lora_alpha(rank, scaling), base_model_name_or_path) | {"target_modules": sorted(names)}


def lora_alpha(rank: int, scaling: float) -> int | float:
    """Alpha such that alpha / rank is the scaling: rsLoRA's square root is folded into it."""
    alpha = scaling * rank
    return round(alpha) if math.isclose(alpha, round(alpha), rel_tol=1e-12) else alpha


def _common(rank: int, alpha: float, base_model_name_or_path: str | None) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model_name_or_path,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Key -> shape of every tensor, from the header alone.

    Raises:
        ValueError: the file is cut short or no safetensors file.
    """
    try:
        with safe_open(file, framework="pt") as tensors:
            return {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118 - no dict
    except SafetensorError as error:
        raise ValueError(f"{file} is no whole safetensors file: {error}") from None


def read_config(directory: str | Path) -> LoraConfig:
    """PEFT's own reading of `adapter_config.json`.

    Raises:
        ValueError: no JSON, or no LoRA config.
    """
    file = Path(directory) / CONFIG_FILE
    try:
        config = LoraConfig.from_pretrained(str(directory))
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as a PEFT config: {error}") from None
    if not isinstance(config, LoraConfig):
        raise ValueError(f"{file}: peft_type is {config.peft_type}; only LORA is supported")
    if not isinstance(config.lora_alpha, int | float):
        raise ValueError(f"{file}: lora_alpha is {config.lora_alpha!r}; expected a number")
    return config


def lora_config_from_adapter(directory: str | Path) -> LoraConfig:
    """The `LoraConfig` for `inject_lora` that makes a model into which `load_adapter` loads this adapter.

    Targets and rank come from the tensors; alpha, dropout and rsLoRA from the config. Reads adapters of ours and
    per-expert adapters of other tools.

    Raises:
        ValueError: not an adapter directory, tensors in another form, ranks that differ, a config that gives modules
            different scales or options that are not supported.
    """
    file = adapter_file(directory)
    shapes = read_shapes(file)
    if not shapes:
        raise ValueError(f"{file} holds no tensor")
    tensors = {key: _named(key, file) for key in shapes}
    for key, shape in shapes.items():
        if len(shape) != 2 or 0 in shape:
            raise ValueError(f"{file}: {key} has shape {list(shape)}; expected a matrix")
    ranks = {shapes[key][0] for key, tensor in tensors.items() if tensor.factor == "lora_A"}
    if len(ranks) != 1:
        raise ValueError(f"{file}: one rank for all tensors is supported, found {sorted(ranks)}")
    rank = ranks.pop()
    found = read_config(directory)
    refuse_changed_base(found, Path(directory) / CONFIG_FILE)
    _refuse_uneven(found, rank, Path(directory) / CONFIG_FILE)
    kept = {k: v for k, v in found.to_dict().items() if k not in DERIVED_FIELDS}
    refuse_unsupported(LoraConfig(**kept))
    padded = padding_targets(file, tensors)
    return LoraConfig(
        r=rank,
        lora_alpha=found.lora_alpha,
        use_rslora=found.use_rslora,
        lora_dropout=found.lora_dropout,
        task_type=found.task_type,
        base_model_name_or_path=found.base_model_name_or_path,
        target_modules=sorted({tensor.target for tensor in tensors.values()} - padded),
    )


def refuse_changed_base(config: LoraConfig, file: Path) -> None:
    """ValueError for an adapter that is right on a changed base only."""
    init = config.init_lora_weights
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        raise ValueError(
            f"{file}: init_lora_weights {init!r} changes the base weights, so the tensors alone are not the adapter. "
            "Save it with PEFT's path_initial_model_for_weight_conversion, and convert that."
        )


def _named(key: str, file: Path) -> LoraTensor:
    try:
        return from_disk(key)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _refuse_uneven(config: LoraConfig, rank: int, file: Path) -> None:
    """Patterns are fine as long as every module ends with the one scaling: ours double both rank and alpha."""
    if config.r != rank:
        raise ValueError(f"{file}: r is {config.r}, but the tensors have rank {rank}")
    ranks, alphas = config.rank_pattern or {}, config.alpha_pattern or {}
    for pattern in sorted({*ranks, *alphas}):
        r, alpha = ranks.get(pattern, config.r), alphas.get(pattern, config.lora_alpha)
        fused = pattern.endswith("gate_up_proj") and r == 2 * rank and not config.use_rslora
        if alpha * config.r != config.lora_alpha * r or (r != rank and not fused):
            raise ValueError(
                f"{file}: rank_pattern/alpha_pattern {pattern!r} gives rank {r} and alpha {alpha} beside r={config.r} "
                f"and lora_alpha={config.lora_alpha}; one rank and one scaling for all modules is supported"
            )


def padding_targets(file: Path, tensors: dict[str, LoraTensor]) -> set[str]:
    """Targets of routed experts whose tensors are zeros in A as in B: written so that PEFT loads gate and up alone."""
    down: dict[str, list[str]] = {}
    for key, tensor in tensors.items():
        if tensor.projection == "down_proj":
            down.setdefault(tensor.target, []).append(key)
    with safe_open(file, framework="pt") as opened:
        return {t for t, keys in down.items() if not any(torch.any(opened.get_tensor(key)) for key in keys)}
