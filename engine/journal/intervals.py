"""95 % intervals for rates and means, deterministic."""

from collections.abc import Sequence

import numpy as np

Z = 1.959964
"""Normal quantile of a two-sided 95 % interval."""
RESAMPLES = 2000

Interval = tuple[float, float]


def wilson(count: float, total: float) -> Interval:
    """Wilson score interval of a rate; (0, 1) without observations."""
    if total <= 0:
        return 0.0, 1.0
    rate = count / total
    centre = (rate + Z**2 / (2 * total)) / (1 + Z**2 / total)
    half = Z * np.sqrt(rate * (1 - rate) / total + Z**2 / (4 * total**2)) / (1 + Z**2 / total)
    return max(0.0, float(centre - half)), min(1.0, float(centre + half))


def rate_difference(count: float, total: float, other_count: float, other_total: float) -> Interval:
    """Newcombe's interval of ``count/total - other_count/other_total`` for independent samples."""
    if total <= 0 or other_total <= 0:
        return -1.0, 1.0
    rate, other = count / total, other_count / other_total
    (low, high), (other_low, other_high) = wilson(count, total), wilson(other_count, other_total)
    below = np.hypot(rate - low, other_high - other)
    above = np.hypot(high - rate, other - other_low)
    return float(rate - other - below), float(rate - other + above)


def bootstrap_mean(values: Sequence[float]) -> Interval:
    """Percentile interval of the mean of independent values, such as one accuracy (or one difference) per question."""
    data = np.asarray(values, dtype=np.float64)
    if not len(data):
        return float("nan"), float("nan")
    rng = np.random.default_rng(0)
    means = data[rng.integers(0, len(data), (RESAMPLES, len(data)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def mean_interval(values: Sequence[float]) -> Interval:
    """Interval of a mean of rates: Wilson for right-or-wrong values (a bootstrap of equal values has no width), else bootstrapped."""
    if set(values) <= {0.0, 1.0} or len(set(values)) == 1:
        return wilson(sum(values), len(values))
    return bootstrap_mean(values)


_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448, 2.1314)
"""Student's t, two-sided 95 %, for 1, 2, … degrees of freedom."""


def mean_t(values: Sequence[float]) -> Interval | None:
    """Student's interval of the mean of few independent values, such as one per seed; None for a single one."""
    count = len(values)
    if count < 2:
        return None
    data = np.asarray(values, dtype=np.float64)
    quantile = _T[count - 2] if count - 2 < len(_T) else Z * (1 + (Z**2 + 1) / (4 * (count - 1)))  # Cornish-Fisher beyond the table
    half = quantile * data.std(ddof=1) / np.sqrt(count)
    return float(data.mean() - half), float(data.mean() + half)
