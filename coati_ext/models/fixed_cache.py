"""Keys and values at fixed addresses, in memory that takes on other shapes as rows leave and columns are added.

A `FixedLayer` takes the place of a layer that grows. To `select_rows` and `join_caches` it looks like one; to the model
it is `room.rows` x `room.columns` from the start, of which a step writes the column that a tensor names.

Legend: R rows of the room, S its columns.
"""

from dataclasses import dataclass, field

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from coati_ext.models.kv_cache import GrowingLayer

LEAST_COLUMNS = 512  # fewer save less attention than their captures cost
COLUMN_MULTIPLE = 64  # masks of other widths are copied by torch's attention
ROW_MULTIPLE = 8
LEAST_ROWS = 32  # not fewer, once there: their steps take as long


@dataclass(kw_only=True)
class Room:
    """Memory of fixed addresses for keys and values: `rows` x `columns`, or any other shape in the same bytes."""

    device: torch.device
    rows: int = 0
    columns: int = 0
    capacity: int = 0  # most rows x columns so far
    buffers: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)  # by layer and name, flat

    def __post_init__(self) -> None:
        self.column_1 = torch.zeros(1, dtype=torch.long, device=self.device)  # that the next step writes

    def rows_for(self, rows: int) -> int:
        """As now while more than half are taken, or few; otherwise just enough."""
        if rows <= self.rows and (rows > self.rows // 2 or self.rows <= LEAST_ROWS):
            return self.rows
        return round_up(rows, ROW_MULTIPLE)

    def reshape(self, rows: int, width: int, last: int) -> bool:
        """For rows that end at column `width` now and at `last` at the latest; whether the addresses change."""
        columns = LEAST_COLUMNS
        while columns <= width:  # 512, 768, 1024, 1536, ...
            columns += columns // 2 if columns & (columns - 1) == 0 else columns // 3
        if not width < self.columns <= columns:
            self.columns = round_up(min(columns, max(last, width + 1)), COLUMN_MULTIPLE)
        self.rows = self.rows_for(rows)
        moves = self.rows * self.columns > self.capacity
        self.capacity = max(self.capacity, self.rows * self.columns)
        return moves


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class FixedLayer(DynamicLayer):
    """A layer whose `keys` and `values` are the live rows and columns of a room; what is put in their place is copied.

    `update` writes one column, that of `room.column_1`, and returns the whole room.
    """

    def __init__(self, index: int, room: Room) -> None:
        self.index, self.room = index, room
        self.whole: dict[str, torch.Tensor] = {}  # (R, heads, S, width)
        self.live: dict[str, tuple[int, int]] = {}  # rows and columns
        super().__init__()
        self.is_initialized = True

    def _get(self, name: str) -> torch.Tensor | None:
        if name not in self.whole:
            return None
        rows, columns = self.live[name]
        return self.whole[name][:rows, :, :columns]

    def _put(self, name: str, states: torch.Tensor | None) -> None:
        if states is None:
            return
        rows, heads, columns, width = states.shape
        shape, key = (self.room.rows, heads, self.room.columns, width), (self.index, name)
        buffer = self.room.buffers.get(key)
        needed = self.room.capacity * heads * width
        if buffer is None or buffer.numel() < needed:
            # Zeros: what is masked is multiplied by 0, which would not hide what memory may hold.
            buffer = self.room.buffers[key] = states.new_zeros(needed)
        elif states.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr():
            states = states.clone()
        self.whole[name] = buffer[: shape[0] * heads * shape[2] * width].view(shape)
        self.whole[name][:rows, :, :columns] = states
        self.live[name] = rows, columns

    keys = property(lambda self: self._get("keys"), lambda self, states: self._put("keys", states))
    values = property(lambda self: self._get("values"), lambda self, states: self._put("values", states))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for name, states in (("keys", key_states), ("values", value_states)):
            self.whole[name].index_copy_(2, self.room.column_1, states)
        return self.whole["keys"], self.whole["values"]

    def advance(self) -> None:
        """One more column is live."""
        self.live = {name: (rows, columns + 1) for name, (rows, columns) in self.live.items()}

    def get_seq_length(self) -> int:
        return self.live["keys"][1]


def fix_cache(cache: Cache, room: Room) -> None:
    """The layers of the cache in the room, which has its shape already; one at a time, so that none is there twice.

    Raises:
        ValueError: a layer that is not of plain full attention.
    """
    kinds = [type(layer).__name__ for layer in cache.layers if not isinstance(layer, FixedLayer | GrowingLayer)]
    if kinds:
        raise ValueError(f"the model caches in a {kinds[0]}")
    for index, layer in enumerate(cache.layers):
        fixed = layer if isinstance(layer, FixedLayer) else FixedLayer(index, room)
        fixed.keys, fixed.values = layer.keys, layer.values
        cache.layers[index] = fixed


def release_cache(cache: Cache) -> None:
    """Layers that grow in place of those in a room."""
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, FixedLayer):
            cache.layers[index] = growing = GrowingLayer()
            growing.lazy_initialization(layer.keys, layer.values)
            growing.keys, growing.values = layer.keys, layer.values
