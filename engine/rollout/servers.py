"""The vLLM servers of a run: started on rank 0's host, looked after by ranks of their own, or running already.

With ``engine.rollout_ranks`` the last ranks of ``torchrun`` supervise servers and never touch a GPU themselves, so that the crash of a
server is an event and not the end of the launcher's world. They meet rank 0 in the launcher's store and share no process group with the
learners: nobody can hang on a collective with them.
"""

import ipaddress
import json
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from torch.distributed import DistNetworkError, PrefixStore, Store

from headrace.config import Config, ConfigError, VLLMEngineConfig
from headrace.encoding import Encoder
from headrace.records import EngineDown
from headrace.sampling.vllm.channel import write_settings
from headrace.sampling.vllm.check import check_servers
from headrace.sampling.vllm.control import Control
from headrace.sampling.vllm.server import LOOPBACK, Server
from headrace.sampling.vllm.supervisor import Supervisor
from headrace.starting_model import encoder_of

_POLL_SECONDS = 1.0
_NOTICE_SECONDS = 3.0
"""Within this time a supervisor notices that its server died."""


class Servers(Protocol):
    """The servers as rank 0 sees them."""

    @property
    def urls(self) -> list[str]:
        """Addresses; they stay the same."""
        ...

    def generations(self) -> tuple[int, ...]:
        """How often each server was started again: one that was has lost its weights.

        Raises:
            EngineDown: a server is down for good.
        """
        ...

    def close(self) -> None:
        """Stop those that the run started."""
        ...


class NamedServers:
    """Servers that somebody else looks after."""

    def __init__(self, urls: tuple[str, ...]) -> None:
        self.urls = [url.rstrip("/") for url in urls]

    def generations(self) -> tuple[int, ...]:
        return (0,) * len(self.urls)

    def close(self) -> None:
        """They go on."""


class OwnServers:
    """Servers on this host, as children of this process."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self.urls = supervisor.urls

    def generations(self) -> tuple[int, ...]:
        self._supervisor.check()
        return tuple(self._supervisor.generation(url) for url in self.urls)

    def close(self) -> None:
        self._supervisor.close()


class RankServers:
    """Servers that ranks of the launcher look after, on any host."""

    def __init__(self, store: Store, config: VLLMEngineConfig, model: Path) -> None:
        """Say which model is to be served, and wait until every server answers.

        Raises:
            EngineDown: some did not come up in time; the message names their ranks.
        """
        self._store = _store(store)
        self._keys = [f"server/{number}" for number in range(config.rollout_ranks // config.tensor_parallel)]
        self._store.set("model", str(model))
        give_up = time.monotonic() + config.start_deadline
        while missing := [key for key in self._keys if not self._store.check([key])]:
            if time.monotonic() > give_up:
                raise EngineDown(f"no word from {', '.join(missing)} of {len(self._keys)} after {config.start_deadline:.0f} s")
            time.sleep(_POLL_SECONDS)
        self.urls = [state["url"] for state in self._states()]

    def generations(self) -> tuple[int, ...]:
        states = self._states()
        failed = next((state["failed"] for state in states if state["failed"]), None)
        if failed:
            raise EngineDown(failed)
        return tuple(state["generation"] for state in states)

    def close(self) -> None:
        self._store.set("stop", "1")

    def _states(self) -> list[dict[str, Any]]:
        return [json.loads(self._store.get(key)) for key in self._keys]


def wait_until_back(servers: Servers, controls: Sequence[Control], deadline: float) -> None:
    """After a failure: wait until every server answers, those that had died included.

    Raises:
        EngineDown: one is down for good, or did not come back within ``deadline`` seconds.
    """
    give_up = time.monotonic() + deadline
    time.sleep(_NOTICE_SECONDS)
    while silent := [control.name for control in controls if not _answers(control)]:
        servers.generations()
        if time.monotonic() > give_up:
            raise EngineDown(f"{', '.join(silent)} did not come back within {deadline:.0f} s")
        time.sleep(_POLL_SECONDS)


def _answers(control: Control) -> bool:
    try:
        control.paused()
    except EngineDown:
        return False
    return True


# ------------------------------------------------------------------------------------------------------ starting


def start_servers(config: Config, engine: VLLMEngineConfig, model: Path, encoder: Encoder, store: Store | None) -> Servers:
    """The servers of a run; blocks until they answer.

    Args:
        model: directory of the starting policy.
        store: of the launcher, which ``rollout_ranks`` need.

    Raises:
        ConfigError: a named server cannot do what a run needs.
        EngineDown: a server does not start; the message holds the end of its log.
    """
    if engine.urls:
        check_servers(engine.urls, encoder, engine)
        return NamedServers(engine.urls)
    if engine.rollout_ranks:
        assert store is not None, "rollout ranks were told apart in the launcher's store"
        return RankServers(store, engine, model)
    folder, settings = _settings(config, encoder)
    own = [_server(config, engine, model, folder, settings, index=i, servers=engine.servers) for i in range(engine.servers)]
    supervisor = Supervisor(own)
    supervisor.start()
    return OwnServers(supervisor)


def serve(config: Config, engine: VLLMEngineConfig, number: int, store: Store) -> None:
    """Life of rollout rank ``number``, counted from the first: look after a server until rank 0 says stop.

    With tensor parallelism the first of each ``tensor_parallel`` ranks does, for the GPUs of all of them; the others wait.

    Raises:
        EngineDown: the server does not start.
    """
    meeting = _store(store)
    supervisor = None
    if number % engine.tensor_parallel == 0:
        model = Path(_wait_for(meeting, "model", engine.start_deadline, "rank 0 to make the starting model"))
        folder, settings = _settings(config, encoder_of(model, config))
        first = int(os.environ.get("LOCAL_RANK", "0"))
        server = _server(
            config,
            engine,
            model,
            folder,
            settings,
            index=number // engine.tensor_parallel,
            servers=int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // engine.tensor_parallel,
            host=_own_address(),
            devices=_visible_devices()[first : first + engine.tensor_parallel] or None,
        )
        supervisor = Supervisor([server])
        supervisor.start()
    try:
        while not meeting.check(["stop"]):
            if supervisor is not None:
                (url,) = supervisor.urls
                state = {"url": url, "generation": supervisor.generation(url), "failed": supervisor.failed}
                meeting.set(f"server/{number // engine.tensor_parallel}", json.dumps(state))
            time.sleep(_POLL_SECONDS)
    except DistNetworkError:
        pass  # the launcher is gone, and the learners with it
    finally:
        if supervisor is not None:
            supervisor.close()


def _store(store: Store) -> PrefixStore:
    return PrefixStore("rollouts", store)


def _wait_for(store: Store, key: str, deadline: float, what: str) -> str:
    try:
        store.wait([key], timedelta(seconds=deadline))
    except RuntimeError:
        raise EngineDown(f"waited {deadline:.0f} s for {what}") from None
    return store.get(key).decode()


def _settings(config: Config, encoder: Encoder) -> tuple[Path, Path]:
    """Folder of the servers' logs and the processor's settings in it."""
    folder = config.run_folder / "servers"
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / f"processor-{os.getpid()}.json"
    write_settings(encoder, settings)
    return folder, settings


def _server(config: Config, engine: VLLMEngineConfig, model: Path, folder: Path, settings: Path, **where: Any) -> Server:
    context = config.questions.max_prompt_tokens + config.sampling.max_tokens
    return Server(model, engine, dtype=engine.dtype or config.model.dtype, max_model_len=context, settings=settings, folder=folder, **where)


def _visible_devices() -> list[str]:
    """GPUs of this host as the launcher shows them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]


def _own_address() -> str:
    """Address of this host on the launcher's network; loopback where all ranks share a host."""
    master = os.environ.get("MASTER_ADDR", LOOPBACK)
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == int(os.environ.get("WORLD_SIZE", "1")):
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing: it only chooses the interface
        address: str = probe.getsockname()[0]
    if not ipaddress.ip_address(address).is_private:
        raise ConfigError(f"engine: the servers would listen on {address}, which is public; their routes for weights have no password")
    return address
