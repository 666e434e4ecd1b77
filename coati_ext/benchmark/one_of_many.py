"""One process that takes itself for a rank of many: the code of a real run, with local copies for communication.

The process group is torch's fake one, whose collectives give a rank its own data back. What that is not enough for is
put in place of `torch.distributed`'s functions: exchanges between experts, whose counts must be true, and messages
between pipeline stages, which must be numbers.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist


@dataclass(kw_only=True)
class Traffic:
    """What this rank would send to others."""

    all_to_all_bytes: int = 0
    stage_bytes: int = 0


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[Traffic]:
    """Within it `torch.distributed` is initialised with this rank and size."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    traffic = Traffic()
    exchange = _Exchange(traffic)
    places = {
        "all_to_all_single": exchange.all_to_all_single,
        "batch_isend_irecv": exchange.batch_isend_irecv,
        "broadcast_object_list": lambda *_, **__: None,
        "all_gather_object": lambda found, mine, group=None: found.__setitem__(slice(None), [mine] * len(found)),
    }
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with ExitStack() as stack:
            for name, function in places.items():
                stack.enter_context(mock.patch.object(dist, name, function))
            yield traffic
    finally:
        dist.destroy_process_group()


class _Exchange:
    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Counts: the others' tokens choose as this rank's do, so each sends what this rank would send itself. Rows: as
        many as will come, copied from those that are sent, again from the first where more come."""
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        if input_split_sizes is None:
            output.view(size, -1).copy_(source.view(size, -1)[rank].expand(size, -1))
            return
        sent = len(source) - input_split_sizes[rank]
        self._traffic.all_to_all_bytes += sent * source[:1].nbytes
        if not len(source):
            output.zero_()
            return
        for start in range(0, len(output), len(source)):
            place = output[start : start + len(source)]
            place.copy_(source[: len(place)])

    def batch_isend_irecv(self, operations: list[dist.P2POp]) -> list[Any]:
        for operation in operations:
            if operation.op in (dist.irecv, dist.recv):
                operation.tensor.normal_()
            else:
                self._traffic.stage_bytes += operation.tensor.nbytes
        return []
