"""How the ranks of a run are arranged: coordinates on ColossalAI's mesh, and which layers a pipeline stage has."""

from dataclasses import dataclass
from typing import Any, NamedTuple


class Coordinates(NamedTuple):
    """A rank's place on ColossalAI's mesh."""

    moe_dp: int
    pp: int
    ep: int
    tp: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the ranks are arranged: the mesh of ColossalAI's `MoeHybridParallelPlugin`, (moe_dp, pp, ep, tp) row-major.

    Raises:
        ValueError: sizes that are no positive integers, or in conflict; named as in a layout file.
    """

    ep: int = 1
    """Ranks that share the experts of a layer."""
    pp: int = 1
    """Pipeline stages."""
    tp: int = 1
    """Ranks that share a matrix."""
    dp: int | None = None
    """Ranks with data of their own, a multiple of `ep`; default `ep`."""
    num_layers_per_stage: tuple[int, ...] | None = None
    """Layers of each stage; default `distribute_layers`."""

    def __post_init__(self) -> None:
        if self.dp is None:
            object.__setattr__(self, "dp", self.ep)
        for name in ("ep", "pp", "tp", "dp"):
            _check_positive(name, getattr(self, name))
        if self.dp % self.ep:
            raise ValueError(f"ep={self.ep} must divide dp={self.dp}: the experts are shared by ranks of data parallel")
        if self.num_layers_per_stage is not None:
            given = self.num_layers_per_stage
            if not isinstance(given, list | tuple) or len(given) != self.pp:
                raise ValueError(f"num_layers_per_stage must be a list of pp={self.pp} numbers, got {given!r}")
            for number in given:
                _check_positive("num_layers_per_stage", number)
            object.__setattr__(self, "num_layers_per_stage", tuple(given))

    @property
    def moe_dp(self) -> int:
        """Copies of every expert."""
        return self.dp // self.ep

    @property
    def world_size(self) -> int:
        return self.pp * self.tp * self.dp

    def coordinates(self, rank: int) -> Coordinates:
        """ValueError for a rank outside of the layout."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside of the layout's {self.world_size} ranks")
        rest, tp = divmod(rank, self.tp)
        rest, ep = divmod(rest, self.ep)
        moe_dp, pp = divmod(rest, self.pp)
        return Coordinates(moe_dp, pp, ep, tp)

    def rank(self, place: Coordinates) -> int:
        """The inverse of `coordinates`."""
        return ((place.moe_dp * self.pp + place.pp) * self.ep + place.ep) * self.tp + place.tp

    def layers_per_stage(self, num_layers: int) -> tuple[int, ...]:
        """ValueError if a stage would have no layer, or `num_layers_per_stage` is of another model."""
        if self.pp > num_layers:
            raise ValueError(f"pp={self.pp} leaves stages without a layer: the model has {num_layers}")
        given = self.num_layers_per_stage or distribute_layers(num_layers, self.pp)
        if sum(given) != num_layers:
            raise ValueError(f"num_layers_per_stage sums to {sum(given)}, but the model has {num_layers} layers")
        return given


def distribute_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage; the stages in the middle take those left over.

    As `PipelineStageManager.distribute_layers` of ColossalAI (colossalai/pipeline/stage_manager.py).

    Example:
        >>> distribute_layers(61, 8)
        (7, 7, 8, 8, 8, 8, 8, 7)
    """
    quotient, remainder = divmod(num_layers, num_stages)
    first = num_stages // 2 - remainder // 2
    return tuple(quotient + (first <= stage < first + remainder) for stage in range(num_stages))


def _check_positive(name: str, number: Any) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"{name} must be a positive integer, got {number!r}")
