"""The rollout side in a process of its own, as the learner's rank 0 sees it: started, asked, and started again when it dies."""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from dataclasses import replace
from typing import Any

from headrace import wire
from headrace.controller import Drawn
from headrace.questions.ledger import Key
from headrace.records import EngineDown
from headrace.rollout.messages import Answer, Call, Setup, receive, send
from headrace.rollout.side import RolloutState

log = logging.getLogger(__name__)

_START_SECONDS = 600.0
"""Longest wait for the process to have read its questions."""
_SILENCE_SECONDS = 120.0
"""A process whose event loop answers nothing for that long hangs. Reading a long clip may block it for seconds."""


class RolloutsGone(EngineDown):
    """The rollout process died or hangs."""


class RemoteRollouts:
    """``Rollouts`` by message. A process that died is started again from the last settled step, at most ``max_restarts`` times."""

    def __init__(self, setup: Setup, *, max_restarts: int) -> None:
        self._setup = setup
        self._restarts_left = max_restarts
        self._process: subprocess.Popen | None = None
        self._numbers = 0
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._state = RolloutState()
        self._begun = False
        self._gone = False

    async def start(self) -> None:
        """Start the process and wait until it has its questions.

        Raises:
            ValueError: questions or reward cannot be used, as the process says.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headrace.rollout.process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=_environment(),
                start_new_session=True,  # Ctrl-C is the learner's to handle
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._reading = asyncio.create_task(self._read(reader))
        send(self._writer, self._setup)
        try:
            await asyncio.wait_for(self._answer(0), _START_SECONDS)
        except TimeoutError:
            self._process.kill()
            raise ValueError(f"the rollout process was not ready after {_START_SECONDS:.0f} s") from None
        if self._begun:
            await self._call("restore", state=self._state)
        self._gone = False

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

    async def _again(self, method: str, **arguments: Any) -> Answer:
        """Call, and once more in a new process when the old one died."""
        restarted = False
        while True:
            try:
                if self._gone:
                    await self.start()
                    restarted = True
                if restarted and method in ("release", "restore"):  # a new process starts from the state, which knows of both
                    return Answer(0)
                return await self._call(method, **arguments)
            except RolloutsGone as error:
                if not self._restarts_left:
                    raise EngineDown(f"{error}; it was started again as often as engine.max_restarts allows") from None
                self._restarts_left -= 1
                self._gone = True
                log.warning("%s; it is started again from the last step", error)

    async def _call(self, method: str, **arguments: Any) -> Answer:
        self._begun = self._begun or method == "draw"
        waiting = self._post(method, **arguments)
        while not waiting.done():
            ping = self._post("ping")
            await asyncio.wait({waiting, ping}, timeout=_SILENCE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done() and not ping.done():
                log.warning("the rollout process gave no sign of life for %.0f s and is killed", _SILENCE_SECONDS)
                assert self._process is not None
                self._process.kill()
            await asyncio.wait({waiting}, timeout=_SILENCE_SECONDS)
        return waiting.result()

    def _post(self, method: str, **arguments: Any) -> "asyncio.Future[Answer]":
        """Send a call; its answer is to come."""
        self._numbers += 1
        waiting = self._answer(self._numbers)
        send(self._writer, Call(self._numbers, method, **arguments))
        return waiting

    def _answer(self, number: int) -> asyncio.Future[Answer]:
        self._waiting[number] = asyncio.get_running_loop().create_future()
        if self._reading.done():
            self._fail()
        return self._waiting[number]

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hand every answer to the call that waits for it, until the process is gone."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                answer = wire.unpack(await receive(reader), Answer)
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
                waiting.exception()  # nobody may wait for a ping any more
        self._waiting.clear()


def _environment() -> dict[str, str]:
    """Without a GPU and without the launcher's ranks."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC_", "RANK", "LOCAL_", "WORLD_SIZE"))}
    return ours | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
