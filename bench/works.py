"""Everything that can do an operation, by name: our implementations that run on a device, then the peers."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from headrace.bench.cases import Inputs, Rows, Size
from headrace.bench.operations import OPERATIONS, Operation, Results
from headrace.bench.peers import PEERS, Peer
from headrace.kernels.dispatch import available

OURS = {"cpu": ("native", "reference"), "cuda": ("cuda", "triton", "reference")}
"""By device type, the one that serves by default first."""


def ours(device: torch.device, reference: bool = False) -> tuple[str, ...]:
    """Implementations that run on a device; the reference only where there is no other, or on request: it is a definition and slow."""
    names = tuple(name for name in OURS[device.type] if available(name))
    return names if reference or len(names) == 1 else names[:-1]


def peers(operation: Operation, compiled: bool) -> list[Peer]:
    return [peer for peer in PEERS if peer.operation == operation.name and (compiled or not peer.compiles)]


def make(operation: Operation, size: Size, device: torch.device) -> Any:
    """Inputs of a size: fp32 on a CPU, bf16 on a GPU; logits are fp32 everywhere."""
    return Rows(size, device) if operation.makes is Rows else inputs_of(size, device)


@lru_cache(maxsize=1)
def inputs_of(size: Size, device: torch.device) -> Inputs:
    return Inputs(size, device, torch.bfloat16 if device.type == "cuda" else torch.float32)


def own_work(operation: Operation, implementation: str, made: Any) -> Callable[[], Results]:
    return lambda: operation.run(made, implementation)


def needs_compiling(operation_name: str, name: str) -> bool:
    return any(peer.compiles for peer in PEERS if (peer.operation, peer.name) == (operation_name, name))


def built(operation_name: str, name: str, size: Size, device: torch.device) -> Callable[[], Results]:
    """One piece of work, with inputs of its own."""
    operation = OPERATIONS[operation_name]
    made = make(operation, size, device)
    peer = next((peer for peer in PEERS if (peer.operation, peer.name) == (operation_name, name)), None)
    return own_work(operation, name, made) if peer is None else peer.build(made)
