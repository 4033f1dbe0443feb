"""The rollout side in a process of its own, beside the learner's: drawing never waits for a backward pass, nor the other way round.

The learner's rank 0 starts it and speaks to it over a private socket. Messages are ``wire`` bytes; a call has a number, and its answer
comes back under it, so drawing goes on while an evaluation runs. The process ends when the socket closes, also when its parent was killed.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace import wire
from headrace.config import Config
from headrace.controller import Drawn
from headrace.questions.ledger import Key
from headrace.records import Question
from headrace.rollouts import OwnRollouts, Rollouts, RolloutState, Sides
from headrace.sampling.vllm.client import VLLMEngine
from headrace.starting_model import encoder_of
from headrace.task_sets import question_sets

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<Q")
_START_SECONDS = 600.0
"""Longest wait for the process to have read its questions."""


class RolloutsGone(RuntimeError):  # noqa: N818
    """The rollout process died."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What the process is started with."""

    config: dict[str, Any]
    model: str
    """Directory of the starting policy: its tokenizer and processor are read."""
    urls: tuple[str, ...]
    """vLLM servers."""
    reward: str | None
    questions: tuple[Question, ...] | None
    """Questions given to the trainer, in place of the configured ones."""


@dataclass(frozen=True, slots=True)
class _Call:
    number: int
    method: str
    fates: dict[Key, str] = field(default_factory=dict)
    state: RolloutState | None = None


@dataclass(frozen=True, slots=True)
class _Answer:
    number: int
    error: str | None = None
    drawn: Drawn | None = None
    evaluation: dict[str, Any] | None = None
    state: RolloutState | None = None


# ------------------------------------------------------------------------------------------------------ the learner's side


class RemoteRollouts:
    """``Rollouts`` by message. A process that died is started again from the last settled step, at most ``max_restarts`` times."""

    def __init__(self, setup: Setup, *, max_restarts: int) -> None:
        self._setup = setup
        self._restarts_left = max_restarts
        self._process: subprocess.Popen | None = None
        self._numbers = 0
        self._waiting: dict[int, asyncio.Future[_Answer]] = {}
        self._state = RolloutState()
        self._begun = False

    async def start(self) -> None:
        """Start the process and wait until it has its questions.

        Raises:
            ValueError: questions or reward cannot be used, as the process says.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headrace.rollout_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=_environment(),
                start_new_session=True,  # Ctrl-C is the learner's to handle
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._reading = asyncio.create_task(self._read(reader))
        _send(self._writer, self._setup)
        try:
            await asyncio.wait_for(self._answer(0), _START_SECONDS)
        except TimeoutError:
            raise ValueError(f"the rollout process was not ready after {_START_SECONDS:.0f} s") from None
        if self._begun:
            await self._call("restore", state=self._state)

    async def draw(self) -> Drawn:
        answer = await self._again("draw")
        assert answer.drawn is not None
        assert answer.state is not None
        self._state = answer.state
        return answer.drawn

    async def settle(self, fates: dict[Key, str]) -> None:
        answer = await self._again("settle", fates=fates)
        assert answer.state is not None
        self._state = answer.state

    async def release(self) -> None:
        self._state = replace(self._state, unreleased=())
        await self._again("release")

    async def evaluate(self) -> dict[str, Any] | None:
        return (await self._again("evaluate")).evaluation

    async def state(self) -> RolloutState:
        state = (await self._again("state")).state
        assert state is not None
        return state

    async def restore(self, state: RolloutState) -> None:
        self._state, self._begun = state, True
        await self._again("restore", state=state)

    async def close(self) -> None:
        if self._process is None:
            return
        self._reading.cancel()
        self._writer.close()
        try:
            await asyncio.to_thread(self._process.wait, 30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    async def _again(self, method: str, **arguments: Any) -> _Answer:
        """Call, and once more in a new process when the old one died."""
        while True:
            try:
                return await self._call(method, **arguments)
            except RolloutsGone as error:
                if not self._restarts_left:
                    raise RuntimeError(f"{error}, and was started again as often as engine.max_restarts allows") from None
                self._restarts_left -= 1
                log.warning("%s; it is started again from the last step", error)
                await self.start()
                if method in ("release", "restore"):  # a new process starts from the state, with every slot free
                    return _Answer(0)

    async def _call(self, method: str, **arguments: Any) -> _Answer:
        self._numbers += 1
        self._begun = self._begun or method == "draw"
        waiting = self._answer(self._numbers)
        _send(self._writer, _Call(self._numbers, method, **arguments))
        return await waiting

    def _answer(self, number: int) -> asyncio.Future[_Answer]:
        self._waiting[number] = asyncio.get_running_loop().create_future()
        if self._reading.done():
            self._fail()
        return self._waiting[number]

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hand every answer to the call that waits for it, until the process is gone."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                answer = wire.unpack(await _receive(reader), _Answer)
                waiting = self._waiting.pop(answer.number)
                if waiting.cancelled():
                    continue
                if answer.error is None:
                    waiting.set_result(answer)
                else:
                    waiting.set_exception(ValueError(answer.error))
        self._fail()

    def _fail(self) -> None:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(RolloutsGone(f"the rollout process died (exit code {self._process.poll()})"))
        self._waiting.clear()


def _environment() -> dict[str, str]:
    """Without a GPU and without the launcher's ranks."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC_", "RANK", "LOCAL_", "WORLD_SIZE"))}
    return ours | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def _send(writer: asyncio.StreamWriter, message: Any) -> None:
    payload = wire.pack(message)
    writer.write(_LENGTH.pack(len(payload)))
    writer.write(payload)


async def _receive(reader: asyncio.StreamReader) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)


# ------------------------------------------------------------------------------------------------------ the process


async def _serve(connection: socket.socket) -> None:
    """Answer calls until the socket closes."""
    reader, writer = await asyncio.open_connection(sock=connection)
    rollouts: Rollouts | None = None
    calls: set[asyncio.Task[None]] = set()
    try:
        setup = wire.unpack(await _receive(reader), Setup)
        try:
            rollouts = _build(setup)
        except ValueError as error:
            _send(writer, _Answer(0, error=str(error)))
            await writer.drain()
            return
        _send(writer, _Answer(0))
        while True:
            call = wire.unpack(await _receive(reader), _Call)
            task = asyncio.create_task(_handle(rollouts, call, writer))
            calls.add(task)
            task.add_done_callback(calls.discard)
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # the learner is gone or done
    finally:
        for task in calls:
            task.cancel()
        if rollouts is not None:
            await rollouts.close()


def _build(setup: Setup) -> OwnRollouts:
    config = Config.model_validate(setup.config)
    sides = Sides(*question_sets(config, setup.questions, needs_answers=setup.reward is None), setup.reward)
    encoder = encoder_of(Path(setup.model), config)
    return OwnRollouts(config, sides, VLLMEngine(setup.urls, encoder, config.engine), encoder, log.warning)


async def _handle(rollouts: Rollouts, call: _Call, writer: asyncio.StreamWriter) -> None:
    """One call; what it raises is the learner's to tell."""
    try:
        answer = await _perform(rollouts, call)
    except ValueError as error:
        answer = _Answer(call.number, error=str(error))
    except Exception as error:
        log.exception("the rollout process failed in %s", call.method)
        answer = _Answer(call.number, error=f"the rollout process failed in {call.method}: {type(error).__name__}: {error}")
    _send(writer, answer)
    await writer.drain()


async def _accounts(rollouts: Rollouts) -> RolloutState:
    """What a new process must know of this one: without the groups, which it draws again."""
    return replace(await rollouts.state(), groups={})


async def _perform(rollouts: Rollouts, call: _Call) -> _Answer:
    number = call.number
    if call.method == "draw":
        return _Answer(number, drawn=await rollouts.draw(), state=await _accounts(rollouts))
    if call.method == "settle":
        await rollouts.settle(call.fates)
        return _Answer(number, state=await _accounts(rollouts))
    if call.method == "release":
        await rollouts.release()
        return _Answer(number)
    if call.method == "evaluate":
        return _Answer(number, evaluation=await rollouts.evaluate())
    if call.method == "state":
        return _Answer(number, state=await rollouts.state())
    assert call.state is not None, call.method
    await rollouts.restore(call.state)
    return _Answer(number)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1]))))
