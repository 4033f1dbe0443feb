"""Where the groups of a batch come from: drawn together when they are wanted, or ahead of the learner.

With a staleness of 0 both hand out groups in the order in which their questions were admitted, and make the same batches.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from headrace.questions.ledger import Key
from headrace.records import EngineDown, Group, Prompt
from headrace.rollout.admission import Admission
from headrace.schedule import deadline, fits

log = logging.getLogger(__name__)

T = TypeVar("T")
Draw = Callable[[Sequence[Key], Sequence[Prompt]], Awaitable[list[Group]]]
"""Draws and scores the groups of some questions."""
RETRY_SECONDS = 1.0
MOST_TRIES = 6
"""Times in a row that the engine may go down over one thing. Each may take as long as a server needs to start."""
_FILTERED_AHEAD = 4
"""Bounds the groups that wait, in slots: those that will not train hold none, and where nothing trains they would pile up for ever."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How far drawing may run ahead (``schedule``)."""

    slots: int
    """floor((1 + S)·P): questions admitted and not released."""
    batch: int
    """Groups of one batch."""
    interval: int
    """Batches of one parameter version."""
    lag: int
    """Largest number of versions by which a trained token may lag: ceil(slots / P) - 1."""


async def while_engine_fails(work: Callable[[], Awaitable[T]], failed: Callable[[EngineDown], None]) -> T:
    """What ``work`` gives, begun again when the engine goes down, after pauses that double.

    Raises:
        EngineDown: it went down ``MOST_TRIES`` times in a row.
    """
    for tried in range(1, MOST_TRIES):
        try:
            return await work()
        except EngineDown as error:
            failed(error)
            await asyncio.sleep(RETRY_SECONDS * 2 ** (tried - 1))
    return await work()


class GroupSource(Protocol):
    """Gives the groups of batches."""

    async def take(self, count: int) -> list[tuple[Key, Group]]:
        """The next ``count`` groups for the present batch, drawn and scored."""
        ...

    def trained(self, keys: Sequence[Key]) -> None:
        """The present batch is done; the learner's weights have seen these groups of it."""
        ...

    def release(self) -> None:
        """The engines hold weights that have seen all groups trained so far."""
        ...

    @property
    def unreleased(self) -> list[Key]:
        """Groups that have trained and are not released."""
        ...

    def buffered(self) -> dict[Key, Group]:
        """Groups drawn and not taken yet."""
        ...

    def metrics(self) -> dict[str, float]:
        """How sampling went since the last call."""
        ...

    async def close(self) -> None:
        """Stop drawing."""
        ...


class Together:
    """Admits and draws exactly the groups that are asked for, all in one call of the engine."""

    def __init__(self, admission: Admission, draw: Draw) -> None:
        self._admission, self._draw = admission, draw

    async def take(self, count: int) -> list[tuple[Key, Group]]:
        admitted = [self._admission.next() for _ in range(count)]
        keys = [key for key, _ in admitted]
        return list(zip(keys, await self._draw(keys, [prompt for _, prompt in admitted]), strict=True))

    def trained(self, keys: Sequence[Key]) -> None:
        """Nothing waits for a slot."""

    def release(self) -> None:
        """Nothing waits for a slot."""

    @property
    def unreleased(self) -> list[Key]:
        return []

    def buffered(self) -> dict[Key, Group]:
        return {}

    def metrics(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        """Nothing goes on between calls."""


@dataclass(eq=False, slots=True)
class _Admitted:
    """A question that is being drawn, or whose group waits to be taken."""

    key: Key
    task: asyncio.Task[Group]
    deadline: int
    """Last batch, from 0, that may take its group: later its oldest tokens would lag too far."""
    slot: bool = True
    """Whether it counts against the slots; no longer once its group turns out not to train."""


class Ahead:
    """Draws every question by itself, as many at a time as there are slots.

    Invariant: at most ``slots`` questions are admitted and not released. A question gives its slot back as soon as its
    group is found not to train, otherwise when the engines hold weights that were trained on it. First wave, rewards and second wave
    of a question follow each other without waiting for others.

    A batch takes the oldest groups that are finished. It passes over one that is still being drawn only if every group left
    behind can then still be taken by its deadline; so no token lags by more than ``lag`` versions (docs/asynchrony.md), and one long
    response does not hold up the learner. With a lag of 0 that is the order of admission.

    Life of a question: admitted (a slot) -> drawn and scored -> taken by a batch -> released. When the
    engine goes down, it is drawn again from the same seeds.
    """

    def __init__(
        self,
        admission: Admission,
        draw: Draw,
        trains: Callable[[Group], bool],
        pace: Pace,
        *,
        batches: int = 0,
        drawn: Mapping[Key, Group] | None = None,
        unreleased: Sequence[Key] = (),
    ) -> None:
        """Args:
        trains: whether a group will train, so that its slot is held.
        batches: that have trained already.
        drawn: groups that an earlier process had drawn; their questions are not drawn again.
        unreleased: groups of an earlier process that have trained.
        """
        self._admission, self._draw, self._trains, self._pace = admission, draw, trains, pace
        self._drawn = dict(drawn or {})
        self._queue: list[_Admitted] = []
        self._taken: set[Key] = set()  # groups of a batch that may be training; each has a slot
        self._trained: set[Key] = set(unreleased)  # likewise, until the engines have the weights
        self._batches = batches
        self._version = batches // pace.interval
        self._room = asyncio.Event()
        self._news = asyncio.Event()
        self._filling: asyncio.Task[None] | None = None
        self._busy = _BusyTime()
        self._redrawn = 0

    async def take(self, count: int) -> list[tuple[Key, Group]]:
        if self._filling is None:
            self._filling = asyncio.create_task(self._fill())
        while (chosen := self._choose(count)) is None:
            if not self._queue and self._filling.done():
                self._filling.result()  # no question can be admitted any more
            self._news.clear()
            await self._news.wait()
        groups = [(entry.key, entry.task.result()) for entry in chosen]
        for entry, (key, group) in zip(chosen, groups, strict=True):
            self._queue.remove(entry)
            if self._trains(group):
                self._taken.add(key)
        self._room.set()
        return groups

    def _choose(self, count: int) -> list[_Admitted] | None:
        """The groups to take now, None while that must wait."""
        oldest = self._queue[:count]
        if len(oldest) == count and all(entry.task.done() for entry in oldest):
            return oldest
        finished = [entry for entry in self._queue if entry.task.done()]
        failed = [entry for entry in finished if entry.task.exception() is not None]
        if failed:
            failed[0].task.result()
        if self._pace.lag == 0 or len(finished) < count:
            return None
        chosen = finished[:count]
        kept = set(map(id, chosen))
        places = sum(not entry.slot for entry in chosen)  # this batch will ask again for those that do not train
        left = [entry.deadline for entry in self._queue if id(entry) not in kept and entry.slot]
        return chosen if fits(left, self._batches, self._pace.batch, places) else None

    def trained(self, keys: Sequence[Key]) -> None:
        self._taken -= set(keys)
        self._trained |= set(keys)
        self._batches += 1

    def release(self) -> None:
        self._version = self._batches // self._pace.interval
        self._trained.clear()
        self._room.set()

    @property
    def unreleased(self) -> list[Key]:
        return sorted(self._trained)

    @property
    def free_slots(self) -> int:
        """Questions that may be admitted now."""
        return self._pace.slots - sum(entry.slot for entry in self._queue) - len(self._taken) - len(self._trained)

    def buffered(self) -> dict[Key, Group]:
        finished = [entry for entry in self._queue if entry.task.done() and not entry.task.cancelled() and not entry.task.exception()]
        return {entry.key: entry.task.result() for entry in finished}

    def metrics(self) -> dict[str, float]:
        finished = sum(entry.task.done() for entry in self._queue)
        redrawn, self._redrawn = self._redrawn, 0
        return {
            "schedule/rollout_idle": self._busy.idle_share(),
            "schedule/drawing": float(len(self._queue) - finished),
            "schedule/buffered": float(finished),
            "schedule/unreleased": float(len(self._taken) + len(self._trained)),
            "schedule/redrawn": float(redrawn),
        }

    async def close(self) -> None:
        tasks: list[asyncio.Task] = [entry.task for entry in self._queue] + ([self._filling] if self._filling else [])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fill(self) -> None:
        """Admit questions while there are slots, for ever."""
        pace = self._pace
        try:
            while True:
                self._room.clear()
                while self.free_slots > 0 and len(self._queue) < _FILTERED_AHEAD * pace.slots:
                    key, prompt = self._admission.next()
                    last = deadline(self._version, pace.interval, pace.lag)
                    entry = _Admitted(key, asyncio.create_task(self._group(key, prompt)), last)
                    entry.task.add_done_callback(partial(self._finished, entry))
                    self._queue.append(entry)
                    await asyncio.sleep(0)  # encoding takes time; what was drawn meanwhile is looked after first
                await self._room.wait()
        finally:
            self._news.set()

    async def _group(self, key: Key, prompt: Prompt) -> Group:
        """Draw one question, again when the engine goes down."""
        if key in self._drawn:
            return self._drawn.pop(key)

        def failed(error: EngineDown) -> None:
            log.warning("question %s is drawn again: %s", prompt.question.id, error)
            self._redrawn += 1

        with self._busy:
            (group,) = await while_engine_fails(lambda: self._draw([key], [prompt]), failed)
            return group

    def _finished(self, entry: _Admitted, task: asyncio.Task[Group]) -> None:
        if not task.cancelled() and task.exception() is None and not self._trains(task.result()):
            entry.slot = False
            self._room.set()
        self._news.set()


class _BusyTime:
    """Time during which at least one question is being drawn."""

    def __init__(self) -> None:
        self._drawing = 0
        self._began = self._since = time.monotonic()
        self._busy = 0.0

    def __enter__(self) -> None:
        self._count(+1)

    def __exit__(self, *error: object) -> None:
        self._count(-1)

    def _count(self, change: int) -> None:
        now = time.monotonic()
        self._busy += (now - self._since) if self._drawing else 0.0
        self._since = now
        self._drawing += change

    def idle_share(self) -> float:
        """Share of the time since the last call in which nothing was drawn."""
        self._count(0)
        total, busy = self._since - self._began, self._busy
        self._began, self._busy = self._since, 0.0
        return 1 - busy / total if total > 0 else 0.0
