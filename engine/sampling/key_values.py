"""Keys and values of responses that grow together: one buffer per layer, written in place.

All rows are equally long, so a step writes one column. Buffers grow by half when full: a long token limit costs nothing until it is
used.
"""

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

GROWTH = 1.5


def prefill_cache() -> Cache:
    """An empty cache that collects the keys and values of packed prompts, [1, Hkv, N, d] in each layer."""
    return Cache(layer_class_to_replicate=DynamicLayer)


class GrowingLayer(CacheLayerMixin):
    """One layer's keys and values, [rows, Hkv, capacity, d] of which `length` columns are used."""

    is_sliding = False

    def __init__(self, template: Tensor, rows: int, capacity: int) -> None:
        super().__init__()
        heads, width = template.shape[1], template.shape[3]
        self.keys: Tensor = template.new_empty(rows, heads, capacity, width)
        self.values: Tensor = torch.empty_like(self.keys)
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
            new = old.new_empty(*old.shape[:2], capacity, old.shape[3])
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

    layers: list[GrowingLayer]

    def __init__(self, template: Cache, rows: int, capacity: int) -> None:
        super().__init__(layers=[GrowingLayer(layer.keys, rows, capacity) for layer in template.layers])

    def keep(self, holes: Tensor, movers: Tensor, rows: int) -> None:
        """See `GrowingLayer.keep`."""
        for layer in self.layers:
            layer.keep(holes, movers, rows)
