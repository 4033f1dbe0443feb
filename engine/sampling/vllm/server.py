"""Stock vLLM servers as child processes: started, watched, restarted, and never left behind."""

import contextlib
import logging
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from headrace.config import VLLMEngineConfig
from headrace.records import EngineDown
from headrace.sampling.vllm import guard
from headrace.sampling.vllm.faults import NotStarted
from headrace.sampling.vllm.launch import command, environment, free_port, require_vllm, served_tokenizer

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
STALL_SECONDS = 120.0
"""Without an answer from its engine a server is taken for hung. Loading a large model's weights may block it for a minute."""
_PROBE_SECONDS = 1.0
_PORT_TRIES = 5
_WINDOW_SECONDS = 600.0
_TAIL_LINES = 15


class Server:
    """One server with its guard, log and port.

    ``start`` blocks until it answers; ``stop`` until all of its processes are gone. If this process dies, the guard stops the server.
    A restarted server keeps its address, so that clients in other processes find it again.
    """

    def __init__(
        self,
        model: Path,
        config: VLLMEngineConfig,
        *,
        dtype: str,
        max_model_len: int,
        settings: Path,
        folder: Path,
        index: int = 0,
        host: str = LOOPBACK,
        servers: int = 1,
        devices: Sequence[str] | None = None,
    ) -> None:
        """Args:
        model: directory of the model.
        dtype: of its weights, ``float32`` or ``bfloat16``.
        max_model_len: tokens of prompt and response together.
        settings: the processor's (``channel.write_settings``).
        folder: takes the log, ``server-INDEX.log``.
        host: address to listen at; other than loopback only on a network that the run alone uses.
        servers: how many share this machine.
        devices: its GPUs, as in ``CUDA_VISIBLE_DEVICES``.

        Raises:
            ConfigError: vLLM is not installed.
        """
        require_vllm()
        self.model, self.config = model, config
        self.index, self.host = index, host
        self.max_model_len = max_model_len
        self.log = folder / f"server-{index}.log"
        self.port: int | None = None
        self.pid: int | None = None
        """Of the API server, which is the leader of its processes' group."""
        self._options = {"dtype": dtype, "max_model_len": max_model_len, "settings": settings}
        self._folder = folder
        self._environment = environment(os.environ, servers=servers, devices=devices)
        self._guard: subprocess.Popen[bytes] | None = None
        self._offset = 0

    @property
    def url(self) -> str:
        """Its address; known from the first start on."""
        return f"http://{self.host}:{self.port}"

    def start(self, cancelled: threading.Event | None = None) -> None:
        """Start it and wait until it answers.

        Raises:
            NotStarted: it ended, or did not answer within ``engine.start_deadline``; the message holds the end of its log.
        """
        fixed = self.port
        for tries_left in reversed(range(_PORT_TRIES)):
            self.port = fixed or free_port(self.host)
            self._launch()
            try:
                self._wait(cancelled or threading.Event())
                return
            except BaseException as error:
                self.stop()
                taken = isinstance(error, NotStarted) and "Address already in use" in self.tail()
                if not (taken and tries_left):
                    raise
                time.sleep(1.0 if fixed else 0.0)

    def alive(self) -> bool:
        """Whether its process runs."""
        return self._guard is not None and self._guard.poll() is None

    def stop(self) -> None:
        """End it with all of its processes; blocks until they are gone."""
        process, self._guard = self._guard, None
        if process is None:
            return
        process.terminate()
        try:
            code = process.wait(guard.GRACE_SECONDS + guard.REAP_SECONDS + 5)
        except subprocess.TimeoutExpired:
            code = -1
            process.kill()
            process.wait()
        if code < 0 and self.pid is not None:  # the guard was killed: its work is left to do
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self.pid = None

    def tail(self, lines: int = _TAIL_LINES) -> str:
        """The last lines that it logged since its last start."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(self._offset)
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
        return ""

    def _launch(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        assert self.port is not None
        self._name = f"headrace-{secrets.token_hex(8)}"  # tells it from another server that took the port
        tokenizer = served_tokenizer(self.model, self._folder / "tokenizer")
        line = command(self.model, self.config, name=self._name, host=self.host, port=self.port, tokenizer=tokenizer, **self._options)
        reading, writing = os.pipe()
        with self.log.open("ab") as output:
            self._offset = output.tell()
            self._guard = subprocess.Popen(
                [sys.executable, "-I", guard.__file__, str(os.getpid()), str(writing), *line],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment,
                pass_fds=[writing],
                start_new_session=True,  # Ctrl-C is the run's to handle
            )
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            ready, _, _ = select.select([pipe], [], [], 30)
            given = pipe.readline() if ready else b""
        self.pid = int(given) if given else None

    def _wait(self, cancelled: threading.Event) -> None:
        """Until it answers under its name."""
        end = time.monotonic() + self.config.start_deadline
        with httpx.Client(base_url=self.url, timeout=2.0, trust_env=False) as client:
            while not cancelled.wait(0.1):
                if not self.alive():
                    assert self._guard is not None
                    raise NotStarted(self.report(f"ended with exit code {self._guard.returncode} before it answered"))
                with contextlib.suppress(httpx.HTTPError):
                    if client.get("/health").status_code == 200:
                        names = [model["id"] for model in client.get("/v1/models").json()["data"]]
                        if self._name in names:
                            return
                if time.monotonic() > end:
                    raise NotStarted(self.report(f"did not answer within {self.config.start_deadline:.0f} s (engine.start_deadline)"))
        raise NotStarted(f"vLLM server {self.index}: its start was called off")

    def report(self, what: str) -> str:
        """What happened to it, the last error it logged, and the end of its log."""
        errors = [line for line in self.tail(400).splitlines() if "Error" in line]
        cause = f": {errors[-1].strip()[:300]}" if errors else ""
        return f"vLLM server {self.index} {what}{cause}; the last lines of {self.log}:\n{self.tail()}"


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
