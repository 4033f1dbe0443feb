"""A stock vLLM server as a child process: started with its guard, stopped, and never left behind."""

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from headrace.config import VLLMEngineConfig
from headrace.records import EngineDown
from headrace.sampling.vllm import guard
from headrace.sampling.vllm.launch import command, environment, free_port, require_vllm, served_tokenizer

LOOPBACK = "127.0.0.1"
_PORT_TRIES = 5
_TAIL_LINES = 15


class NotStarted(EngineDown):
    """A server did not come up."""


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
