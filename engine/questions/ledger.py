"""Which question comes next, and what became of every one that was handed out."""

import heapq
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.records import Array
from headrace.streams import stream

Key = tuple[int, int]
"""Epoch and index of a question."""
_VERSION = 1  # of the saved state


class Ledger:
    """Hands out every question once an epoch, in a seeded order, and accounts for each exactly once.

    Invariant, after every call::

        admitted = settled + in flight + requeued

    where admitted counts distinct keys (epoch, index) and settled is the sum of ``counts``. No key is in two of the
    three, and none leaves ``counts`` again: nothing is lost, nothing trains twice.

    Life of a key: ``admit`` puts it in flight; ``settle`` counts it under ``trained`` or the reason why not, for good;
    ``requeue`` sends it back, and the next ``admit`` hands it out before anything new, oldest first. ``restore`` takes
    up a saved state: keys that were in flight when it was saved are requeued.

        ledger = Ledger(len(questions), seed)
        key = ledger.admit()                       # (epoch, index)
        ledger.settle(key, "trained")              # or "no_variance", "unusable", …
        saved = ledger.state()                     # small JSON: epoch and cursor, open keys, counts
        Ledger(len(questions), seed).restore(saved)

    The order is the permutation of the epoch's own random stream, so the state need not hold it: the cost is 8 bytes a
    question in memory and O(open keys) in JSON.
    """

    def __init__(self, size: int, seed: int, epochs: int | None = None) -> None:
        """A ledger over questions 0 … size - 1.

        Args:
            size: questions of one epoch.
            seed: root of the order.
            epochs: epochs to hand out; None never ends.

        Raises:
            ValueError: no questions, or no epochs.
        """
        if size < 1:
            raise ValueError(f"ledger: {size} questions, expected at least 1")
        if epochs is not None and epochs < 1:
            raise ValueError(f"ledger: {epochs} epochs, expected at least 1 or None")
        self.size, self.seed, self.epochs = size, seed, epochs
        self.counts: Counter[str] = Counter()
        self._epoch, self._cursor = 0, 0  # the next new key is order(epoch)[cursor]
        self._in_flight: dict[Key, int] = {}  # key -> place in its epoch's order
        self._requeued: list[tuple[int, int, int]] = []  # heap of (epoch, place, index)
        self._order = (-1, np.empty(0, np.int64))  # epoch and its permutation, kept for the current one

    @property
    def exhausted(self) -> bool:
        """Nothing is left to admit, unless a question in flight is requeued."""
        return not self._requeued and self._epoch == self.epochs

    def admit(self) -> Key:
        """The next question: the oldest requeued one, else the next of the order.

        Raises:
            LookupError: the last epoch is through.
        """
        if self._requeued:
            epoch, place, index = heapq.heappop(self._requeued)
        elif self._epoch == self.epochs:
            raise LookupError(f"ledger: all questions of {self.epochs} epochs are handed out")
        else:
            epoch, place, index = self._epoch, self._cursor, int(self._permutation(self._epoch)[self._cursor])
            self._cursor += 1
            if self._cursor == self.size:
                self._epoch, self._cursor = self._epoch + 1, 0
        self._in_flight[epoch, index] = place
        return epoch, index

    def settle(self, key: Key, fate: str) -> None:
        """Count a question in flight, or one requeued by ``restore``, under its fate, for good.

        Raises:
            ValueError: the key is neither, or the fate has no name.
        """
        if not fate:
            raise ValueError("ledger: a fate needs a name, such as trained")
        requeued = next((entry for entry in self._requeued if (entry[0], entry[2]) == key), None)
        if requeued is not None:
            self._requeued.remove(requeued)
            heapq.heapify(self._requeued)
        else:
            self._land(key)
        self.counts[fate] += 1

    def requeue(self, key: Key) -> None:
        """Send a question in flight back to the queue; it will draw the same random numbers again.

        Raises:
            ValueError: the key is not in flight.
        """
        heapq.heappush(self._requeued, (key[0], self._land(key), key[1]))

    @property
    def admitted(self) -> int:
        """Distinct keys handed out so far."""
        return self._epoch * self.size + self._cursor

    @property
    def settled(self) -> int:
        return self.counts.total()

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def requeued(self) -> int:
        return len(self._requeued)

    def state(self) -> dict[str, Any]:
        """All of it as JSON values; ``open`` holds [epoch, place, index] of keys in flight or requeued."""
        in_flight = [(epoch, place, index) for (epoch, index), place in self._in_flight.items()]
        return {
            "version": _VERSION,
            "size": self.size,
            "seed": self.seed,
            "epoch": self._epoch,
            "cursor": self._cursor,
            "open": [list(entry) for entry in sorted(in_flight + self._requeued)],
            "counts": dict(sorted(self.counts.items())),
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a saved state; what was in flight then is requeued.

        Raises:
            ValueError: the state is of another set of questions or seed, or breaks the invariant.
        """
        if not isinstance(state, Mapping):
            raise ValueError("ledger: the saved state is missing or no object")
        expected = {"version": _VERSION, "size": self.size, "seed": self.seed}
        for name, value in expected.items():
            if state.get(name) != value:
                raise ValueError(
                    f"ledger: the saved state has {name} = {state.get(name)!r}, this run has {value!r}; go on with the same questions"
                )
        try:
            epoch, cursor = int(state["epoch"]), int(state["cursor"])
            requeued = sorted({(int(epoch), int(place), int(index)) for epoch, place, index in state["open"]})
            counts = Counter({str(fate): int(count) for fate, count in state["counts"].items()})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"ledger: the saved state cannot be read ({type(error).__name__}: {error})") from error
        sound = 0 <= cursor < self.size and all(entry[:2] < (epoch, cursor) and 0 <= entry[2] < self.size for entry in requeued)
        if not sound or epoch * self.size + cursor != counts.total() + len(requeued):
            raise ValueError(
                f"ledger: the saved state handed out {epoch * self.size + cursor} questions "
                f"but accounts for {counts.total()} settled and {len(requeued)} open"
            )
        self.counts, self._epoch, self._cursor = counts, epoch, cursor
        self._in_flight, self._requeued = {}, requeued  # a sorted list is a heap

    def _land(self, key: Key) -> int:
        """Take a key out of the air; its place in the order."""
        place = self._in_flight.pop(key, None)
        if place is None:
            raise ValueError(f"ledger: question {key[1]} of epoch {key[0]} is not in flight: it was settled, requeued or never admitted")
        return place

    def _permutation(self, epoch: int) -> Array:
        if self._order[0] != epoch:
            self._order = (epoch, stream(self.seed, "order", epoch).permutation(self.size))
        return self._order[1]
