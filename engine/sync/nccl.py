"""Weights through NCCL: vLLM's own trainer side, one group of the learner's rank 0 and every worker of every server.

Written against vLLM 0.32 and 0.33 and checked against their signatures; it has not run yet, since it needs two GPUs.
"""

import functools
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from headrace.sync.servers import Server, SyncError, on_each
from headrace.sync.source import WeightSource


class NcclTransport:
    """vLLM packs weights into two buffers of a bucket each: while one is broadcast, the next is gathered into the other."""

    def __init__(self, source: WeightSource, bucket_bytes: int, deadline: float) -> None:
        self.source = source
        self.bucket_bytes = bucket_bytes
        self.deadline = deadline
        self._trainer: Any = None

    def connect(self, servers: Sequence[Server]) -> None:
        """Form the group with exactly these servers; an earlier one is left.

        Raises:
            SyncError: vLLM is not installed here, or somebody did not join in time.
        """
        try:
            from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        except ImportError as error:
            raise SyncError(f"engine.transport = nccl needs vLLM in the learner's environment too: {error}") from None
        self.close()
        client = _Client(servers, self.deadline)
        address = _own_address(servers[0].name)
        info = NCCLTrainerInitInfo(
            rank=0,
            master_address=address,
            master_port=_free_port(address),
            world_size=1 + sum(client.world_sizes),
            packed=True,
            packed_buffer_size_bytes=self.bucket_bytes,
        )
        source = _as_vllm_source(self.source)
        self._trainer = _within(
            self.deadline,
            f"joining the weight group at {address}:{info.master_port}",
            lambda: WeightTransferTrainerFactory.trainer_init(info, client=client, source=source),
        )

    def send(self, servers: Sequence[Server]) -> int:
        """One pass over the source to the servers of the group; returns the bytes of it.

        Raises:
            SyncError: a server failed or went missing in a broadcast. The group is of no more use then; ``connect`` makes a new one.
        """
        trainer, self._trainer = self._trainer, None
        assert trainer is not None, "not connected"
        names = ", ".join(server.name for server in servers)
        _within(self.deadline, f"broadcasting weights to {names}", trainer.send_weights)
        self._trainer = trainer
        return sum(entry.nbytes for entry in self.source.entries())

    def close(self) -> None:
        """Leave the group."""
        if self._trainer is not None:
            self._trainer.shutdown()
            self._trainer = None


class _Client:
    """What vLLM's trainer side calls on the servers; starting and finishing an update is not its business here."""

    def __init__(self, servers: Sequence[Server], deadline: float) -> None:
        self.servers = servers
        self.deadline = deadline
        self.world_sizes = on_each(servers, "telling its world size", lambda server: server.world_size(), deadline)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Every server joins with the ranks after those of the servers before it."""
        offsets = {server.name: 1 + sum(self.world_sizes[:index]) for index, server in enumerate(self.servers)}
        on_each(
            self.servers,
            "joining the weight group",
            lambda server: server.init_weight_transfer_engine(init_info | {"rank_offset": offsets[server.name]}),
            self.deadline,
        )

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: Any) -> None:
        on_each(self.servers, "receiving weights", lambda server: server.update_weights(update_info), self.deadline)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass


def _as_vllm_source(source: WeightSource) -> Any:
    """``source`` as a subclass of the installed vLLM's ``WeightSource``: 0.33 renamed iteration and made metadata a property."""
    from vllm.distributed.weight_transfer import base

    def metadata(self: Any) -> list[Any]:
        return [base.ParamMeta(entry.name, entry.dtype, entry.shape) for entry in source.entries()]

    def tensors(self: Any) -> Iterator[tuple[str, Tensor]]:
        return iter(source)

    members: dict[str, Any]
    if hasattr(base.WeightSource, "iter_full"):
        members = {"metadata": functools.cached_property(metadata), "iter_full": tensors}
    else:
        members = {"metadata": metadata, "__iter__": tensors}
    return type("LearnerSource", (base.WeightSource,), members)()


def _within(deadline: float, what: str, work: Any) -> Any:
    """``work()`` in a thread that is left behind when it takes longer than ``deadline`` seconds: a broadcast to a dead peer never ends."""
    outcome: list[tuple[Any, Exception | None]] = []
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # a new thread starts at device 0
            outcome.append((work(), None))
        except Exception as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, name="sync-nccl", daemon=True)
    thread.start()
    thread.join(deadline)
    if not outcome:
        raise SyncError(f"{what} took longer than {deadline:g} s: a server or its GPU is gone; restart the servers")
    result, failure = outcome[0]
    if failure is not None:
        raise failure if isinstance(failure, SyncError) else SyncError(f"{what} failed ({failure})") from failure
    return result


def _own_address(url: str) -> str:
    """This machine's address as the server sees it; nothing is sent."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "127.0.0.1", parts.port or 80))
        return str(probe.getsockname()[0])


def _free_port(address: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
