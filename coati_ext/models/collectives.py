"""Collectives of tensor parallelism as differentiable functions: each moves a tensor forward and its gradient back.

A tensor is *whole* (alike on every rank of the group), *cut* (each rank has its share along one dimension) or
*partial* (the value is the sum over the ranks). Every function says what it turns into what, and the gradient of its
input is as the input is: whole for whole or partial, cut for cut. `copy` and `gather_sum` stand before work that the
ranks share, which returns partial gradients; after `reduce` and `gather` all ranks do the same work.

Shares may be uneven, down to nothing on the last ranks.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

# Named anew in torch 2.13, where the older names warn at every call.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def share(size: int, parts: int, index: int) -> tuple[int, int]:
    """(start, stop) of what part `index` has of a dimension of `size`: equal parts, the last ones shorter or empty.

    Example:
        >>> [share(9, 4, index) for index in range(4)]
        [(0, 3), (3, 6), (6, 9), (9, 9)]
    """
    step = math.ceil(size / parts)
    return min(index * step, size), min((index + 1) * step, size)


def copy(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Whole -> whole, where each rank uses it for its own part of the work: the partial gradients are summed."""
    return _Exchange.apply(x, _same, partial(_all_reduce, group=group))


def reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Partial -> whole."""
    return _Exchange.apply(x, partial(_all_reduce, group=group), _same)


def split(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Whole -> cut."""
    cut, joined = (
        partial(_own_share, dim=dim, group=group),
        partial(_all_gather, dim=dim, size=x.shape[dim], group=group),
    )
    return _Exchange.apply(x, cut, joined)


def gather(x: torch.Tensor, dim: int, size: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Cut -> whole, `size` along `dim`."""
    joined = partial(_all_gather, dim=dim, size=size, group=group)
    return _Exchange.apply(x, joined, partial(_own_share, dim=dim, group=group))


def gather_sum(x: torch.Tensor, dim: int, size: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Cut -> whole as `gather`, where each rank uses it for its own part of the work, as `copy`."""
    joined = partial(_all_gather, dim=dim, size=size, group=group)
    return _Exchange.apply(x, joined, partial(_reduce_scatter, dim=dim, group=group))


def reduce_scatter(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Partial -> cut."""
    joined = partial(_all_gather, dim=dim, size=x.shape[dim], group=group)
    return _Exchange.apply(x, partial(_reduce_scatter, dim=dim, group=group), joined)


class _Exchange(torch.autograd.Function):
    """One plain function forward, another for the gradient."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, forward: Callable, backward: Callable) -> torch.Tensor:
        ctx.back = backward
        return forward(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(grad), None, None


def _same(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


def _all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _own_share(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    start, stop = share(x.shape[dim], dist.get_world_size(group), dist.get_rank(group))
    return x.narrow(dim, start, stop - start).contiguous()


def _all_gather(x: torch.Tensor, dim: int, size: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Shares travel padded to the longest, the ranks' dimension in front."""
    parts = dist.get_world_size(group)
    step = math.ceil(size / parts)
    shares = x.movedim(dim, 0)
    if shares.shape[0] < step:
        shares = torch.cat([shares, shares.new_zeros(step - shares.shape[0], *shares.shape[1:])])
    joined = x.new_empty(parts * step, *shares.shape[1:])
    _all_gather_single(joined, shares.contiguous(), group=group)
    return joined[:size].movedim(0, dim).contiguous()


def _reduce_scatter(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    parts, size = dist.get_world_size(group), x.shape[dim]
    step = math.ceil(size / parts)
    whole = x.movedim(dim, 0)
    if parts * step > size:
        whole = torch.cat([whole, whole.new_zeros(parts * step - size, *whole.shape[1:])])
    start, stop = share(size, parts, dist.get_rank(group))
    total = x.new_empty(step, *whole.shape[1:])
    _reduce_scatter_single(total, whole.contiguous(), group=group)
    return total[: stop - start].movedim(0, dim).contiguous()
