"""Gradient checkpointing for decoders: the backward pass computes a layer's activations anew instead of keeping them.

A MoE layer must route each token in the recomputation as it did in the forward. Kernels that are not deterministic can
tip a close choice, which would give an expert the gradient of a token that it never saw, and under expert parallelism
make ranks expect rows that do not come. So the indices that `topk` chose are kept. (torch's own selective checkpointing
keeps the values as well, which routers such as Mixtral's normalise in place.)

A dispatch mode costs host time at every operation that it sees, so it is on inside the modules that choose only.
"""

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from coati_ext.models.targets import structure_of

_INDEXER = "indexer"  # sparse attention's, which chooses keys


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
        for module in choosing_modules(model).values():
            if _enter_mode not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_enter_mode)
                module.register_forward_hook(_exit_mode, always_call=True)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)


def choosing_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Path -> module of all that call `topk`: routers and indexers; the MoE block where its own forward routes.

    A `gate` that is a plain Linear only scores: the block chooses.
    """
    structure, present = structure_of(model), dict(model.named_modules())
    found = {path: module for path, module in present.items() if path.rpartition(".")[2] == _INDEXER}
    blocks = {c.module_path.rpartition(".")[0] for c in structure.candidates if c.projection is not None}
    for block in sorted(blocks):
        beside = [path for path in structure.routers if path.rpartition(".")[0] == block and path in present]
        paths = [path for path in beside if not isinstance(present[path], nn.Linear)] or [block]
        found |= {path: present[path] for path in paths if path in present}
    return found


def same_routing() -> tuple[AbstractContextManager, AbstractContextManager]:
    """The `context_fn` of `torch.utils.checkpoint.checkpoint`: contexts of the forward and of the recomputation."""
    chosen: list[torch.Tensor] = []
    return _InChoosingModules(_KeepChoices, chosen), _InChoosingModules(_RepeatChoices, chosen)


class _InChoosingModules(AbstractContextManager):
    """A new mode at each entry (a graph that is kept is recomputed more than once), for the hooks to switch on."""

    def __init__(self, mode: type[TorchDispatchMode], chosen: list[torch.Tensor]):
        self._mode, self._chosen = mode, chosen

    def __enter__(self) -> None:
        self._token = _mode.set(self._mode(self._chosen))

    def __exit__(self, *exception: Any) -> None:
        _mode.reset(self._token)


_mode: ContextVar[TorchDispatchMode | None] = ContextVar("mode", default=None)  # of the layer that runs in this thread


def _enter_mode(module: nn.Module, args: tuple) -> None:
    if (mode := _mode.get()) is not None:
        mode.__enter__()


def _exit_mode(module: nn.Module, args: tuple, output: Any) -> None:
    if (mode := _mode.get()) is not None:
        mode.__exit__(None, None, None)


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
        self._left = iter(chosen)

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is not torch.ops.aten.topk.default:
            return function(*args, **(kwargs or {}))
        scores, _, dim, *_ = (*args, *[-1] * (3 - len(args)))
        indices = next(self._left)
        return scores.gather(dim, indices), indices
