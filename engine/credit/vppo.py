"""How much a response looks at its picture, token by token, and what follows from it for the credit (VPPO; SPEC 7.1).

The log-probs of a response are taken twice: with the picture, and with one whose patches are blackened.
"""

from collections.abc import Sequence
from math import ceil

import numpy as np

from headrace.records import Array

LOG_RATIO_LIMIT, DEPENDENCY_LIMIT = 20.0, 10.0  # clamps of the public code
FLAT = 1e-6  # means whose range is no larger count as equal


def dependency(logprobs: Sequence[float] | Array, logprobs_cf: Sequence[float] | Array) -> Array:
    """S = exp(d) - d - 1 with d = log p(token | blackened) - log p(token | original), [T] float64 in nats, within [0, 10].

    The estimate k3 of KL(original || blackened) at the sampled token. It has no sign: a token that becomes likelier without the
    picture depends on it, too.

    Args:
        logprobs, logprobs_cf: [T] nats under the original and the blackened picture.
    """
    change = np.asarray(logprobs_cf, dtype=np.float64) - np.asarray(logprobs, dtype=np.float64)
    change = change.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (np.expm1(change) - change).clip(0, DEPENDENCY_LIMIT)


def select_tokens(dependencies: Sequence[float] | Array, fraction: float = 0.4) -> Array:
    """[T] bool: the ceil(fraction * T) tokens of one response that depend most, of equals the earlier ones.

    They alone enter the numerator of the loss; the denominator still counts every response token.
    """
    values = np.asarray(dependencies, dtype=np.float64)
    # Rounded first: 0.4 * 5 must not become 3 tokens by its last binary digit.
    count = ceil(round(fraction * len(values), 9))
    chosen = np.zeros(len(values), dtype=bool)
    chosen[np.argsort(-values, kind="stable")[:count]] = True
    return chosen


def trajectory_scale(means: Sequence[float] | Array, floor: float = 0.9) -> Array:
    """[N] factors on the advantages of N responses, from ``floor`` for the least dependent upwards, with mean 1.

    All 1 where the means are equal, or for a single response.

    Args:
        means: [N] mean dependency of every response of the optimizer step.
    """
    values = np.asarray(means, dtype=np.float64)
    if len(values) < 2 or np.ptp(values) <= FLAT:
        return np.ones(len(values))
    shares = (values - values.min()) / np.ptp(values)  # [N] in [0, 1]
    highest = floor + (1 - floor) / (shares.mean() + 1e-8)
    return floor + shares * (highest - floor)
