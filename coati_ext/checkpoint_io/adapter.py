"""Export and load of LoRA adapters: PEFT files that stock PEFT, vLLM and SGLang load, written whole or not at all.

Only the adapters move: each EP rank's experts and each TP rank's slices are gathered layer by layer to the first rank
and each pipeline stage's tensors are sent to stage 0. The base model is never gathered.

Legend: E experts, L experts of this rank, r rank.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from peft.tuners.lora.layer import Linear as LoraLinear
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedTokenizerBase

from coati_ext.checkpoint_io.adapter_config import (
    config_transformers4,
    config_transformers5,
    lora_config_from_adapter,
    read_shapes,
)
from coati_ext.checkpoint_io.adapter_directory import replace_directory, write_json
from coati_ext.checkpoint_io.hf_directory import CARD_NAME
from coati_ext.checkpoint_io.model_card import adapter_card, package_versions
from coati_ext.checkpoint_io.names import FACTORS, LoraTensor, to_disk
from coati_ext.models.lora import ADAPTER_NAME
from coati_ext.models.targets import structure_of
from coati_ext.moe.experts import MoeExperts
from coati_ext.utils.adapter_files import CONFIG_FILE, WEIGHTS_FILE, adapter_file
from coati_ext.utils.collective import raise_everywhere

__all__ = ["adapter_state_dict", "frozen_router_hash", "load_adapter", "lora_config_from_adapter", "save_adapter"]

_CORRECTION_BIASES = ("e_score_correction_bias", "expert_bias")  # in some families beside the router, not in it
TRANSFORMERS4_DIR = "transformers4"


@dataclass(frozen=True, kw_only=True)
class _Stack:
    """A factor of one linear, or of one projection of all experts of a layer: (E, r, in) or (E, out, r), on the CPU."""

    name: LoraTensor
    tensor: torch.Tensor


def adapter_state_dict(model: nn.Module, *, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor] | None:
    """On-disk keys -> CPU tensors of the layers that this process has, all experts included.

    Every member of the experts' EP group must call it; EP ranks other than 0 get None. Experts with gate and up alone
    come with a down_proj of zeros, without which PEFT cannot place them.

    Raises:
        ValueError: the model has no LoRA, a tensor is not finite, a family that PEFT would drop the experts of.
    """
    _require_lora(model)
    stacks = _gather_experts(model)
    return None if stacks is None else _state_dict(stacks, model.config.model_type, dtype)


def save_adapter(
    model: nn.Module,
    directory: str | Path,
    *,
    base_model_name_or_path: str | None,
    is_writer: bool = True,
    is_first: bool = True,
    group: dist.ProcessGroup | None = None,
    pp_group: dist.ProcessGroup | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype | None = None,
    card: dict[str, str] | None = None,
) -> None:
    """Write the adapter to `directory`, replacing an adapter there only when the new one is complete.

    A collective: all ranks of `group` call it, and all of them raise if it fails on one.

    Args:
        is_first: true on the first rank of each EP and TP group; a stage without adapter cannot tell it.
        is_writer: true on one rank: EP rank 0 of pipeline stage 0 of one data-parallel replica.
        group: all ranks that call; None in a single process.
        pp_group: this rank's pipeline stages; None without pipeline parallelism.
        dtype: to store in; as trained if None.
        card: lines for the model card beyond what the model tells, e.g. {"Data": ..., "Loss": ..., "Layout": ...}.

    Raises:
        ValueError: no LoRA, the path is a file, a tensor is not finite, a family that PEFT would drop the experts of.
        OSError: the disk. Other ranks raise the writer's error as `RuntimeError` if it is neither of the two.
    """
    error: Exception | None = None
    try:
        _require_lora(model)
        stacks = _gather_experts(model)
        stacks = stacks if is_first else None
        if stacks is not None and pp_group is not None:
            stacks = _gather_stages(stacks, pp_group)
        if is_writer:
            if stacks is None:
                raise ValueError("save_adapter: is_writer is set on a rank that is not EP rank 0")
            tensors = _state_dict(stacks, model.config.model_type, dtype)
            configs = _configs(model, stacks, base_model_name_or_path)
            with replace_directory(Path(directory)) as new:
                write_files(new, tensors, configs)
                text = adapter_card(model, base_model_name_or_path, directory, tensors, card or {})
                (new / CARD_NAME).write_text(text)
                if tokenizer is not None:
                    tokenizer.save_pretrained(str(new))
    except Exception as raised:
        if group is None:
            raise
        error = raised
    if group is not None:
        raise_everywhere(error, group)


def _require_lora(model: nn.Module) -> None:
    if getattr(model, "lora_report", None) is None:
        raise ValueError(f"{type(model).__name__} has no LoRA to save or load: call inject_lora (enable_lora) first")


# --- gather


def _gather_experts(model: nn.Module) -> list[_Stack] | None:
    """This stage's adapters on the first EP and TP rank, None on the others. Nothing here fails on one rank alone."""
    stacks: list[_Stack] = []
    is_first = True
    for path, module in model.named_modules():
        if isinstance(module, MoeExperts):
            is_first = module.ep_group is None or dist.get_rank(module.ep_group) == 0
            for projection in module.lora_A:
                for factor in FACTORS:
                    local = getattr(module, factor)[projection].detach()
                    full = _gather(local, module.ep_group)
                    name = LoraTensor(path=path, projection=projection, factor=factor)
                    if full is not None:
                        stacks.append(_Stack(name=name, tensor=full))
        elif isinstance(module, LoraLinear):
            group = getattr(module.get_base_layer(), "tp_group", None)
            is_first = is_first and (group is None or dist.get_rank(group) == 0)
            for factor in FACTORS:
                weight = getattr(module, factor)[ADAPTER_NAME].weight
                cut = getattr(weight, "tp_cut", None)
                full = _gather(weight.detach(), group, cut.dim) if cut is not None else weight.detach().cpu()
                if full is not None:
                    stacks.append(_Stack(name=LoraTensor(path=path, factor=factor), tensor=full))
    return stacks if is_first else None


def _gather(local: torch.Tensor, group: dist.ProcessGroup | None, dim: int = 0) -> torch.Tensor | None:
    """Equal slices along `dim` of every rank of the group -> the whole, on the CPU of its first rank."""
    if group is None or dist.get_world_size(group) == 1:
        return local.cpu()
    parts = None
    if dist.get_rank(group) == 0:
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.gather(local.contiguous(), parts, group=group, group_dst=0)
    return None if parts is None else torch.cat([part.cpu() for part in parts], dim=dim)


def _gather_stages(stacks: list[_Stack], pp_group: dist.ProcessGroup) -> list[_Stack]:
    """Every stage's tensors, on pipeline stage 0; the other stages get their own back."""
    size, stage = dist.get_world_size(pp_group), dist.get_rank(pp_group)
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(pp_group) == "nccl" else "cpu"
    listings: list = [None] * size
    dist.all_gather_object(listings, [(s.name, s.tensor.shape, s.tensor.dtype) for s in stacks], group=pp_group)
    if stage != 0:
        for stack in stacks:
            dist.send(stack.tensor.to(device).contiguous(), group=pp_group, group_dst=0)
        return stacks
    gathered = list(stacks)
    for source in range(1, size):
        for name, shape, dtype in listings[source]:
            received = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(received, group=pp_group, group_src=source)
            gathered.append(_Stack(name=name, tensor=received.cpu()))
    return gathered


# --- write


def _state_dict(stacks: list[_Stack], model_type: str, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for stack in [*stacks, *_padding(stacks)]:
        for name, tensor in _per_expert(stack):
            key = to_disk(name, model_type)
            if not torch.isfinite(tensor).all():
                raise ValueError(f"{key} is not finite: the adapter is not written. Was the loss NaN, or lr too high?")
            tensors[key] = tensor.to(dtype or tensor.dtype, copy=True).contiguous()
    return tensors


def _per_expert(stack: _Stack) -> Iterator[tuple[LoraTensor, torch.Tensor]]:
    name = stack.name
    if name.projection is None:
        yield name, stack.tensor
        return
    for expert, tensor in enumerate(stack.tensor):
        yield LoraTensor(path=name.path, projection=name.projection, expert=expert, factor=name.factor), tensor


def _padding(stacks: list[_Stack]) -> Iterator[_Stack]:
    """down_proj of zeros for experts with gate and up alone: PEFT's conversion takes gate_up for the inner wrapper."""
    with_down = {stack.name.path for stack in stacks if stack.name.projection == "down_proj"}
    for stack in stacks:
        name = stack.name
        if name.projection == "gate_proj" and name.path not in with_down:
            other = "lora_B" if name.factor == "lora_A" else "lora_A"  # down goes the other way: (in, out) are swapped
            yield _Stack(
                name=LoraTensor(path=name.path, projection="down_proj", factor=other),
                tensor=torch.zeros_like(stack.tensor.transpose(-2, -1)),
            )


def _configs(model: nn.Module, stacks: list[_Stack], base: str | None) -> tuple[dict, dict]:
    structure = structure_of(model)
    names = [stack.name for stack in [*stacks, *_padding(stacks)]]
    common = {
        "model_type": model.config.model_type,
        "rank": model.lora_report.rank,
        "scaling": model.lora_report.scaling,
        "base_model_name_or_path": base,
    }
    newer = config_transformers5(names, modules=structure.modules, parameters=structure.parameters, **common)
    return newer, config_transformers4(names, **common)


def write_files(new: Path, tensors: dict[str, torch.Tensor], configs: tuple[dict, dict]) -> None:
    """Fill the new directory `new`: weights, the config for transformers 5, and in a folder that for transformers 4."""
    weights = new / WEIGHTS_FILE
    save_file(tensors, weights, metadata={"format": "pt", **package_versions()})
    weights.chmod(new.stat().st_mode & 0o666)  # safetensors 0.8 leaves it readable by the owner only
    older = new / TRANSFORMERS4_DIR
    older.mkdir()
    write_json(new / CONFIG_FILE, configs[0])
    write_json(older / CONFIG_FILE, configs[1])
    try:
        os.link(weights, older / WEIGHTS_FILE)  # one file under two names, so that each folder can be copied alone
    except OSError:  # a file system without hard links
        shutil.copyfile(weights, older / WEIGHTS_FILE)


# --- load


@torch.no_grad()
def load_adapter(model: nn.Module, directory: str | Path, *, pp_group: dist.ProcessGroup | None = None) -> None:
    """Copy an adapter into the LoRA layers of an injected model; each rank reads its own experts only.

    The file must hold exactly the model's tensors (over all stages of `pp_group`, whose ranks all call).

    Raises:
        ValueError: a tensor that is missing, unexpected, of another shape or not finite, with its name and file.
    """
    _require_lora(model)
    file = adapter_file(directory)
    shapes = read_shapes(file)
    wanted, expected = _destinations(model)
    missing, unexpected = sorted(set(expected) - set(shapes)), set(shapes) - set(expected)
    if pp_group is not None:
        of_stages: list = [None] * dist.get_world_size(pp_group)
        dist.all_gather_object(of_stages, (missing, unexpected), group=pp_group)
        missing = sorted({key for keys, _ in of_stages for key in keys})
        unexpected = set.intersection(*(keys for _, keys in of_stages))
    for problem, keys in (("misses", missing), ("has, unexpectedly,", sorted(unexpected))):
        if keys:
            raise ValueError(
                f"{file} {problem} {len(keys)} tensor(s) of this model's LoRA, e.g. {keys[0]}. The adapter belongs to "
                "other targets or another base model; lora_config_from_adapter gives the targets that it needs."
            )
    for key, shape in expected.items():
        if shapes[key] != shape:
            raise ValueError(f"{file}: {key} has shape {shapes[key]}, this model's LoRA needs {shape}")
    with safe_open(file, framework="pt") as opened:
        for key, destination in wanted.items():
            tensor = opened.get_tensor(key)
            if not torch.isfinite(tensor).all():
                raise ValueError(f"{file}: {key} is not finite")
            if destination is not None:
                cut = getattr(destination, "tp_cut", None)
                destination.copy_(tensor if cut is None else tensor.narrow(cut.dim, cut.start, cut.stop - cut.start))
            elif torch.any(tensor):
                raise ValueError(f"{file}: {key} is not zero, but this model has no LoRA on the experts' down_proj")


def _destinations(model: nn.Module) -> tuple[dict[str, torch.Tensor | None], dict[str, tuple[int, ...]]]:
    """On-disk key -> the tensor here that it goes to (None: padding), and key -> shape of all experts' tensors."""
    wanted: dict[str, torch.Tensor | None] = {}
    expected: dict[str, tuple[int, ...]] = {}
    model_type = model.config.model_type
    for path, module in model.named_modules():
        if isinstance(module, LoraLinear):
            for factor in FACTORS:
                key = to_disk(LoraTensor(path=path, factor=factor), model_type)
                wanted[key] = weight = getattr(module, factor)[ADAPTER_NAME].weight
                cut = getattr(weight, "tp_cut", None)
                expected[key] = tuple(
                    cut.full if cut is not None and dim == cut.dim else size for dim, size in enumerate(weight.shape)
                )
        elif isinstance(module, MoeExperts) and len(module.lora_A):
            for projection in dict.fromkeys((*module.lora_A, "down_proj")):
                width_in, width_out = module.features(projection)
                for expert in range(module.num_experts):
                    for factor in FACTORS:
                        name = LoraTensor(path=path, projection=projection, expert=expert, factor=factor)
                        key = to_disk(name, model_type)
                        expected[key] = (module.rank, width_in) if factor == "lora_A" else (width_out, module.rank)
                        local = expert - module.first_expert
                        if 0 <= local < module.num_local_experts:
                            stack = getattr(module, factor)
                            wanted[key] = stack[projection][local] if projection in stack else None
    return wanted, expected


# --- the router


def frozen_router_hash(model: nn.Module) -> str:
    """sha256 over the router weights and correction biases that this process has.

    Equal before and after training when the router stayed frozen. Comparable between ranks of one pipeline stage only.
    """
    prefixes = tuple(f"{path}." for path in structure_of(model).routers)
    digest = hashlib.sha256()
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()], key=lambda item: item[0]):
        if (prefixes and name.startswith(prefixes)) or name.endswith(_CORRECTION_BIASES):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
