"""torch.compile of what surrounds the experts in decoder layers: norms, attention and dense MLPs, with their LoRA.

Uncompiled, these are many small kernels: on Qwen3-30B-A3B a third of a step's time on the GPU, and more of the host's.
Each module is compiled for itself and all layers share its graphs. Experts have kernels of their own, and the modules
that choose experts are left alone, because recomputation gives them their choice back (`recompute.py`).
"""

from collections.abc import Iterator

import torch
from torch import nn

from coati_ext.models.fp8_linear import Fp8Linear
from coati_ext.models.recompute import choosing_modules
from coati_ext.models.shard import PassThrough
from coati_ext.moe.experts import is_experts_module


def compile_layers(model: nn.Module, *, backend: str = "inductor") -> int:
    """Have the parts compiled at their first call, in place; LoRA is there already. Returns how many.

    Weights keep their names. A batch of another shape compiles once more, for all shapes.

    Raises:
        ValueError: the model has no list of decoder layers.
    """
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"--torch_compile: {type(model).__name__} has no list of decoder layers; leave it out")
    apart = {id(module) for module in choosing_modules(model).values()}
    parts = [part for layer in layers if not isinstance(layer, PassThrough) for part in _parts(layer, apart)]
    for part in parts:
        for module in part.modules():
            if isinstance(module, Fp8Linear):
                module.forward = torch.compiler.disable(module.forward)  # kernels of its own
        part.forward = torch.compile(part.forward, backend=backend)
    return len(parts)


def _parts(module: nn.Module, apart: set[int]) -> Iterator[nn.Module]:
    """The largest modules below that hold no experts and choose none."""
    for child in module.children():
        if is_experts_module(child):
            continue
        if any(id(each) in apart or is_experts_module(each) for each in child.modules()):
            yield from _parts(child, apart)
        elif _is_worth_it(child):
            yield child


def _is_worth_it(module: nn.Module) -> bool:
    """Not a container, not without weights, and more than one product."""
    called = type(module).forward is not nn.Module.forward
    return called and not isinstance(module, nn.Linear) and any(True for _ in module.parameters())
