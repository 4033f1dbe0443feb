"""Whether two checkpoints differ on the same questions: paired, deterministic, without assumptions on the distribution."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, fsum

import numpy as np

from headrace.journal.intervals import Interval, bootstrap_mean

FLIPS = 20_000
"""Random sign patterns of the permutation test; up to ``EXACT`` differences all patterns are counted instead."""
EXACT = 14


@dataclass(frozen=True)
class Comparison:
    """Second minus first, over the questions that both answered."""

    questions: int
    difference: float
    interval: Interval
    """95 %, bootstrapped over questions."""
    p_value: float
    """Two-sided."""
    test: str
    better: int
    """Questions on which the second is better."""
    worse: int


def compare(first: Sequence[float], second: Sequence[float]) -> Comparison:
    """Compare values per question in the same order; one value per question, so that samples of a question count as one cluster.

    Right-or-wrong values are tested by McNemar's exact test, others by flipping signs.

    Raises:
        ValueError: the questions differ in number, or there are none.
    """
    if len(first) != len(second) or not len(first):
        raise ValueError(f"compare: expected values of the same questions, got {len(first)} and {len(second)}")
    gaps = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    better, worse = int((gaps > 0).sum()), int((gaps < 0).sum())
    binary = {*first, *second} <= {0.0, 1.0}
    p_value, test = (mcnemar(better, worse), "McNemar, exact") if binary else (sign_flip(gaps), "sign-flip permutation")
    return Comparison(len(gaps), fsum(gaps) / len(gaps), bootstrap_mean(gaps.tolist()), p_value, test, better, worse)


def mcnemar(better: int, worse: int) -> float:
    """Two-sided exact p-value of ``better`` against ``worse`` discordant pairs under a fair coin."""
    pairs = better + worse
    tail = sum(comb(pairs, count) for count in range(min(better, worse) + 1)) / 2**pairs
    return min(1.0, 2 * tail)


def sign_flip(gaps: Sequence[float] | np.ndarray) -> float:
    """Two-sided p-value of a mean of paired differences: how often random signs make it as large."""
    moved = np.array([gap for gap in gaps if gap != 0], dtype=np.float64)
    if not len(moved):
        return 1.0
    observed = abs(moved.sum()) - 1e-12 * np.abs(moved).sum()  # equal sums differ by rounding
    if len(moved) <= EXACT:
        signs = 1 - 2 * ((np.arange(2 ** len(moved))[:, None] >> np.arange(len(moved))) & 1)
        return float((np.abs(signs @ moved) >= observed).mean())
    rng = np.random.default_rng(0)
    reached = sum(int((np.abs(_signs(rng, 1000, len(moved)) @ moved) >= observed).sum()) for _ in range(FLIPS // 1000))
    return (reached + 1) / (FLIPS + 1)


def _signs(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return 1.0 - 2.0 * rng.integers(0, 2, (rows, columns))
