"""95 % intervals for rates and means, deterministic."""

from collections.abc import Hashable, Iterator, Sequence

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


CLUSTERED = 10_000
"""Resamples of clusters; where fewer are possible, each possible one is taken once."""
_AT_ONCE = 1 << 22  # drawn clusters of one part of the work


def clustered_mean(values: Sequence[float], clusters: Sequence[Hashable], others: Sequence[bool] | None = None) -> Interval:
    """Percentile interval of a mean of values that come in clusters, such as the claims about one question.

    Clusters are drawn with replacement and all their values pooled, so that large clusters weigh more (a ratio estimator).

    Args:
        others: True for values of a second group; the interval is then of the first group's mean minus the second's, of the same clusters.

    Returns:
        NaN where there are not two clusters.
    """
    numbers = {name: number for number, name in enumerate(dict.fromkeys(clusters))}
    if len(numbers) < 2:
        return float("nan"), float("nan")
    place = np.array([numbers[name] for name in clusters])
    second = np.zeros(len(place), dtype=bool) if others is None else np.asarray(others, dtype=bool)
    groups = [~second] if others is None else [~second, second]
    data = np.asarray(values, dtype=np.float64)
    sums = np.stack([np.bincount(place, data * group, len(numbers)) for group in groups])
    counts = np.stack([np.bincount(place, group, len(numbers)) for group in groups])
    means = np.concatenate([_pooled(sums, counts, picked) for picked in _draws(len(numbers))])
    means = means[np.isfinite(means)]
    if not len(means):
        return float("nan"), float("nan")
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def _pooled(sums: np.ndarray, counts: np.ndarray, picked: np.ndarray) -> np.ndarray:
    """Mean of every resample [R] of ``picked`` [R, Q] clusters, or difference of the two groups' means; NaN where a group is empty."""
    with np.errstate(invalid="ignore", divide="ignore"):
        means = sums[:, picked].sum(axis=2) / counts[:, picked].sum(axis=2)
    difference: np.ndarray = means[0] - means[1] if len(means) == 2 else means[0]
    return difference


def _draws(clusters: int) -> Iterator[np.ndarray]:
    """Resamples [R, clusters] of cluster numbers, in parts."""
    if clusters**clusters <= CLUSTERED:
        yield np.stack(np.unravel_index(np.arange(clusters**clusters), (clusters,) * clusters), axis=1)
        return
    rng = np.random.default_rng(0)
    part = max(1, _AT_ONCE // clusters)
    for start in range(0, CLUSTERED, part):
        yield rng.integers(0, clusters, (min(part, CLUSTERED - start), clusters))


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
