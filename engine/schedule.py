"""The arithmetic of the asynchronous schedule: how far sampling may run ahead of learning (docs/asynchrony.md has the proofs)."""

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
    """Largest number of versions that a trained token can lag behind the learner: ceil(slots / P) - 1, which is at most ceil(S).

    Let a group be admitted while the engines hold version v, so that the first v·P trained groups are released. With it at most
    ``slots`` groups are not, and batches take groups in the order of admission, so it is among the first v·P + slots groups to
    train. The learner's version at the i-th of them (from 0) is floor(i / P), at most v + ceil(slots / P) - 1. Groups that are
    filtered ahead of it only move it forward, and its tokens are drawn under v or, after a push in between, under a newer version.
    """
    return (slots(config) - 1) // questions_per_version(config)
