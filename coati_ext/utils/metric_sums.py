"""Metrics of an optimizer step, from the sums of its micro-batches and ranks: means that no split changes.

A mean of means weighs a short micro-batch as a long one; so what travels is the sum and the exact count.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from coati_ext.utils.collective import rank_and_size


class Mean(NamedTuple):
    """The mean over everything is sum(total) / sum(count)."""

    total: torch.Tensor
    count: torch.Tensor


class Sum(NamedTuple):
    """Shares of a whole, such as losses over a global denominator."""

    total: torch.Tensor


class Max(NamedTuple):
    """-inf where there is nothing to take the maximum of."""

    value: torch.Tensor


Metric = Mean | Sum | Max


class MetricSums:
    """Adds up metrics by name without waiting for the device; `reduce` waits once.

    Example:
        >>> sums = MetricSums()
        >>> sums.add({"reward": Mean(torch.tensor(6.0), torch.tensor(2))})
        >>> sums.add({"reward": Mean(torch.tensor(1.0), torch.tensor(1)), "longest": Max(torch.tensor(7))})
        >>> {name: round(value, 4) for name, value in sums.reduce().items()}
        {'reward': 2.3333, 'longest': 7.0}
    """

    def __init__(self) -> None:
        self._parts: dict[str, list[Metric]] = {}

    def add(self, metrics: Mapping[str, Metric]) -> None:
        """Numbers without a gradient: tensors of one element.

        Raises:
            ValueError: a name that stood for another kind of metric before.
        """
        for name, metric in metrics.items():
            parts = self._parts.setdefault(name, [])
            if parts and type(parts[0]) is not type(metric):
                raise ValueError(f"metric {name}: a {type(metric).__name__}, was a {type(parts[0]).__name__} before")
            parts.append(type(metric)(*(value.detach() for value in metric)))

    def reduce(self, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """Over the ranks of `group` (None: this process alone), alike on all of them; the sums are left as they are.

        A collective: every rank calls it, also one that had nothing to add. Names may differ between ranks. Added up in
        fp64, counts exactly. A mean of nothing and a maximum of nothing are left out.

        Raises:
            ValueError: ranks give one name to different kinds of metric.
        """
        mine = {name: (type(parts[0]).__name__, *_added(parts)) for name, parts in self._on_host().items()}
        every: list[dict[str, tuple]] = [mine]
        if group is not None:
            every = [mine] * rank_and_size(group)[1]
            dist.all_gather_object(every, mine, group=group)
        reduced = {}
        for name in dict.fromkeys(name for one in every for name in one):
            found = [one[name] for one in every if name in one]
            kinds = sorted({kind for kind, *_ in found})
            if len(kinds) > 1:
                raise ValueError(f"metric {name}: ranks disagree whether it is a {' or a '.join(kinds)}")
            value = _value(_KINDS[kinds[0]], _added([_KINDS[kinds[0]](*numbers) for _, *numbers in found]))
            if value is not None:
                reduced[name] = value
        return reduced

    def state(self) -> dict[str, list]:
        """What `load_state` takes back, as JSON (which has no NaN: numbers are text); exact to the last bit."""
        return {name: [type(parts[0]).__name__, *map(repr, _added(parts))] for name, parts in self._on_host().items()}

    def load_state(self, state: Mapping[str, list]) -> None:
        self._parts = {name: [_KINDS[kind](*map(_number, numbers))] for name, (kind, *numbers) in state.items()}

    def _on_host(self) -> dict[str, list[Metric]]:
        """The same with Python numbers: one copy from the device for each dtype."""
        by_dtype: dict[tuple, list[torch.Tensor]] = {}
        for parts in self._parts.values():
            for value in (value for part in parts for value in part):
                by_dtype.setdefault((value.dtype, value.device), []).append(value)
        copied = {key: iter(torch.stack([v.reshape(()) for v in values]).tolist()) for key, values in by_dtype.items()}
        return {
            name: [type(part)(*(next(copied[value.dtype, value.device]) for value in part)) for part in parts]
            for name, parts in self._parts.items()
        }


def all_reduce_mean(total: torch.Tensor, count: torch.Tensor, group: dist.ProcessGroup | None = None) -> float:
    """The mean over all ranks of what each has `total` and `count` of; NaN if that is nothing. A collective.

    Example:
        >>> all_reduce_mean(torch.tensor(3.0), torch.tensor(2))
        1.5
    """
    sums = MetricSums()
    sums.add({"mean": Mean(total, count)})
    return sums.reduce(group).get("mean", math.nan)


_KINDS = {kind.__name__: kind for kind in (Mean, Sum, Max)}


def _number(text: str) -> torch.Tensor:
    return torch.tensor(int(text)) if text.isdigit() else torch.tensor(float(text), dtype=torch.float64)


def _added(parts: list[Metric]) -> tuple[float, ...]:
    if isinstance(parts[0], Max):
        values = [float(part.value) for part in parts]
        return (math.nan if any(map(math.isnan, values)) else max(values),)
    return tuple(sum(column) for column in zip(*parts, strict=True))


def _value(kind: type, numbers: tuple[float, ...]) -> float | None:
    if kind is Mean:
        total, count = numbers
        return total / count if count else None
    return None if kind is Max and numbers[0] == -math.inf else float(numbers[0])
