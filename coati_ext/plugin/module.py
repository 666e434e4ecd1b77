"""The boosted model: colossalai's wrapper with a pipeline stage's forward, and a cast that spares what it must."""

from typing import Any

import torch
from colossalai.booster.plugin.hybrid_parallel_plugin import HybridParallelModule
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from coati_ext.checkpoint_io.load import kept_in_fp32
from coati_ext.models.shard import stage_forward


class DecoderModule(HybridParallelModule):
    """Called with a batch, and on later pipeline stages with `hidden_states`; see `stage_forward`."""

    def __init__(self, module: nn.Module, **kwargs: Any):
        kept = _kept_in_their_precision(module)
        super().__init__(module, **kwargs)
        _restore(self.module, kept)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.stage_manager is None:
            return super().forward(*args, **kwargs)
        if self.convert_fn is not None:
            kwargs = tree_map(self.convert_fn, kwargs)
        first, last = self.stage_manager.is_first_stage(), self.stage_manager.is_last_stage()
        return stage_forward(self.module, is_first=first, is_last=last, **kwargs)


def freeze_fp32(model: nn.Module, dtype: torch.dtype, logger: Any) -> None:
    """Before full fine-tuning in 16 bits: freeze what the model class keeps in fp32, which ZeRO and Gemini would round.

    So is what is fp32 beside 16-bit weights, such as the routers of some classes. Rank 0 is told which. A model with
    LoRA is left as it is.
    """
    if hasattr(model, "lora_report") or dtype == torch.float32:
        return
    pattern, mixed = kept_in_fp32(model, dtype), any(p.dtype == dtype for p in model.parameters())
    found = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and ((pattern and pattern.search(name)) or (mixed and p.dtype == torch.float32))
    ]
    for name in found:
        model.get_parameter(name).requires_grad_(False)
    if found:
        shown = f"{found[0]}, …" if len(found) > 1 else found[0]
        logger.warning(f"not trained: {len(found)} weights that the model keeps in fp32 ({shown})", ranks=[0])


def drop_frozen(optimizer: Optimizer) -> None:
    """Leave its trainable parameters to an optimizer; ZeRO would cast the frozen ones of a script's parameters()."""
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p.requires_grad]


def _kept_in_their_precision(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the tensors that a cast of the whole model would harm: all floating-point buffers (rotary frequencies,
    `e_score_correction_bias`: bf16 would change positions and routing), what the model class keeps in fp32, and frozen
    fp32 parameters beside 16-bit ones."""
    attributes = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    keep = {name for attribute in attributes for name in getattr(model, attribute, None) or ()}
    mixed = len({p.dtype for p in model.parameters()}) > 1  # some routers are fp32 beside 16-bit weights
    tensors = dict(model.named_buffers())
    for name, p in model.named_parameters():
        named = any(f".{kept}." in f".{name}." for kept in keep)
        if named or (mixed and p.dtype == torch.float32 and not p.requires_grad):
            tensors[name] = p
    return {name: tensor.detach().clone() for name, tensor in tensors.items() if tensor.is_floating_point()}


def _restore(model: nn.Module, kept: dict[str, torch.Tensor]) -> None:
    for name, value in kept.items():
        path, _, leaf = name.rpartition(".")
        tensor = getattr(model.get_submodule(path), leaf)  # looked up anew: a cast makes new buffers
        tensor.data = value.to(tensor.device)
