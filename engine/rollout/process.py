"""The rollout side in a process of its own, beside the learner's: drawing never waits for a backward pass, nor the other way round.

The learner's rank 0 starts it (``rollout.remote``) and speaks to it over a private socket. The process ends when the socket closes, also
when its parent was killed.
"""

import asyncio
import logging
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

from headrace import wire
from headrace.config import Config
from headrace.records import EngineDown
from headrace.rollout.messages import Answer, Call, Setup, receive, send
from headrace.rollout.side import OwnRollouts, Rollouts, RolloutState, Sides
from headrace.sampling.vllm.client import VLLMEngine
from headrace.starting_model import encoder_of
from headrace.task_sets import question_sets

log = logging.getLogger(__name__)


async def _serve(connection: socket.socket) -> None:
    """Answer calls until the socket closes."""
    reader, writer = await asyncio.open_connection(sock=connection)
    rollouts: Rollouts | None = None
    calls: set[asyncio.Task[None]] = set()
    try:
        setup = wire.unpack(await receive(reader), Setup)
        try:
            rollouts = _build(setup)
        except ValueError as error:
            send(writer, Answer(0, error=str(error)))
            await writer.drain()
            return
        send(writer, Answer(0))
        while True:
            call = wire.unpack(await receive(reader), Call)
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
    return OwnRollouts(config, sides, VLLMEngine(setup.urls, encoder, config.engine, pushed=True), encoder, log.warning)


async def _handle(rollouts: Rollouts, call: Call, writer: asyncio.StreamWriter) -> None:
    """One call; what it raises is the learner's to tell."""
    try:
        answer = await _perform(rollouts, call)
    except (ValueError, EngineDown) as error:
        answer = Answer(call.number, error=str(error))
    except Exception as error:
        log.exception("the rollout process failed in %s", call.method)
        answer = Answer(call.number, error=f"the rollout process failed in {call.method}: {type(error).__name__}: {error}")
    send(writer, answer)
    await writer.drain()


async def _accounts(rollouts: Rollouts) -> RolloutState:
    """What a new process must know of this one: without the groups, which it draws again."""
    return replace(await rollouts.state(), groups={})


async def _perform(rollouts: Rollouts, call: Call) -> Answer:
    number = call.number
    if call.method == "ping":
        return Answer(number)
    if call.method == "draw":
        return Answer(number, drawn=await rollouts.draw(), state=await _accounts(rollouts))
    if call.method == "settle":
        await rollouts.settle(call.fates)
        return Answer(number, state=await _accounts(rollouts))
    if call.method == "release":
        await rollouts.release()
        return Answer(number)
    if call.method == "evaluate":
        return Answer(number, evaluation=await rollouts.evaluate())
    if call.method == "state":
        return Answer(number, state=await rollouts.state())
    assert call.state is not None, call.method
    await rollouts.restore(call.state)
    return Answer(number)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1]))))
