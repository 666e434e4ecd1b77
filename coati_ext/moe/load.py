"""How evenly the router spreads its tokens: max/mean rows per expert, a layer at a time."""

import torch
import torch.distributed as dist
from torch import nn

from coati_ext.moe.experts import MoeExperts


def expert_load(model: nn.Module, dp_group: dist.ProcessGroup | None = None) -> dict[str, torch.Tensor]:
    """Routed rows per expert (E,), int64 on the CPU, of every MoE layer since the last reset, over all data ranks."""
    layers = {
        name.removeprefix("module."): module  # the prefix of a Booster's wrapper
        for name, module in model.named_modules()
        if isinstance(module, MoeExperts)
    }
    if not layers:
        return {}
    counts = torch.cat([module.tokens_per_expert_E for module in layers.values()])
    if dp_group is not None:
        dist.all_reduce(counts, group=dp_group)
    sizes = [module.num_experts for module in layers.values()]
    return dict(zip(layers, counts.cpu().split(sizes), strict=True))


def reset_expert_load(model: nn.Module) -> None:
    """Start counting anew."""
    for counts_E in _counts(model):
        counts_E.zero_()


def own_expert_load(model: nn.Module) -> list[torch.Tensor]:
    """This rank's counts since the last reset, a MoE layer at a time, for a continuation to go on from."""
    return [counts_E.clone() for counts_E in _counts(model)]


def load_own_expert_load(model: nn.Module, saved: list[torch.Tensor]) -> None:
    """Take up `own_expert_load`."""
    for counts_E, found_E in zip(_counts(model), saved, strict=True):
        counts_E.copy_(found_E)


def _counts(model: nn.Module) -> list[torch.Tensor]:
    return [module.tokens_per_expert_E for module in model.modules() if isinstance(module, MoeExperts)]
