"""LoRA injection: PEFT's own layer on every linear, `MoeExperts` on the routed experts.

PEFT's `LoraConfig` says what is wanted; its `get_peft_model` is not used, because PEFT 0.21 rewrites gate/up/down
targets of DeepSeek-like models to the routed experts and so leaves shared experts and dense layers unadapted
(huggingface/peft#3711). Names, shapes and scaling are PEFT's, so what is trained here is what PEFT loads; after
`shard_tensor_parallel` the factors are slices of that.

The start values depend on (seed, path, expert) alone: every layout begins with the same adapter.
"""

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from peft import LoraConfig
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn

from coati_ext.models.shard import shard_decoder
from coati_ext.models.targets import KINDS, Candidate, resolve_targets, structure_of
from coati_ext.models.tensor_parallel_layers import Cut, TensorParallelLinear, TensorParallelLoraLinear
from coati_ext.moe.experts import MoeExperts

ADAPTER_NAME = "default"

# Fields of LoraConfig that are read here. Any other field that differs from PEFT's default is refused by name.
_SUPPORTED = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "exclude_modules",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PreflightRow:
    """What one kind of layer gets, over all ranks. An experts module counts as one module."""

    kind: str
    projections: tuple[str, ...]
    num_in_model: int
    num_modules: int
    num_trainable: int


@dataclass(frozen=True, kw_only=True)
class LoraReport:
    """What an injection did, for the table that is shown before training and for the model card."""

    rows: list[PreflightRow]
    num_experts: int
    num_local_experts: int
    num_routers: int
    num_total: int
    rank: int
    scaling: float

    @property
    def num_trainable(self) -> int:
        return sum(row.num_trainable for row in self.rows)

    def format(self) -> str:
        """The preflight table as text."""
        lines = [f"{'LoRA on':<16}{'modules':>9}  {'projections':<60}{'trainable':>14}"]
        for row in self.rows:
            names = ", ".join(row.projections) or ("not adapted" if row.num_in_model else "none in this model")
            if row.kind == "routed experts" and row.num_modules:
                names += f" of {self.num_experts} experts ({self.num_local_experts} on this rank)"
            modules = f"{row.num_modules}/{row.num_in_model}"
            lines.append(f"{row.kind:<16}{modules:>9}  {names:<60}{row.num_trainable:>14,}")
        share = 100 * self.num_trainable / self.num_total
        lines.append(
            f"{'router':<16}{self.num_routers:>9}  {'frozen':<60}{0:>14,}\n"
            f"trainable {self.num_trainable:,} of {self.num_total:,} parameters ({share:.2f}%), "
            f"rank {self.rank}, scaling {self.scaling:g}"
        )
        return "\n".join(lines)


def inject_lora(
    model: nn.Module, config: LoraConfig, *, ep_group: dist.ProcessGroup | None = None, seed: int = 0
) -> LoraReport:
    """Freeze the model, shard its routed experts over the EP group and put LoRA on what the config targets.

    Works in place; `model.lora_config` and `model.lora_report` tell afterwards what was done.

    Args:
        model: a transformers 5 decoder with its weights loaded, not yet wrapped by anything; sharded or whole.
        config: PEFT's; `target_modules` may hold the named sets of `targets.NAMED_SETS` and defaults to "mlp".
        seed: the same on every rank.

    Raises:
        ValueError: an option that is not supported, a target that matches nothing, a dense model with EP.
    """
    refuse_unsupported(config)
    if getattr(model, "lora_config", None) is not None:
        raise ValueError("LoRA is enabled on this model already")
    shard_decoder(model, ep_group=ep_group)
    structure = structure_of(model)
    targets = resolve_targets(model, config.target_modules, config.exclude_modules)
    scaling = config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)

    model.requires_grad_(False)
    layers = {path: module for path, module in model.named_modules() if isinstance(module, MoeExperts)}
    for path, module in layers.items():
        wanted = [t.projection for t in targets if t.module_path == path and t.projection is not None]
        _adapt_experts(module, path, wanted, config, scaling, seed)
    here = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    for target in targets:
        if target.projection is None and target.path in here:
            _adapt_linear(model, target.path, config, seed)

    report = LoraReport(
        rows=_preflight(structure.candidates, targets, config.r),
        num_experts=structure.num_experts,
        num_local_experts=structure.num_experts // (dist.get_world_size(ep_group) if ep_group is not None else 1),
        num_routers=len(structure.routers),
        num_total=structure.num_parameters,
        rank=config.r,
        scaling=scaling,
    )
    model.lora_config, model.lora_report = config, report
    return report


def refuse_unsupported(config: LoraConfig) -> None:
    """ValueError naming every LoraConfig option that would otherwise be ignored."""
    defaults = LoraConfig().to_dict()
    odd = {k: v for k, v in config.to_dict().items() if k not in _SUPPORTED and v != defaults.get(k)}
    if odd:
        raise ValueError(
            f"LoraConfig options not supported: {odd}. Supported: {sorted(_SUPPORTED - {'auto_mapping', 'revision'})}."
        )
    if config.r < 1:
        raise ValueError(f"LoraConfig: r must be at least 1, got {config.r}")


def _adapt_experts(
    layer: MoeExperts, path: str, projections: list[str], config: LoraConfig, scaling: float, seed: int
) -> None:
    layer.add_lora(projections, rank=config.r, scaling=scaling, dropout=config.lora_dropout)
    for projection, weight_LrI in layer.lora_A.items():
        for local in range(layer.num_local_experts):
            _init_lora_A(weight_LrI.data[local], seed, f"{path}.{layer.first_expert + local}.{projection}")


def _adapt_linear(model: nn.Module, path: str, config: LoraConfig, seed: int) -> None:
    base = model.get_submodule(path)
    kind = TensorParallelLoraLinear if isinstance(base, TensorParallelLinear) else LoraLinear
    layer = kind(base, ADAPTER_NAME, config, r=config.r, lora_alpha=config.lora_alpha)
    for factor in (layer.lora_A, layer.lora_B):
        factor[ADAPTER_NAME].to(getattr(base, "compute_dtype", base.weight.dtype))  # FP8 weights have another
    weight_rI = layer.lora_A[ADAPTER_NAME].weight
    _init_lora_A(weight_rI.data, seed, path, getattr(weight_rI, "tp_cut", None))
    layer.train(base.training)
    model.set_submodule(path, layer)


def _init_lora_A(weight_rI: torch.Tensor, seed: int, name: str, cut: Cut | None = None) -> None:
    """PEFT's start (kaiming uniform with a = sqrt 5: +-1/sqrt(in)), drawn on the CPU from the name's own stream.

    Of a slice under tensor parallelism the whole is drawn.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    rank, width_in = weight_rI.shape
    start, stop, width_in = (0, width_in, width_in) if cut is None else cut[1:]
    bound = 1 / math.sqrt(width_in)
    whole_rI = torch.empty(rank, width_in, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
    weight_rI.copy_(whole_rI[:, start:stop])


def _preflight(pool: tuple[Candidate, ...], targets: list[Candidate], rank: int) -> list[PreflightRow]:
    rows = []
    for kind in KINDS:
        mine = [t for t in targets if t.kind == kind]
        names = dict.fromkeys(t.path.rpartition(".")[2] for t in mine)
        rows.append(
            PreflightRow(
                kind=kind,
                projections=tuple(names),
                num_in_model=len({c.module_path for c in pool if c.kind == kind}),
                num_modules=len({t.module_path for t in mine}),
                num_trainable=sum(rank * (t.in_features + t.out_features) * t.num_matrices for t in mine),
            )
        )
    return rows


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """The base model for the length of the block: the reference policy, and the "before" of a before/after."""
    layers = [module for module in model.modules() if isinstance(module, MoeExperts | LoraLinear)]
    try:
        for layer in layers:
            _switch(layer, False)
        yield
    finally:
        for layer in layers:
            _switch(layer, True)


def _switch(layer: nn.Module, enabled: bool) -> None:
    if isinstance(layer, MoeExperts):
        layer.adapters_enabled = enabled
    else:
        layer._disable_adapters = not enabled  # PEFT's enable_adapters() would also flip requires_grad
