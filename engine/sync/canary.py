"""The canary: one fixed sequence scored by the learner and by a server tells whether both have the same weights.

Transfers can go wrong in ways that no checksum sees: a layer that keeps a packed copy of its old weights, a name that lands in the
wrong place. Their log-probs then differ by whole nats, far above what two implementations differ by.

A server that was just started has the learner's weights from disk, so agreement after its first sync would prove nothing.
It first gets weights that were shifted by one element: only if those arrived does it agree.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from headrace.sync.source import parameters_of

LENGTH = 48
"""Tokens of the sequence: more than two blocks of a server's key-value cache, so that a stale prefix cache shows."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}
"""Root mean square difference in nats up to which two implementations agree. Measured: 3e-6 in float32, 0.03-0.06 in bfloat16."""
_STRIDE = 7919  # a prime: neighbours in the sequence are no neighbours in the vocabulary


def sequence(vocab_size: int, avoid: Sequence[int] = ()) -> list[int]:
    """The fixed token ids, spread over the vocabulary's lower half, where tokenizers keep plain text, without ``avoid``."""
    allowed = [token for token in range(max(1, vocab_size // 2)) if token not in set(avoid)]
    return [allowed[(position + 1) * _STRIDE % len(allowed)] for position in range(LENGTH)]


def gap(learner: Sequence[float], server: Sequence[float]) -> float:
    """Root mean square difference of two lists of log-probs in nats; infinite if lengths differ or a value is not finite."""
    if len(learner) != len(server):
        return math.inf
    square = sum((one - other) ** 2 for one, other in zip(learner, server, strict=True)) / len(learner)
    return math.sqrt(square) if math.isfinite(square) else math.inf


@contextmanager
def shifted(policy: nn.Module) -> Iterator[None]:
    """Inside, every parameter is shifted by one element along its memory; afterwards all bits are as before.

    Each rank shifts its own shards, which needs no communication and the memory of one shard.
    """
    reshard(policy)
    shards = parameters_of(policy)
    done: list[Tensor] = []
    try:
        for shard in shards:
            _shift(shard, 1)
            done.append(shard)
        yield
    finally:
        reshard(policy)
        for shard in done:
            _shift(shard, -1)


@torch.no_grad()
def _shift(shard: Tensor, by: int) -> None:
    shard.copy_(shard.flatten().roll(by).view_as(shard))


def reshard(policy: nn.Module) -> None:
    """Drop the whole parameters that FSDP keeps of its root after a forward pass: they are copies of the shards as they were."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
