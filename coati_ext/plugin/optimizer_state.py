"""What a ZeRO optimizer holds as pieces that any layout can read, and back."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from coati_ext.checkpoint_io.state_pieces import Piece

MASTER = "master"


def pieces_of(
    name: str, parameter: nn.Parameter, master: torch.Tensor, state: dict[str, Any], *, shard: int
) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Of one parameter: this rank's shard of its fp32 master and of the optimizer's states, and its scalar states.

    Args:
        master: shard number `shard` of the flattened, padded parameter.
        state: of torch's optimizer.
    """
    start, stop = flat_range(parameter, master, shard)
    place = local_place(parameter)
    tensors = {MASTER: master, **{kind: value for kind, value in state.items() if _is_shard(value, master)}}
    for kind, tensor in tensors.items():
        piece = Piece(name=name, kind=kind, **place, flat_start=start, flat_stop=stop)
        yield piece, tensor.detach().reshape(-1)[: stop - start]
    for kind, value in state.items():
        if kind not in tensors:
            yield Piece.whole(name, kind, (1,)), torch.as_tensor(value, dtype=torch.float32).reshape(1)


def wanted_pieces(
    name: str, parameter: nn.Parameter, master: torch.Tensor, kinds: tuple[list[str], list[str]], *, shard: int
) -> Iterator[Piece]:
    """What `put_piece` takes: this rank's whole slice of the fp32 parameter, its shard of the states, the scalars."""
    start, stop = flat_range(parameter, master, shard)
    place = local_place(parameter)
    shard_kinds, scalar_kinds = kinds
    yield Piece(name=name, kind=MASTER, **place, flat_start=0, flat_stop=parameter.numel())
    for kind in shard_kinds:
        yield Piece(name=name, kind=kind, **place, flat_start=start, flat_stop=stop)
    for kind in scalar_kinds:
        yield Piece.whole(name, kind, (1,))


def put_piece(
    piece: Piece,
    tensor: torch.Tensor,
    parameter: nn.Parameter,
    master: torch.Tensor,
    state: dict[str, torch.Tensor],
    *,
    shard: int,
) -> None:
    """Put a piece that was read into the parameter and its master, or into the optimizer's `state` of it."""
    start, stop = flat_range(parameter, master, shard)
    if piece.kind == MASTER:
        parameter.data.copy_(tensor.view_as(parameter))
        master.data.reshape(-1)[: stop - start].copy_(tensor[start:stop])
    elif piece == Piece.whole(piece.name, piece.kind, (1,)) and parameter.numel() != 1:
        state[piece.kind] = tensor.reshape(())
    else:
        state[piece.kind] = torch.zeros_like(master.data)
        state[piece.kind].reshape(-1)[: stop - start].copy_(tensor)


def kinds_of(states: dict[Any, dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Names of the states that are as large as a parameter's shard, and of the scalar ones."""
    shards, scalars = {}, {}
    for master, state in states.items():
        for kind, value in state.items():
            (shards if _is_shard(value, master) else scalars)[kind] = None
    return list(shards), list(scalars)


def local_place(parameter: nn.Parameter) -> dict[str, Any]:
    """Shape of the whole tensor and which slice of it this rank has: of all experts, or a tensor-parallel one."""
    cut = getattr(parameter, "ep_cut", None) or getattr(parameter, "tp_cut", None)
    shape = tuple(parameter.shape)
    if cut is None:
        return {"shape": shape, "dim": 0, "start": 0, "stop": shape[0]}
    whole = (*shape[: cut.dim], cut.full, *shape[cut.dim + 1 :])
    return {"shape": whole, "dim": cut.dim, "start": cut.start, "stop": cut.stop}


def flat_range(parameter: nn.Parameter, master: torch.Tensor, shard: int) -> tuple[int, int]:
    """Elements of the flattened parameter that the shard holds, without the padding at the end."""
    size, numel = master.numel(), parameter.numel()
    return min(shard * size, numel), min((shard + 1) * size, numel)


def _is_shard(value: Any, master: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == master.numel()
