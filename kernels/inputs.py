"""Validation that the public operations share, and the forms their optional arguments are brought into."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from headrace.kernels.gemm import statistics_dtype

Banned = Sequence[int] | Tensor | None


def check_head(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    """Raise unless hidden [T, D], weight [V, D] and targets [T] fit together."""
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        if tensor.dim() != 2:
            raise ValueError(f"{name} must have two dimensions, got shape {list(tensor.shape)}")
        if type(tensor).__name__ == "DTensor":
            raise ValueError(f"{name} is a sharded DTensor; call the head inside its FSDP module, or pass the full tensor")
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {tensor.dtype}")
    if hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden has width {hidden.shape[1]} but weight has width {weight.shape[1]}")
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} but weight is {weight.dtype}; cast one of them")
    if len(weight) == 0:
        raise ValueError("weight has no rows: the vocabulary is empty")
    if targets.shape != (len(hidden),):
        raise ValueError(f"targets must have shape [{len(hidden)}], got {list(targets.shape)}")
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise ValueError(f"targets must be integers, got {targets.dtype}")
    for name, tensor in (("weight", weight), ("targets", targets)):
        if tensor.device != hidden.device:
            raise ValueError(f"{name} is on {tensor.device} but hidden is on {hidden.device}")


def check_chunk(chunk: int | None) -> None:
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1 row, got {chunk}")


def kept_rows(targets: Tensor, ignore_index: int) -> Tensor | None:
    """Indices of the rows that are not ignored, or None if that is all of them. The one host sync of a head on a GPU."""
    rows = (targets != ignore_index).nonzero().squeeze(1)
    return None if len(rows) == len(targets) else rows


def inverse_temperature(temperature: float | Tensor, rows: Tensor | None, hidden: Tensor) -> Tensor:
    """1 / T of the kept rows, [N] in the dtype of the statistics."""
    dtype = statistics_dtype(hidden.dtype)
    tokens = len(hidden)
    if not isinstance(temperature, Tensor):
        if not temperature > 0:
            raise ValueError(f"temperature must be above 0, got {temperature}")
        kept = tokens if rows is None else len(rows)
        return torch.full((kept,), 1.0 / temperature, dtype=dtype, device=hidden.device)
    if temperature.dim() == 0:
        temperature = temperature.expand(tokens)
    if temperature.shape != (tokens,):
        raise ValueError(f"temperature must be a number or have shape [{tokens}], got {list(temperature.shape)}")
    chosen = temperature.detach().to(device=hidden.device, dtype=dtype)
    chosen = chosen if rows is None else chosen[rows]
    if chosen.device.type == "cpu" and not bool((chosen > 0).all()):
        raise ValueError(f"temperature must be above 0, got {float(chosen[~(chosen > 0)][0])}")
    return chosen.reciprocal().contiguous()


def banned_ids(banned: Banned, vocabulary: int, device: torch.device, offset: int = 0) -> Tensor | None:
    """Sorted distinct ids relative to `offset` that lie in [0, vocabulary), int64, or None if there are none.

    A sequence or a CPU tensor costs no synchronisation; the result is cached by value.
    """
    if banned is None or len(banned) == 0:
        return None
    ids = tuple(banned.tolist() if isinstance(banned, Tensor) else (int(token) for token in banned))
    return _banned_ids(ids, vocabulary, str(device), offset)


@lru_cache(maxsize=32)
def _banned_ids(ids: tuple[int, ...], vocabulary: int, device: str, offset: int) -> Tensor | None:
    if min(ids) < 0:
        raise ValueError(f"banned ids must be at least 0, got {min(ids)}")
    local = sorted({token - offset for token in ids if offset <= token < offset + vocabulary})
    return torch.tensor(local, dtype=torch.int64, device=device) if local else None
