"""Learner ranks: the process group, FSDP2 sharding, and how batches and weights move between ranks.

Without ``torchrun`` there is one process, no process group and no sharding; the same code runs.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from headrace.records import StepBatch
from headrace.wire import pack, unpack

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1  # Linux: signal the process when its parent ends


class EchoError(ValueError):
    """Another rank failed; that one tells the user."""

    on_every_rank = True


@dataclass(frozen=True, slots=True)
class Parallel:
    """This process among the learner ranks."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    store: dist.Store | None = None
    """Of the launcher, shared with ranks that do not learn."""

    @property
    def is_learner(self) -> bool:
        """False for a rank that looks after a server."""
        return self.rank < self.world_size

    @property
    def is_main(self) -> bool:
        """Rank 0: owns the controller, the journal and everything on disk."""
        return self.rank == 0

    def gather_rows(self, vector: Tensor) -> Tensor:
        """The equally long vectors [K] of all ranks as [world_size, K], in rank order."""
        if self.world_size == 1:
            return vector[None]
        rows = [torch.empty_like(vector) for _ in range(self.world_size)]
        dist.all_gather(rows, vector)
        return torch.stack(rows)

    def add_up(self, values: np.ndarray) -> np.ndarray:
        """The sum of all ranks' arrays of one shape; exact where all but one rank hold zeros."""
        if self.world_size == 1:
            return values
        total = torch.from_numpy(values.copy())
        dist.all_reduce(total)
        return total.numpy()

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Rank 0's bytes on every rank."""
        if self.world_size == 1:
            assert payload is not None
            return payload
        length = torch.tensor([len(payload) if payload is not None else 0])
        dist.broadcast(length, src=0)
        buffer = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(int(length), dtype=torch.uint8)
        if int(length):
            dist.broadcast(buffer, src=0)
        return buffer.numpy().tobytes()

    def broadcast_json(self, value: Any) -> Any:
        """Rank 0's JSON value on every rank."""
        return json.loads(self.broadcast_bytes(json.dumps(value).encode() if self.is_main else None))

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's JSON value on every rank, in rank order."""
        payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = self.gather_rows(torch.tensor([len(payload)])).flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(payload)] = payload
        rows = self.gather_rows(padded)
        return [json.loads(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths, strict=True)]

    def broadcast_batch(self, batch: StepBatch | None) -> StepBatch:
        """Rank 0's batch on every rank; the others pass None."""
        if self.world_size == 1:
            assert batch is not None
            return batch
        return unpack(self.broadcast_bytes(pack(batch) if batch is not None else None), StepBatch)

    def run_on_main(self, action: Callable[[], None]) -> None:
        """Run ``action`` on rank 0 while the others wait; if it fails, every rank fails, instead of waiting for ever.

        Raises:
            Exception: what the action raised, on rank 0; an EchoError with its text elsewhere.
        """
        failure: Exception | None = None
        if self.is_main:
            try:
                action()
            except Exception as error:
                failure = error
        text = self.broadcast_json(None if failure is None else str(failure))
        if failure is not None:
            raise failure
        if text is not None:
            raise EchoError(f"rank 0 failed: {text}")

    def run_everywhere(self, action: Callable[[], T]) -> list[T]:
        """Run ``action`` on every rank and hand all of them the results, which are JSON, in rank order; if one fails, all fail.

        Raises:
            Exception: what the action raised, on ranks where it did; elsewhere an EchoError with the text of the first that failed.
        """
        failure: Exception | None = None
        result = None
        try:
            result = action()
        except Exception as error:
            failure = error
        outcomes = self.gather_json([None if failure is None else str(failure), result if failure is None else None])
        if failure is not None:
            raise failure
        for rank, (text, _) in enumerate(outcomes):
            if text is not None:
                raise EchoError(f"rank {rank} failed: {text}")
        return [value for _, value in outcomes]


def of_policy(policy: nn.Module) -> Parallel:
    """The ranks that share a policy: all of them when it is sharded, else this process alone."""
    device = next(policy.parameters()).device
    return Parallel(dist.get_rank(), dist.get_world_size(), device) if isinstance(policy, FSDPModule) else Parallel(device=device)


def start(rollout_ranks: int = 0, deadline: float = 3600.0) -> Parallel:
    """Join the learners that ``torchrun`` started, or be the only one.

    Args:
        rollout_ranks: last ranks of the launcher that are no learners; they join no process group.
        deadline: seconds after which a collective that some rank never joins ends in an error instead of a hang.

    Raises:
        ValueError: the launcher has too few ranks.
    """
    cuda = torch.cuda.is_available()
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        if rollout_ranks:
            raise ValueError(f"engine.rollout_ranks = {rollout_ranks} needs torchrun with more ranks than that")
        return Parallel(device=torch.device("cuda" if cuda else "cpu"))
    _stop_with_parent()
    store, rank, ranks = next(iter(dist.rendezvous("env://")))
    learners = ranks - rollout_ranks
    if learners < 1:
        raise ValueError(f"engine.rollout_ranks = {rollout_ranks} leaves no learner among {ranks} ranks")
    if rank >= learners:
        return Parallel(rank, learners, store=store)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    wait = timedelta(seconds=deadline)
    dist.init_process_group(backend, store=dist.PrefixStore("learners", store), rank=rank, world_size=learners, timeout=wait)
    return Parallel(rank, learners, device, store)


def _stop_with_parent() -> None:
    """Ask Linux for a SIGTERM when ``torchrun`` is gone, so that no rank trains on alone; a run that is going saves and ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def meet() -> None:
    """Wait for all ranks, so that none leaves the group while another still talks to it."""
    if dist.is_initialized():
        dist.barrier()


def stop() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------ model


def full_tensor(tensor: Tensor) -> Tensor:
    """A parameter with all its shards; collective for a sharded one."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter; all of an unsharded one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def gather_full_weights(policy: nn.Module, target: nn.Module | None) -> None:
    """Copy what is trained into ``target``, an unsharded policy on rank 0 that was loaded from the same directory (None elsewhere).

    One parameter at a time, so the extra memory is one gathered tensor. Collective: every rank calls it.
    """
    wanted = dict(target.named_parameters()) if target is not None else {}
    for name, parameter in policy.named_parameters():
        if not parameter.requires_grad:
            continue
        full = full_tensor(parameter)
        if target is not None:
            wanted[name].copy_(full)
