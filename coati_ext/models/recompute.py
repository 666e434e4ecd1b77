"""Gradient checkpointing for decoders: the backward pass computes a layer's activations anew instead of keeping them.

A MoE layer must route each token in the recomputation as it did in the forward. Kernels that are not deterministic can
tip a close choice, which would give an expert the gradient of a token that it never saw, and under expert parallelism
make ranks expect rows that do not come. So the indices that `topk` chose are kept. (torch's own selective checkpointing
keeps the values as well, which routers such as Mixtral's normalise in place.)
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from coati_ext.models.targets import structure_of


def enable_recompute(model: PreTrainedModel) -> None:
    """Switch it on for every decoder layer; works before and after sharding.

    Raises:
        ValueError: transformers has no gradient checkpointing for this family.
    """
    if not model.supports_gradient_checkpointing:
        raise ValueError(f"--use_grad_checkpoint: {type(model).__name__} does not support gradient checkpointing")
    settings: dict[str, Any] = {"use_reentrant": False}
    if structure_of(model).num_experts:
        settings["context_fn"] = same_routing
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)


def same_routing() -> tuple[AbstractContextManager, AbstractContextManager]:
    """The `context_fn` of `torch.utils.checkpoint.checkpoint`: contexts of the forward and of the recomputation."""
    chosen: list[torch.Tensor] = []
    return _KeepChoices(chosen), _RepeatChoices(chosen)


class _KeepChoices(TorchDispatchMode):
    def __init__(self, chosen: list[torch.Tensor]):
        super().__init__()
        self._chosen = chosen

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.topk.default:
            self._chosen.append(result[1])
        return result


class _RepeatChoices(TorchDispatchMode):
    def __init__(self, chosen: list[torch.Tensor]):
        super().__init__()
        self._chosen = chosen

    def __enter__(self) -> "_RepeatChoices":
        self._left = iter(self._chosen)
        return super().__enter__()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is not torch.ops.aten.topk.default:
            return function(*args, **(kwargs or {}))
        scores, _, dim, *_ = (*args, *[-1] * (3 - len(args)))
        indices = next(self._left)
        return scores.gather(dim, indices), indices
