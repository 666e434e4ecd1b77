"""Rows and columns of transformers' caches: choose rows, drop columns on the left, put batches together.

Rows are padded on the left, so that all end at the same column. transformers' own `reorder_cache`, `crop` and
`batch_select_indices` can do none of: joining batches, cropping the left, choosing rows of linear attention.

Legend: B batch, S columns of the cache.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from transformers.cache_utils import (
    Cache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

_COLUMNS = ("keys", "values", "indexer_keys")  # (B, ..., S, width)
_STATES = ("conv_states", "recurrent_states")  # dicts of (B, ...): no columns
_GROWTH = (
    1.25  # of the columns at every allocation: 5 copies to double, where the layer of transformers copies each step
)
_LEAST_ROOM = 16


class GrowingLayer(DynamicLayer):
    """`DynamicLayer` that writes into spare columns; transformers' copies all keys and values at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.room: dict[str, torch.Tensor] = {}  # of keys and of values: what they are the first columns of

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        old = self.get_seq_length()
        new = old + key_states.shape[-2]
        for name, states in (("keys", key_states), ("values", value_states)):
            present, room = getattr(self, name), self.room.get(name)
            # A tensor put in place of `keys` (other rows, fewer columns) is not the start of the spare one any more.
            if old == 0 or room is None or present.data_ptr() != room.data_ptr() or new > room.shape[-2]:
                columns = max(int(new * _GROWTH), new + _LEAST_ROOM)
                room = states.new_empty(*states.shape[:-2], columns, states.shape[-1])
                if old:
                    room[..., :old, :] = present
                self.room[name] = room
            room[..., old:new, :] = states
            setattr(self, name, room[..., :new, :])
        return self.keys, self.values


_KNOWN = (
    DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer, GrowingLayer, LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer, LinearAttentionLayer,
)  # fmt: skip


def adopt_cache(cache: object, model_name: str) -> Cache:
    """The cache that a prompt's forward has filled, its full-attention layers made to grow in place.

    Raises:
        ValueError: no cache, or a layer of a class that is not known here.
    """
    layers = getattr(cache, "layers", None)
    if not isinstance(cache, Cache) or layers is None:
        raise ValueError(f"{model_name} returned {type(cache).__name__} for a cache: it cannot generate here")
    unknown = [type(layer).__name__ for layer in layers if type(layer) not in _KNOWN]
    if unknown:
        raise ValueError(f"{model_name} caches in a {unknown[0]}: its rows cannot be chosen and joined here")
    for index, layer in enumerate(layers):
        if type(layer) is DynamicLayer and layer.is_initialized:
            layers[index] = growing = GrowingLayer()
            growing.lazy_initialization(layer.keys, layer.values)
            growing.keys, growing.values = layer.keys, layer.values
    return cache


def select_rows(cache: Cache, index_B: torch.Tensor | None, *, drop: int = 0) -> None:
    """Keep the rows `index_B` (in this order, repeated or not; None for all), without the first `drop` columns."""

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if index_B is None else tensor.index_select(0, index_B)

    for layer in cache.layers:
        columns = _num_columns(layer, layer.get_seq_length() - drop) if hasattr(layer, "get_seq_length") else 0
        for name in _present(layer):
            kept = getattr(layer, name)[..., getattr(layer, name).shape[-2] - columns :, :]
            _replace(layer, name, rows(kept))
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length -= drop
        for states, key in _states(layer):
            states[key] = rows(states[key])
    for number, state in _linear_cache(cache):
        cache.linear_cache[number] = rows(state)


def join_caches(caches: list[Cache]) -> Cache:
    """All rows in one batch, in order: in the first cache; the others are used up."""
    first = caches[0]
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        for name in _present(layers[0]):
            parts = [getattr(layer, name) for layer in layers]
            columns = max(part.shape[-2] for part in parts)
            _replace(layers[0], name, torch.cat([_widen(part, columns) for part in parts]))
        if isinstance(layers[0], DynamicSlidingWindowLayer):
            layers[0].cumulative_length = max(layer.cumulative_length for layer in layers)
        for states, key in _states(layers[0]):
            attribute = next(name for name in _STATES if getattr(layers[0], name) is states)
            states[key] = torch.cat([getattr(layer, attribute)[key] for layer in layers])
    for number, _ in _linear_cache(first):
        first.linear_cache[number] = torch.cat([cache.linear_cache[number] for cache in caches])
    return first


def _replace(layer: object, name: str, tensor: torch.Tensor) -> None:
    if isinstance(layer, GrowingLayer):
        layer.room.pop(name, None)  # now, layer by layer: at the next step all layers would be there twice
    setattr(layer, name, tensor)


def _num_columns(layer: DynamicLayer, length: int) -> int:
    """Columns that a layer holds of a sequence of `length`."""
    return min(length, layer.sliding_window - 1) if isinstance(layer, DynamicSlidingWindowLayer) else length


def _widen(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    return F.pad(tensor, (0, 0, columns - tensor.shape[-2], 0))


def _present(layer: object) -> list[str]:
    return [name for name in _COLUMNS if getattr(layer, name, None) is not None]


def _states(layer: object) -> Iterator[tuple[dict[int, torch.Tensor], int]]:
    for name in _STATES:
        states = getattr(layer, name, {})
        yield from ((states, key) for key, state in list(states.items()) if state is not None)


def _linear_cache(cache: Cache) -> list[tuple[int, torch.Tensor]]:
    """MiniMax keeps the states of its linear attention beside the layers: (layer, state) of those that have one."""
    return [(n, s) for n, s in enumerate(getattr(cache, "linear_cache", ())) if isinstance(s, torch.Tensor)]
