"""Where a NaN or an infinity began: the first module of the forward, or the trained tensors, that are not finite."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

Batch = dict[str, torch.Tensor]
_SHOWN = 3


def report_nonfinite(
    model: nn.Module, repeat: Callable[[], None], batches: list[Batch], *, step: int, save_dir: str | None
) -> str:
    """A sentence on the first cause found, the same on every rank; a collective.

    Each rank that found something writes its micro-batches to `save_dir`/nonfinite.

    Args:
        repeat: does the forward and, if it can, the backward of the step again, on all ranks together.
    """
    weights = [name for name, p in model.named_parameters() if p.requires_grad and not p.isfinite().all()]
    module = _first_module(model, repeat)
    gradients = [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    causes = (
        ("weights are not finite: {} (lower --lr, or the base weights are broken)", weights),
        ("the first output that is not finite is that of {}", module),
        ("gradients are not finite: {}", gradients),
    )
    mine = next(((kind, text.format(_some(names))) for kind, (text, names) in enumerate(causes) if names), None)
    rank = dist.get_rank()
    if mine is not None and save_dir is not None:
        file = Path(save_dir) / "nonfinite" / f"step-{step:08d}-rank-{rank:05d}.safetensors"
        try:
            _save(batches, file, mine[1])
            mine = (mine[0], f"{mine[1]}; its micro-batches are in {file}")
        except OSError as error:  # other ranks wait for this one
            mine = (mine[0], f"{mine[1]}; its micro-batches could not be saved ({error})")
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    first = min(
        ((*cause, number) for number, cause in enumerate(found) if cause), default=None, key=lambda c: (c[0], c[2])
    )
    if first is None:
        return "Done again, the step is finite: look for a kernel that is not deterministic, or a failing device."
    return f"On rank {first[2]} {first[1]}."


def check_weights(model: nn.Module) -> None:
    """Raise on every rank if a trained weight of any of them is not finite; a collective.

    Raises:
        ValueError: names the rank and its first such weights.
    """
    names = [name for name, p in model.named_parameters() if p.requires_grad and not p.isfinite().all()]
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, _some(names) if names else None)
    for rank, shown in enumerate(found):
        if shown is not None:
            raise ValueError(
                f"after the last step weights on rank {rank} are not finite: {shown} (lower --lr); nothing is saved"
            )


def _some(names: list[str]) -> str:
    names = [name.removeprefix("module.") for name in names]
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _first_module(model: nn.Module, repeat: Callable[[], None]) -> list[str]:
    """Name of the module that is the first to give a tensor with a NaN or an infinity; leaves before their parents."""
    found: list[str] = []

    def hook(name: str) -> Callable:
        def check(module: nn.Module, inputs: tuple, output: object) -> None:
            tensors = output if isinstance(output, tuple | list) else (output,)
            if not found and any(
                isinstance(t, torch.Tensor) and t.is_floating_point() and not t.isfinite().all() for t in tensors
            ):
                found.append(name)

        return check

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name]
    try:
        repeat()
    finally:
        for handle in handles:
            handle.remove()
    return found


def _save(batches: list[Batch], file: Path, cause: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f"{index}.{key}": t.cpu().clone() for index, batch in enumerate(batches) for key, t in batch.items()}
    save_file(tensors, file, metadata={"cause": cause})
