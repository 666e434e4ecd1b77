"""Expert parallelism on one host: dispatch and combine, against what the links carry in the same run.

Each rank routes its own tokens over experts that do nothing, forward and backward: what is timed is the sort, the
exchange of counts, the gather of rows, four all-to-alls of rows (there and back, and their gradients), and the sums.
The link is four plain `all_to_all_single` of the same rows with the same splits. Bytes are those that a rank sends to
the others in four such exchanges, mean over ranks. Times are medians of steps that are enqueued one after the other, as
in training; of the ranks the slowest.

Legend: T tokens of a rank, K top-k, E experts, S rows that a rank received, H hidden.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from coati_ext.benchmark.experts import ROUTINGS, Shape, route
from coati_ext.benchmark.process import on_ranks
from coati_ext.benchmark.timing import device_name, dtype_of
from coati_ext.moe.dispatch import combine, dispatch, plan_dispatch

BACKENDS = ("nccl", "gloo")
MIN_STEPS = 5
_WARMUP = 3


@dataclass(frozen=True, kw_only=True)
class Row:
    """One shape, number of tokens of each rank and routing."""

    shape: str
    num_tokens: int
    routing: str
    forward_ms: float
    backward_ms: float
    link_ms: float
    """Of the plain exchanges, forward and backward."""
    gb_per_s: float
    """Of a rank, through dispatch and combine."""
    link_gb_per_s: float
    of_link: float

    def line(self) -> str:
        ms = f"{self.forward_ms:>9.2f}{self.backward_ms:>10.2f}{self.link_ms:>9.2f}"
        rates = f"{self.gb_per_s:>9.1f}{self.link_gb_per_s:>9.1f}{self.of_link:>9.0%}"
        return f"{self.shape:<18}{self.num_tokens:>7} {self.routing:<9}{ms}{rates}"


HEADER = (
    f"{'shape':<18}{'tokens':>7} {'routing':<9}{'fwd ms':>9}{'bwd ms':>10}{'link ms':>9}{'GB/s':>9}{'link':>9}"
    f"{'of link':>9}"
)


def compare(
    shapes: dict[str, Shape],
    tokens: Sequence[int],
    routings: Sequence[str],
    *,
    ranks: int | None = None,
    backend: str = "nccl",
    steps: int = 7,
) -> dict[str, Any]:
    """Measure on ranks that it starts itself, and print each row when it is there.

    Args:
        tokens: of each rank.
        ranks: as many GPUs; by default all that are visible, or 2 processes over gloo.

    Returns:
        {"ranks", "backend", "rows": of `Row`}, as JSON.

    Raises:
        ValueError: names the flag that is wrong, before any rank is started.
        RuntimeError: a rank failed.
    """
    ranks = check(shapes, tokens, routings, ranks=ranks, backend=backend, steps=steps)
    rows = on_ranks(measure, ranks, backend, shapes, list(tokens), list(routings), steps)[0]
    return {"ranks": ranks, "backend": backend, "rows": rows}


def check(
    shapes: dict[str, Shape],
    tokens: Sequence[int],
    routings: Sequence[str],
    *,
    ranks: int | None,
    backend: str,
    steps: int,
) -> int:
    """The number of ranks. Arguments and errors as of `compare`."""
    if backend not in BACKENDS:
        raise ValueError(f"--backend: unknown {backend}; there are {', '.join(BACKENDS)}")
    if unknown := set(routings) - set(ROUTINGS):
        raise ValueError(f"--routings: unknown {', '.join(sorted(unknown))}; there are {', '.join(ROUTINGS)}")
    if min(tokens) < 1:
        raise ValueError(f"--tokens must be at least 1, got {min(tokens)}")
    if steps < MIN_STEPS:
        raise ValueError(f"--steps must be at least {MIN_STEPS}, got {steps}")
    if ranks is not None and ranks < 2:
        raise ValueError(f"--ranks must be at least 2, got {ranks}: one rank exchanges nothing")
    if backend == "nccl":
        visible = torch.cuda.device_count()
        ranks = visible if ranks is None else ranks
        if visible < max(ranks, 2):
            raise ValueError(
                f"--backend nccl: {visible} GPU(s) visible, {max(ranks, 2)} needed; give fewer --ranks, at least 2, or "
                "--backend gloo for CPUs"
            )
    ranks = ranks or 2
    for name, shape in shapes.items():
        if shape.num_experts % ranks:
            raise ValueError(
                f"{ranks} ranks do not divide the {shape.num_experts} experts of {name}; change --ranks or --shapes"
            )
    return ranks


def measure(shapes: dict[str, Shape], tokens: list[int], routings: list[str], steps: int) -> list[dict[str, Any]]:
    """On each rank of the default process group: the rows, which rank 0 also prints."""
    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    first = dist.get_rank() == 0
    if first:
        print(f"{dist.get_world_size()} ranks, {device_name(device)}, {dtype_of(device)}\n{HEADER}", flush=True)
    rows = []
    for name, shape in shapes.items():
        for num_tokens in tokens:
            for routing in routings:
                row = _measure(name, shape, num_tokens, routing, device, steps)
                if first:
                    print(row.line(), flush=True)
                rows.append(asdict(row))
    return rows


def _measure(name: str, shape: Shape, num_tokens: int, routing: str, device: torch.device, steps: int) -> Row:
    torch.manual_seed(dist.get_rank())  # tokens and routing of its own
    dtype, world = dtype_of(device), dist.group.WORLD
    hidden_TH = torch.randn(num_tokens, shape.hidden, device=device, dtype=dtype).requires_grad_()
    weights_TK = torch.rand(num_tokens, shape.top_k, device=device).requires_grad_()
    index_TK, probe_TH = route(shape, num_tokens, routing, device), torch.randn_like(hidden_TH)
    plan = plan_dispatch(index_TK, shape.num_experts, world)
    probe_R = torch.rand(plan.own.groups.num_rows, device=device)
    kept: list[torch.Tensor] = []

    def forward() -> None:
        plan = plan_dispatch(index_TK, shape.num_experts, world)
        source_SH, weight_R = dispatch(hidden_TH, weights_TK, plan)
        kept[:] = combine(source_SH, plan), weight_R

    def backward() -> None:
        torch.autograd.grad(kept, [hidden_TH, weights_TK], [probe_TH, probe_R])

    sent, received = plan.exchange.send_splits, plan.exchange.recv_splits
    rows = {True: hidden_TH.new_zeros(sum(sent), shape.hidden), False: hidden_TH.new_zeros(sum(received), shape.hidden)}

    def link() -> None:
        for there in (True, False, True, False):
            splits = (received, sent) if there else (sent, received)
            dist.all_to_all_single(rows[not there], rows[there], *splits, group=world)

    forward_ms, backward_ms, ours_ms = _slowest(_timed([forward, backward], device, steps))
    link_ms, _ = _slowest(_timed([link], device, steps))
    others = torch.tensor([sum(sent) - sent[dist.get_rank()], sum(received) - received[dist.get_rank()]])
    gb = 2e-9 * _mean(others.sum().item()) * shape.hidden * hidden_TH.element_size()
    return Row(
        shape=name, num_tokens=num_tokens, routing=routing, forward_ms=forward_ms, backward_ms=backward_ms,
        link_ms=link_ms, gb_per_s=1e3 * gb / ours_ms, link_gb_per_s=1e3 * gb / link_ms, of_link=link_ms / ours_ms,
    )  # fmt: skip


def _timed(parts: list[Callable[[], None]], device: torch.device, steps: int) -> list[float]:
    """Median milliseconds of each part of a step, and of the whole."""
    marks = [[_mark(device) for _ in range(len(parts) + 1)] for _ in range(_WARMUP + steps)]
    dist.barrier()
    for marks_of_step in marks:
        marks_of_step[0].record()
        for part, mark in zip(parts, marks_of_step[1:], strict=True):
            part()
            mark.record()
    if device.type == "cuda":
        torch.cuda.synchronize()
    spans = [(i, i + 1) for i in range(len(parts))] + [(0, len(parts))]
    return [statistics.median(m[start].elapsed_time(m[end]) for m in marks[_WARMUP:]) for start, end in spans]


class _HostMark:
    """A CUDA event's part on a CPU."""

    def record(self) -> None:
        self._time = time.perf_counter()

    def elapsed_time(self, end: "_HostMark") -> float:
        return 1e3 * (end._time - self._time)


def _mark(device: torch.device) -> Any:
    return torch.cuda.Event(enable_timing=True) if device.type == "cuda" else _HostMark()


def _slowest(times: list[float]) -> list[float]:
    return _over_ranks(times, max)


def _mean(value: float) -> float:
    return _over_ranks([value], statistics.mean)[0]


def _over_ranks(values: list[float], reduce: Callable[[Sequence[float]], float]) -> list[float]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, values)
    return [reduce(of_ranks) for of_ranks in zip(*every, strict=True)]
