"""A rollout server as a queue: prompts are prepared one after another, rows draw side by side and slow each other down."""

import heapq
from collections import deque
from dataclasses import dataclass, field

from headrace.planning.rates import Rates


@dataclass(eq=False, slots=True)
class Drawing:
    """One group on its way through a server."""

    lengths: tuple[float, ...]
    """Response tokens, first wave first."""
    server: int
    version: int
    """Version the engines held when it was admitted."""
    left: int = 0
    """Rollouts of the present wave that still run."""
    second: bool = False
    """The present wave is the second, or the only one."""
    done: bool = False
    filtered: bool = False


@dataclass(eq=False, slots=True)
class Server:
    """All running rows have drawn ``drawn`` tokens since the start of time; a row ends when that counter reaches its mark."""

    rates: Rates
    rows: int
    """Rows it draws at once; further ones wait."""
    drawn: float = 0.0
    clock: float = 0.0
    stalled: float = 0.0
    """Until then no row draws: a prompt is read, or weights arrive."""
    host: float = 0.0
    """Until then the host prepares media."""
    outstanding: int = 0
    """Rollouts sent here and not finished."""
    busy: float = 0.0
    """Seconds with anything outstanding."""
    row_seconds: float = 0.0
    """Integral of running rows."""
    changes: int = 0
    """Counts changes of the running rows, so that an end foreseen before one is known to be void."""
    running: list[tuple[float, int, float, Drawing]] = field(default_factory=list)
    """Heap of (mark, tie-breaker, length, group)."""
    waiting: deque[tuple[float, Drawing]] = field(default_factory=deque)
    _pushed: int = 0

    def advance(self, now: float) -> None:
        """Let the rows draw until ``now``."""
        elapsed = now - self.clock
        if self.outstanding:
            self.busy += elapsed
        if self.running:
            self.row_seconds += elapsed * len(self.running)
            self.drawn += max(0.0, now - max(self.clock, self.stalled)) / self._token_seconds()
        self.clock = now

    def prepare_media(self, now: float, seconds: float) -> float:
        """When the host is through with media that arrive now."""
        self.host = max(now, self.host) + seconds
        return self.host

    def stall(self, now: float, seconds: float) -> None:
        """No row draws for so long, after what already holds them up."""
        self.advance(now)
        self.stalled = max(now, self.stalled) + seconds
        self.changes += 1

    def add(self, now: float, length: float, group: Drawing) -> None:
        """A row starts, or waits for a place."""
        self.advance(now)
        self.waiting.append((length, group))
        self._fill()

    def next_end(self, now: float) -> float | None:
        """When the next row ends if nothing changes; None when none runs."""
        if not self.running:
            return None
        return max(now, self.stalled) + max(0.0, self.running[0][0] - self.drawn) * self._token_seconds()

    def take_ended(self, now: float) -> list[Drawing]:
        """The groups of the rows that have ended, once per row."""
        self.advance(now)
        ended = []
        while self.running and self.running[0][0] <= self.drawn + 1e-6:
            ended.append(heapq.heappop(self.running)[3])
        self.outstanding -= len(ended)
        self._fill()
        return ended

    def context_tokens(self, prompt_tokens: float) -> float:
        """Tokens that must be read again when caches are cleared: each running group's prompt once, and what its rows have drawn."""
        groups = {id(group) for _, _, _, group in self.running}
        return len(groups) * prompt_tokens + sum(self.drawn - (mark - length) for mark, _, length, _ in self.running)

    def _token_seconds(self) -> float:
        return max(1e-12, self.rates.decode_step + len(self.running) * self.rates.decode_row)

    def _fill(self) -> None:
        while self.waiting and len(self.running) < self.rows:
            length, group = self.waiting.popleft()
            self._pushed += 1
            heapq.heappush(self.running, (self.drawn + length, self._pushed, length, group))
        self.changes += 1
