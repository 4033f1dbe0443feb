"""Keys and values of responses that grow together: one buffer per layer, written in place.

All rows are equally long, so a step writes one column. Buffers grow by half when full: a long token limit costs nothing until it is
used.
"""

from collections.abc import Sequence

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

GROWTH = 1.5


def prefill_cache() -> Cache:
    """An empty cache that collects the keys and values of packed prompts, [1, Hkv, N, d] in each layer."""
    return Cache(layer_class_to_replicate=DynamicLayer)


class GrowingLayer(CacheLayerMixin):
    """One layer's keys and values, [rows, Hkv, capacity, d] of which `length` columns are used."""

    is_sliding = False

    def __init__(self, prompt_keys: Tensor, prompt_values: Tensor, rows: int, capacity: int) -> None:
        super().__init__()
        self.keys: Tensor = _room(prompt_keys, rows, capacity)
        self.values: Tensor = _room(prompt_values, rows, capacity)
        self.rows, self.length, self.is_initialized = rows, 0, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The buffers exist from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Append [rows, Hkv, new, d] and return all columns so far."""
        stop = self.length + key_states.shape[2]
        if stop > self.keys.shape[2]:
            self._grow(stop)
        self.keys[: self.rows, :, self.length : stop] = key_states
        self.values[: self.rows, :, self.length : stop] = value_states
        self.length = stop
        return self.keys[: self.rows, :, :stop], self.values[: self.rows, :, :stop]

    def _grow(self, needed: int) -> None:
        capacity = max(needed, int(self.length * GROWTH))
        for name in ("keys", "values"):
            old: Tensor = getattr(self, name)[: self.rows]
            new = _room(old, self.rows, capacity)
            new[:, :, : self.length] = old[:, :, : self.length]
            setattr(self, name, new)

    def keep(self, holes: Tensor, movers: Tensor, rows: int) -> None:
        """Move the rows ``movers`` into ``holes`` and go on with the first ``rows``."""
        if len(holes):
            for buffer in (self.keys, self.values):
                used = buffer[:, :, : self.length]
                used[holes] = used[movers]
        self.rows = rows

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0


class ResponseCache(Cache):
    """Keys and values of the responses in all layers."""

    def __init__(self, prefilled: Sequence[tuple[Tensor, Tensor]], rows: int, capacity: int) -> None:
        """Args:
        prefilled: keys and values of any prompts in each layer, [U, Hkv, P, d], for their shapes.
        """
        self.growing = [GrowingLayer(keys, values, rows, capacity) for keys, values in prefilled]
        super().__init__(layers=list(self.growing))

    def keep(self, holes: Tensor, movers: Tensor, rows: int) -> None:
        """See `GrowingLayer.keep`."""
        for layer in self.growing:
            layer.keep(holes, movers, rows)


def _room(like: Tensor, rows: int, capacity: int) -> Tensor:
    """Uninitialised [rows, Hkv, capacity, d]."""
    return like.new_empty(rows, like.shape[1], capacity, like.shape[3])
