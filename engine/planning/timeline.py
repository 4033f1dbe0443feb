"""One simulated run: what happens on both sides, in the order of time."""

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from headrace.planning.rates import learner_seconds
from headrace.planning.servers import Drawing, Server
from headrace.planning.setting import Setting
from headrace.schedule import deadline, fits


class Timeline:
    """One simulated run: a heap of (time, tie-breaker, action)."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.setting = setting
        self.rng = np.random.default_rng(seed)
        self.lengths = [_lengths(setting, wave, np.random.default_rng((seed, wave))) for wave in (1, 2)]
        self.now = 0.0
        self.version = 0
        self.free = setting.slots
        self.servers = [Server(setting.rates, setting.rows) for _ in range(setting.servers)]
        self.queue: deque[Drawing] = deque()  # groups not yet in a batch, in the order that batches take them
        self.complete = 0  # of those, how many are done
        self.rows = 0  # running on all servers
        self.learner_free = True
        self.waiting_since = 0.0
        self.batches = 0
        self.pushes: list[float] = [0.0]
        self.spans: list[tuple[str, float, float]] = []
        self.track: list[tuple[float, int, int]] = []
        self.batch_lags: list[tuple[int, list[int]]] = []  # per batch: the version that trained it, its groups' lags
        self.batch_tokens: list[tuple[float, float]] = []  # per batch: response tokens, all tokens
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._pushed = 0

    def until(self, version: int) -> None:
        """Run until the engines hold that version."""
        self.admit()
        while self.version < version:
            self.now, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        self._pushed += 1
        heapq.heappush(self._events, (time, self._pushed, action, arguments))

    # ------------------------------------------------------------------------------------------------- rollout side

    def admit(self) -> None:
        """Fill the free slots, each group to the server with the fewest rollouts."""
        setting, workload = self.setting, self.setting.workload
        while self.free:
            self.free -= 1
            first, second = setting.first_wave, setting.group_size - setting.first_wave
            lengths = (*islice(self.lengths[0], first), *islice(self.lengths[1], second))
            group = Drawing(lengths, self._least_loaded(), self.version, second=not second)
            group.filtered = bool(self.rng.random() < workload.filtered)
            if setting.order == "admission":
                self.queue.append(group)
            self._send(group, group.lengths[:first], fresh=True)

    def _least_loaded(self) -> int:
        return min(range(len(self.servers)), key=lambda number: self.servers[number].outstanding)

    def _send(self, group: Drawing, lengths: tuple[float, ...], fresh: bool) -> None:
        """A wave goes to the group's server: media, then the prompt (once per group), then its rows."""
        server, workload = self.servers[group.server], self.setting.workload
        server.advance(self.now)
        server.outstanding += len(lengths)
        group.left = len(lengths)
        prefill = workload.prompt_tokens * self.setting.rates.prefill_token if fresh else 0.0
        if workload.media_per_rollout:
            for number, length in enumerate(lengths):
                ready = server.prepare_media(self.now, workload.media_seconds)
                self.at(ready, self._start, server, group, (length,), prefill if number == 0 else 0.0)
        else:
            ready = server.prepare_media(self.now, workload.media_seconds) if fresh and workload.media_seconds else self.now
            self.at(ready, self._start, server, group, lengths, prefill)

    def _start(self, server: Server, group: Drawing, lengths: tuple[float, ...], prefill: float) -> None:
        before = len(server.running)
        if prefill:
            server.stall(self.now, prefill)
        for length in lengths:
            server.add(self.now, length, group)
        self.rows += len(server.running) - before
        self._foresee(server)

    def _foresee(self, server: Server) -> None:
        """Schedule the next end of a row."""
        end = server.next_end(self.now)
        if end is not None:
            self.at(end, self._ended, server, server.changes)

    def _ended(self, server: Server, changes: int) -> None:
        if server.changes != changes:  # other rows since: foreseen anew
            return
        before = len(server.running)
        ended = server.take_ended(self.now)
        self.rows += len(server.running) - before
        for group in ended:
            group.left -= 1
            if group.left == 0:
                self.at(self.now + self.setting.workload.reward_seconds, self._scored, group)
        self._foresee(server)

    def _scored(self, group: Drawing) -> None:
        if not group.second:
            group.second = True
            self._send(group, group.lengths[self.setting.first_wave :], fresh=False)
            return
        group.done = True
        if group.filtered:
            self.free += 1
            self.admit()
        else:
            self.complete += 1
            if self.setting.order == "completion":
                self.queue.append(group)
        self._learn()

    # ------------------------------------------------------------------------------------------------- learner

    def _learn(self) -> None:
        """Train the next batch if the learner is free and the batch is there."""
        self.track.append((self.now, self.rows, self.complete))
        if not self.learner_free or self.complete < self.setting.batch:
            return
        batch = self._next_batch()
        if batch is None:
            return
        self.learner_free = False
        self.complete -= len(batch)
        responses = sum(sum(group.lengths) for group in batch)
        tokens = responses + len(batch) * self.setting.group_size * self.setting.workload.prompt_tokens
        self.batch_tokens.append((responses, tokens))
        self.batch_lags.append((self.version, [self.version - group.version for group in batch]))
        setting = self.setting
        seconds = learner_seconds(
            setting.rates, tokens, updates=setting.updates, ranks=setting.ranks, micro_batch_tokens=setting.micro_batch_tokens
        )
        self.spans += [("wait", self.waiting_since, self.now), ("update", self.now, self.now + seconds)]
        self.at(self.now + seconds, self._trained)

    def _next_batch(self) -> list[Drawing] | None:
        """The groups that the learner's controller would take now (``rollout.groups.Ahead``); None while it waits."""
        size, lag = self.setting.batch, (self.setting.slots - 1) // (self.setting.batch * self.setting.sync_interval)
        waiting = [group for group in self.queue if not (group.done and group.filtered)]
        chosen = waiting[:size]
        if not all(group.done for group in chosen):
            chosen = list(islice((group for group in waiting if group.done), size))
            taken = set(map(id, chosen))
            left = (deadline(group.version, self.setting.sync_interval, lag) for group in waiting if id(group) not in taken)
            if lag == 0 or len(chosen) < size or not fits(left, self.batches, size):
                return None
        taken = set(map(id, chosen))
        self.queue = deque(group for group in waiting if id(group) not in taken)
        return chosen

    def _trained(self) -> None:
        self.batches += 1
        if self.batches % self.setting.sync_interval:
            self._free_learner()
            return
        seconds = self.setting.rates.sync
        for server in self.servers:  # paused while weights arrive, then every running context is read again
            again = server.context_tokens(self.setting.workload.prompt_tokens) * self.setting.rates.prefill_token
            server.stall(self.now, seconds + again)
            self._foresee(server)
        self.spans.append(("sync", self.now, self.now + seconds))
        self.at(self.now + seconds, self._pushed_weights)

    def _pushed_weights(self) -> None:
        self.version += 1
        self.pushes.append(self.now)
        self.free += self.setting.batch * self.setting.sync_interval
        self.admit()
        self._free_learner()

    def _free_learner(self) -> None:
        self.learner_free = True
        self.waiting_since = self.now
        self._learn()


def _lengths(setting: Setting, wave: int, rng: np.random.Generator) -> Iterator[float]:
    """Response lengths of a wave without end."""
    while True:
        yield from setting.workload.lengths(4096, wave, setting.max_tokens, rng).tolist()
