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
    for module in model.modules():
        if isinstance(module, MoeExperts):
            module.tokens_per_expert_E.zero_()
