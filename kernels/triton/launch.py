"""What every launch of a kernel shares: the block shapes and the device it goes to."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

ROW_BLOCK = 2048
"""Vocabulary columns that one program of a row kernel holds at a time."""

ROW_WARPS = 8
"""Warps of that program: 8 columns a thread, so that all running statistics stay in registers."""

DRAW_BLOCK = 1024
"""The sampler's columns at a time: it has three times the running values, and more would leave one program a multiprocessor."""

TOKEN_BLOCK = 512
"""Tokens of one program of a kernel over tokens."""


def options(warps: int) -> dict[str, object]:
    """Launch options. Fused multiply-adds are asked for by name: versions of Triton differ in the default, and so would the bits."""
    return {"num_warps": warps, "enable_fp_fusion": True}


def on_device_of(tensor: Tensor) -> AbstractContextManager:
    """Triton launches on the current device; make it the one where the tensor lives."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def banned_flags(banned: Tensor | None, vocabulary: int) -> Tensor | None:
    """uint8 [V], 1 at banned ids: one byte a column from L2 instead of a search. Kept as long as the ids are."""
    if banned is None:
        return None
    known = _flags.get(banned)
    if known is None or len(known) != vocabulary:
        known = torch.zeros(vocabulary, dtype=torch.uint8, device=banned.device).index_fill_(0, banned, 1)
        # Memory made while a graph is captured belongs to that graph and is only filled when it is replayed.
        if not (banned.is_cuda and torch.cuda.is_current_stream_capturing()):
            _flags[banned] = known
    return known


_flags: WeakIdKeyDictionary = WeakIdKeyDictionary()
