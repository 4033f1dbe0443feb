"""The learner's weights as a stream: names as in a checkpoint, whole tensors in the servers' type, layer after layer."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

WRAPPERS = frozenset(("_orig_mod", "_checkpoint_wrapped_module", "module"))
"""Parts of a parameter's name that torch.compile, activation checkpointing and DDP put in."""
ALIGNMENT = 64  # bytes; a tensor that starts at a cache line can be viewed as any type


class NamedWeights(Protocol):
    """Live tensors by name, tied ones under each of theirs; ``merge`` False is for shapes alone and must not be collective."""

    def __call__(self, *, merge: bool) -> Iterable[tuple[str, Tensor]]: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the stream, before anything is gathered."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class WeightSource:
    """Every weight of a model once, in layer order, under the name that a checkpoint of it has.

    Iterating is collective for a sharded model: all ranks must take every item. The local shard is cast before the gather, so that
    bfloat16 servers cost half the traffic of float32 masters.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, named_weights: NamedWeights | None = None) -> None:
        """``named_weights``: the model's weights where they are not its parameters, as with adapters."""
        self.model = model
        self.dtype = dtype
        self._named_weights = named_weights or (lambda *, merge: model.state_dict(keep_vars=True).items())
        self._pass: Iterator[tuple[str, Tensor]] | None = None

    def entries(self) -> list[Entry]:
        """What a pass will yield, in its order. Not collective; nothing is gathered."""
        found = []
        for name, tensor in self._tensors(merge=False):
            empty = torch.empty(tensor.shape, dtype=self._type(tensor), device="meta")
            found += [Entry(key, part.dtype, tuple(part.shape)) for key, part in self._as_saved(name, empty)]
        return found

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor; a fresh pass each time."""
        self._pass = self._gather()
        return self._pass

    def drain(self) -> None:
        """Take the rest of the pass that is going on, so that the other ranks are not left waiting in a gather."""
        for _ in self._pass if self._pass is not None else self:
            pass
        self._pass = None

    @torch.no_grad()
    def _gather(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors(merge=True):
            cast = tensor.detach().to(self._type(tensor))
            yield from self._as_saved(name, cast.full_tensor() if isinstance(cast, DTensor) else cast)
        self._pass = iter(())

    def _tensors(self, merge: bool) -> Iterator[tuple[str, Tensor]]:
        """Parameters and saved buffers; of tied ones the first, which is the embedding."""
        seen: set[int] = set()
        for name, tensor in self._named_weights(merge=merge):
            if id(tensor) not in seen:
                if isinstance(tensor, nn.Parameter):  # lives on, so that its id stays its own
                    seen.add(id(tensor))
                yield ".".join(part for part in name.split(".") if part not in WRAPPERS), tensor

    def _type(self, tensor: Tensor) -> torch.dtype:
        return self.dtype if tensor.is_floating_point() else tensor.dtype

    def _as_saved(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """What ``save_pretrained`` makes of a tensor: mostly itself, renamed where the model class has its own names."""
        return list(revert_weight_conversion(self.model, {name: tensor}).items())


def buckets(entries: Sequence[Entry], limit: int) -> list[list[Entry]]:
    """Consecutive entries of at most ``limit`` bytes together; a larger tensor is a bucket of its own."""
    parts: list[list[Entry]] = []
    size = 0
    for entry in entries:
        if not parts or size + entry.nbytes > limit:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += aligned(entry.nbytes)
    return parts


def aligned(size: int) -> int:
    """``size`` up to the next multiple of the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a tensor on the CPU, row by row."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def type_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def parameters_of(model: nn.Module) -> list[Tensor]:
    """This rank's part of every floating-point parameter, tied ones once."""
    return [
        parameter.to_local() if isinstance(parameter, DTensor) else parameter
        for parameter in model.parameters()
        if parameter.is_floating_point()
    ]
