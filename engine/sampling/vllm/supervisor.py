"""Keeps servers alive: watches them, starts them again when they die or hang, gives up when that happens too often."""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from headrace.records import EngineDown
from headrace.sampling.vllm.server import NotStarted, Server

log = logging.getLogger(__name__)

STALL_SECONDS = 120.0
"""Without an answer from its engine a server is taken for hung. Loading a large model's weights may block it for a minute."""
_PROBE_SECONDS = 1.0
_WINDOW_SECONDS = 600.0


@dataclass
class _Slot:
    server: Server
    generation: int = 0
    """Starts after the first."""
    restarts: deque[float] = field(default_factory=deque)
    """When it was restarted, of the last ten minutes."""
    answered: float = 0.0


class Supervisor:
    """Keeps servers alive, each watched by a thread of its own.

    A server that died, or whose engine gave no answer for ``stall_seconds``, is started again at the same address, after a pause
    that doubles each time. It comes back with the weights on disk, hence paused: requests wait in it until new weights and
    ``resume`` come.
    After ``engine.max_restarts`` within ten minutes ``failed`` says why.
    """

    def __init__(self, servers: Sequence[Server], *, stall_seconds: float = STALL_SECONDS) -> None:
        self._slots = [_Slot(server) for server in servers]
        self._stall = stall_seconds
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self.failed: str | None = None

    def start(self) -> None:
        """Start all servers at once and wait until each answers.

        Raises:
            NotStarted: one does not; none is left running.
        """
        failures: list[BaseException] = []

        def start(slot: _Slot) -> None:
            try:
                slot.server.start(self._closing)
                slot.answered = time.monotonic()
            except BaseException as error:
                failures.append(error)
                self._closing.set()

        starting = [threading.Thread(target=start, args=(slot,), daemon=True) for slot in self._slots]
        try:
            for thread in starting:
                thread.start()
            for thread in starting:
                thread.join()
        except BaseException:
            self.close()
            raise
        if failures:
            self.close()
            raise failures[0]
        self._threads = [
            threading.Thread(target=self._keep, args=(slot,), name=f"server-{slot.server.index}", daemon=True) for slot in self._slots
        ]
        for thread in self._threads:
            thread.start()

    @property
    def urls(self) -> list[str]:
        """Addresses of the servers; they stay the same."""
        return [slot.server.url for slot in self._slots]

    def generation(self, url: str) -> int:
        """How often the server at this address was started again. One that was has the weights on disk, and waits for new ones."""
        return next(slot.generation for slot in self._slots if slot.server.url == url)

    def check(self) -> None:
        """Raise `EngineDown` if a server could not be kept alive."""
        if self.failed is not None:
            raise EngineDown(self.failed)

    def close(self) -> None:
        """Stop all servers."""
        self._closing.set()
        for thread in self._threads:
            thread.join()
        stopping = [threading.Thread(target=slot.server.stop) for slot in self._slots]
        for thread in stopping:
            thread.start()
        for thread in stopping:
            thread.join()

    def _keep(self, slot: _Slot) -> None:
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            while not self._closing.wait(_PROBE_SECONDS):
                trouble = self._trouble(slot, client)
                if trouble and not self._closing.is_set():
                    self._restart(slot, trouble, client)
                if self.failed is not None:
                    return

    def _trouble(self, slot: _Slot, client: httpx.Client) -> str | None:
        """What is wrong with a server, if anything."""
        server = slot.server
        if not server.alive():
            return "died"
        try:
            # Answered by the engine's own loop, where /health is answered for it.
            code = client.get(f"{server.url}/is_paused").status_code
        except httpx.ConnectError:
            return "closed its port"  # its engine died, and it hangs while it ends
        except httpx.HTTPError:
            code = None
        if code == 200:
            slot.answered = time.monotonic()
            return None
        if code is not None:
            return f"has no engine any more (HTTP {code})"
        silent = time.monotonic() - slot.answered
        return f"gave no answer for {silent:.0f} s" if silent > self._stall else None

    def _restart(self, slot: _Slot, trouble: str, client: httpx.Client) -> None:
        """Start it again until it runs, or until that was tried too often."""
        server = slot.server
        while not self._closing.is_set():
            server.stop()
            now = time.monotonic()
            while slot.restarts and now - slot.restarts[0] > _WINDOW_SECONDS:
                slot.restarts.popleft()
            limit = server.config.max_restarts
            if len(slot.restarts) >= limit:
                self.failed = server.report(f"{trouble}, and was restarted {len(slot.restarts)} times within ten minutes already")
                return
            slot.restarts.append(now)
            log.warning(
                "vLLM server %d at %s %s; it is started again (%d of %d)", server.index, server.url, trouble, len(slot.restarts), limit
            )
            if self._closing.wait(min(2.0 ** (len(slot.restarts) - 1), 30.0) - 1.0):
                return
            try:
                server.start(self._closing)
                client.post(f"{server.url}/pause", params={"mode": "keep", "clear_cache": True}, timeout=60).raise_for_status()
            except (NotStarted, httpx.HTTPError) as error:
                trouble = " ".join(str(error).split("\n")[0].split())
                continue
            slot.generation += 1
            slot.answered = time.monotonic()
            return
