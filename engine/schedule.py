"""The arithmetic of the asynchronous schedule: how far sampling may run ahead of learning (docs/asynchrony.md has the proofs)."""

from collections.abc import Iterable
from fractions import Fraction

from headrace.config import Config


def questions_per_version(config: Config) -> int:
    """P: groups that train between two pushes of the weights to the engines."""
    return config.run.questions_per_step * config.schedule.sync_interval


def slots(config: Config) -> int:
    """floor((1 + S)·P): groups that may be admitted and not yet released.

    A group gives its slot back at once when it is filtered, and otherwise when the engines hold weights that were trained on it.
    There are at least P slots, so the learner always gets the groups it needs before the next push. The product is exact:
    1.15 x 100 is 115, not the 114.99… of binary floating point.
    """
    return int((1 + Fraction(str(config.schedule.staleness))) * questions_per_version(config))


def max_lag(config: Config) -> int:
    """L: largest number of versions by which a trained token can lag behind the learner, ceil(slots / P) - 1, at most ceil(S).

    Kept by ``deadline`` and ``fits``; docs/asynchrony.md has the proof.
    """
    return (slots(config) - 1) // questions_per_version(config)


def deadline(version: int, interval: int, lag: int) -> int:
    """Last batch, from 0, that may take a group admitted while the engines held ``version``; in a later one it would lag by more."""
    return interval * (version + lag + 1) - 1


def fits(deadlines: Iterable[int], batch: int, size: int, places: int = 0) -> bool:
    """Whether all groups that batch number ``batch`` leaves behind can still be taken in time, oldest first.

    Args:
        deadlines: of the groups left, in the order of admission.
        size: groups of one batch.
        places: that the batch still has after this choice.
    """
    return all(n <= places + size * (last - batch) for n, last in enumerate(deadlines, 1))
