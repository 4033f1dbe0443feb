"""Paired comparisons: worked p-values, calibration under no difference, power under one."""

import numpy as np
import pytest

from headrace.journal.significance import EXACT, compare, mcnemar, sign_flip


@pytest.mark.parametrize(("better", "worse", "p_value"), [(0, 0, 1.0), (5, 0, 0.0625), (0, 6, 0.03125), (8, 2, 0.109375), (4, 4, 1.0)])
def test_mcnemar(better: int, worse: int, p_value: float) -> None:
    assert mcnemar(better, worse) == pytest.approx(p_value)


def test_sign_flip_counts_all_patterns_of_few_differences() -> None:
    assert sign_flip([0.5, 0.25, 0.0, 0.125]) == 2 / 8
    assert sign_flip([0.1] * 3 + [0.0] * 50) == 2 / 8
    assert sign_flip([0.0, 0.0]) == 1.0


def test_random_signs_agree_with_all_signs() -> None:
    gaps = np.random.default_rng(5).normal(0.4, 1, EXACT)
    longer = np.append(gaps, 1e-9)  # one difference too many to count all patterns, and too small to matter
    assert sign_flip(longer) == pytest.approx(sign_flip(gaps), abs=0.015)


def test_p_values_are_calibrated() -> None:
    rng = np.random.default_rng(0)
    found = [compare(*(rng.binomial(8, 0.4, 60) / 8 for _ in range(2))).p_value for _ in range(200)]
    assert 0.01 <= np.mean(np.array(found) < 0.05) <= 0.10


def test_a_difference_is_found_with_its_interval() -> None:
    rng = np.random.default_rng(1)
    first = rng.binomial(8, 0.4, 300) / 8
    second = np.clip(first + 0.125 * (rng.random(300) < 0.5), 0, 1)
    result = compare(first.tolist(), second.tolist())
    assert result.p_value < 0.001
    assert result.interval[0] < result.difference < result.interval[1]
    assert result.interval[0] > 0
    assert (result.test, result.worse) == ("sign-flip permutation", 0)
    assert compare([0, 1, 0], [1, 1, 0]).test == "McNemar, exact"
    with pytest.raises(ValueError, match="same questions"):
        compare([1.0], [1.0, 0.0])
