"""What the learner and the rollout process say to each other, and how.

A call has a number, and its answer comes back under it, so drawing goes on while an evaluation runs. Messages are ``wire`` bytes behind
their length.
"""

import asyncio
import struct
from dataclasses import dataclass, field
from typing import Any

from headrace import wire
from headrace.controller import Drawn
from headrace.questions.ledger import Key
from headrace.records import Question
from headrace.rollout.side import RolloutState

_LENGTH = struct.Struct("<Q")


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
class Call:
    """A method of ``side.Rollouts`` with its arguments; ``ping`` asks for a sign of life."""

    number: int
    method: str
    fates: dict[Key, str] = field(default_factory=dict)
    state: RolloutState | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What the method returned, or the text of the ValueError that it raised."""

    number: int
    error: str | None = None
    drawn: Drawn | None = None
    evaluation: dict[str, Any] | None = None
    state: RolloutState | None = None


def send(writer: asyncio.StreamWriter, message: Any) -> None:
    """Put a message on its way."""
    payload = wire.pack(message)
    writer.write(_LENGTH.pack(len(payload)))
    writer.write(payload)


async def receive(reader: asyncio.StreamReader) -> bytes:
    """The next message; ``asyncio.IncompleteReadError`` when the other side is gone."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)
