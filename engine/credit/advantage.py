"""Group-relative advantages (paper 000, section 3.1)."""

from collections.abc import Sequence
from math import fsum, isinf, sqrt

import numpy as np

from headrace.records import Array

EPSILON = 1e-6  # added to the standard deviation


def group_advantages(rewards: Sequence[float | None] | Array, ddof: int = 0, normalise: bool = True) -> Array:
    """A_i = (r_i - mean) / (std + 1e-6) over one group.

    Unscored rollouts (None or NaN) enter neither mean nor standard deviation and get 0. Rewards that are all equal give
    exactly 0; so does a group in which a single rollout was scored. Sums are exact, so the order of the group is immaterial.

    Args:
        rewards: [G] totals, None or NaN where scoring failed.
        ddof: degrees of freedom taken off in the standard deviation: 0 (population) or 1 (sample).
        normalise: False leaves r_i - mean (Dr. GRPO).

    Returns:
        [G] float64.

    Raises:
        ValueError: fewer than two rollouts, an infinite reward, or another ``ddof``.
    """
    if len(rewards) < 2:
        raise ValueError(f"group_advantages: a group of {len(rewards)} has no baseline, expected at least 2 rollouts")
    if ddof not in (0, 1):
        raise ValueError(f"group_advantages: ddof = {ddof}, expected 0 or 1")
    values = np.array([np.nan if reward is None else float(reward) for reward in rewards])  # [G]
    if any(map(isinf, values)):
        raise ValueError(f"group_advantages: rewards must be finite, got {values.tolist()}")
    scored = ~np.isnan(values)  # [G]
    advantages = np.zeros(len(values))  # [G]
    known = values[scored]
    if len(known) < 2 or known.min() == known.max():
        return advantages
    deviations = known - fsum(known) / len(known)
    spread = sqrt(fsum(deviations**2) / (len(known) - ddof)) + EPSILON
    advantages[scored] = deviations / spread if normalise else deviations
    return advantages
