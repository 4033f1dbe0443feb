"""One push of the learner's weights to running vLLM servers, from pause to proof.

The order, on every server at once::

    pause (running requests freeze, every cache is emptied)
    abandon what an earlier, broken push left half done
    start · send the buckets · coverage: every parameter of the server's model is filled · finish with the new version's label
    queue the canary · resume
    canary: learner and server score one sequence alike

vLLM schedules nothing while it is paused, so the canary waits in the queue, before all others, and is in the first batch that the new
weights see. If it fails, running requests are aborted and the server is paused again.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from headrace.config import VLLMEngineConfig
from headrace.records import TRIAL
from headrace.sync import canary
from headrace.sync.nccl import NcclTransport
from headrace.sync.servers import Server, SyncError, begin_on_each, on_each
from headrace.sync.shared_memory import SharedMemoryTransport
from headrace.sync.source import NamedWeights, WeightSource

TRANSPORTS: dict[str, Callable[[WeightSource, int, float], Any]] = {"nccl": NcclTransport, "shm": SharedMemoryTransport}
DEADLINE = 600.0
"""Seconds any one thing may take on the servers."""
QUEUE_SECONDS = 0.02
"""Time for the canary to enter the queue. One that comes later waits for a free place on a busy server, and is right all the same."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What a push did."""

    version: int
    seconds: float
    """From pause to the last canary, with the trial of new servers."""
    paused: float
    """Seconds the servers stood still for the weights of this version."""
    bytes: int
    """Of one copy of the weights."""
    canary_gap: float
    """Largest over the servers: root mean square difference of log-probs, nats."""

    @property
    def gigabytes_per_second(self) -> float:
        """One copy of the weights over the time that the servers stood still."""
        return self.bytes / self.paused / 1e9

    def metrics(self) -> dict[str, float]:
        """For the journal."""
        return {
            "sync/seconds": self.seconds,
            "sync/paused": self.paused,
            "sync/megabytes": self.bytes / 1e6,
            "sync/gigabytes_per_second": self.gigabytes_per_second,
            "sync/canary_gap": self.canary_gap,
        }


class Ranks(Protocol):
    """What a push needs from the learner's process group."""

    @property
    def is_main(self) -> bool: ...

    def broadcast_json(self, value: Any) -> Any: ...


class WeightSync:
    """Pushes a policy's weights. Lives on every learner rank; rank 0 alone talks to servers.

    A server may be given requests once ``push`` has returned; after a restart it has the disk's weights until the next push.

    Args:
        policy: holds the Hugging Face model as ``policy.model``; sharded or whole.
        servers: on rank 0 the servers as they are now, asked at each push.
        score: collective; log-probs [L - 1] of the tokens after the first under the policy, at temperature 1, nothing banned.
        named_weights: of the model, where they are not its parameters.
        deadline: seconds any one thing may take on the servers.
    """

    def __init__(
        self,
        policy: nn.Module,
        servers: Callable[[], Sequence[Server]] | None,
        config: VLLMEngineConfig,
        ranks: Ranks,
        score: Callable[[Sequence[int]], Sequence[float]],
        named_weights: NamedWeights | None = None,
        deadline: float = DEADLINE,
    ) -> None:
        model: Any = policy.model
        self.policy = policy
        self.servers = servers
        self.ranks = ranks
        self.score = score
        self.deadline = deadline
        dtype = config.dtype or model.config.dtype
        self.dtype: torch.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        self.source = WeightSource(model, self.dtype, named_weights)
        self.version: int | None = None
        """The last version that was proven on every server."""
        self._tokens = canary.sequence(model.get_input_embeddings().weight.shape[0], _special_ids(model.config))
        self._proven: dict[str, int] = {}
        self._connected: dict[str, int] = {}
        self._transport: Any = None
        if ranks.is_main:
            kind = config.transport or ("nccl" if torch.cuda.is_available() else "shm")
            self._transport = TRANSPORTS[kind](self.source, config.bucket_mib << 20, deadline)

    def push(self, version: int) -> SyncReport:
        """Give every server the weights as they are now, under the label ``version``. Collective.

        A server that is new, or new since its last push, first gets shifted weights and must prove that it took them.

        Raises:
            SyncError: on every rank; servers stay paused on unknown weights, and ``version`` is not changed.
        """
        begun = time.perf_counter()
        servers: list[Server] = []
        fresh: list[Server] = []

        def look() -> int:
            servers.extend(self.servers() if self.servers is not None else ())
            fresh.extend(server for server in servers if self._proven.get(server.name) != server.generation)
            return len(fresh)

        if self._from_main("asking for the servers", look):
            with canary.shifted(self.policy):
                self._transfer(fresh, TRIAL)
        paused, sent, gap = self._transfer(servers, str(version))
        self._proven = {server.name: server.generation for server in servers}
        self.version = version
        return SyncReport(version, time.perf_counter() - begun, paused, sent, gap)

    def close(self) -> None:
        """Give back what the transport holds."""
        if self._transport is not None:
            self._transport.close()

    # ------------------------------------------------------------------------------------------------- one transfer

    def _transfer(self, servers: Sequence[Server], label: str) -> tuple[float, int, float]:
        """Seconds of standstill, bytes and canary gap of one transfer; rank 0's on every rank."""
        expected = self.score(self._tokens)
        canary.reshard(self.policy)

        def drive() -> tuple[float, int, float]:
            try:
                return self._drive(servers, label, expected)
            except Exception:
                self._proven = {}
                self.source.drain()  # the other ranks gather to the end
                raise

        if not self.ranks.is_main:
            self.source.drain()
        paused, sent, gap = self._from_main(f"weights {label!r}", drive)
        return paused, sent, gap

    def _from_main(self, what: str, work: Callable[[], Any]) -> Any:
        """The JSON result of ``work`` on rank 0, on every rank; or a SyncError on every rank."""
        outcome: Any = None
        failure: Exception | None = None
        if self.ranks.is_main:
            try:
                outcome = work()
            except Exception as error:
                failure = error
        text = None if failure is None else str(failure) if isinstance(failure, SyncError) else f"{type(failure).__name__}: {failure}"
        outcome, text = self.ranks.broadcast_json((outcome, text))
        if text is not None:
            raise SyncError(f"{what}: {text}") from failure
        return outcome

    def _drive(self, servers: Sequence[Server], label: str, expected: Sequence[float]) -> tuple[float, int, float]:
        """Rank 0's part of a transfer."""
        begun = time.perf_counter()
        self._each(servers, "pausing", lambda server: server.pause("keep"))
        self._each(servers, "leaving an earlier update", lambda server: server.call_workers("headrace_abandon"))
        wanted = {server.name: server.generation for server in servers}
        if wanted != self._connected:
            self._connected = {}
            self._transport.connect(servers)
            self._connected = wanted
        self._each(servers, "starting the update", lambda server: server.start_weight_update())
        try:
            sent = self._transport.send(servers)
        except Exception:
            self._connected = {}
            raise
        for server, reports in zip(servers, self._each(servers, "coverage", lambda s: s.call_workers("headrace_coverage")), strict=True):
            _check_coverage(server.name, reports)
        self._each(servers, "finishing the update", lambda server: server.finish_weight_update(label))
        scores = begin_on_each(servers, "scoring the canary", lambda server: server.score(self._tokens), self.deadline)
        time.sleep(QUEUE_SECONDS)
        try:
            self._each(servers, "resuming", lambda server: server.resume())
            paused = time.perf_counter() - begun
            return paused, sent, self._check_canary(servers, expected, scores())
        except SyncError:
            with suppress(SyncError):  # one that cannot be paused any more is not what went wrong first
                self._each(servers, "pausing", lambda server: server.pause("abort"))
            raise

    def _check_canary(self, servers: Sequence[Server], expected: Sequence[float], scores: Sequence[Sequence[float]]) -> float:
        """The largest gap; raises SyncError where it is too large."""
        gaps = [canary.gap(expected, found) for found in scores]
        worst = max(range(len(servers)), key=lambda index: gaps[index])
        if not gaps[worst] <= canary.TOLERANCE[self.dtype]:
            raise SyncError(
                f"{servers[worst].name}: its log-probs of the canary differ by {gaps[worst]:.3g} nats from the learner's, "
                f"allowed are {canary.TOLERANCE[self.dtype]:g}: it does not have the weights that were sent"
            )
        return gaps[worst]

    def _each(self, servers: Sequence[Server], what: str, call: Callable[[Server], Any]) -> list[Any]:
        return on_each(servers, what, call, self.deadline)


def _check_coverage(name: str, reports: Sequence[dict[str, Any]]) -> None:
    missing = sorted({parameter for report in reports for parameter in report["missing"]})
    if missing:
        shown = ", ".join(missing[:3])
        raise SyncError(f"{name}: {len(missing)} parameters of its model got no weights, or not all of them: {shown}")


def _special_ids(config: Any) -> list[int]:
    """Token ids that stand for something other than text: pictures, videos, ends."""
    ids: list[int] = []
    for part in (config, config.get_text_config()):
        for key, value in part.to_dict().items():
            if key.endswith("_token_id") and value is not None:
                ids += value if isinstance(value, list) else [value]
    return ids
