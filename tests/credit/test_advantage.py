"""Group advantages: EX-3.1 to EX-3.5, zero variance, unscored rollouts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.credit.advantage import group_advantages

EX_3_2 = [1, 1, 0.2, 0.2, 0.2, 0, 0.8, 0.2]


def test_ex_3_1() -> None:
    accuracies = [0, 0, 0, 0, 0, 1, 0, 1]
    shaped = [0.8 * accuracy + 0.2 for accuracy in accuracies]
    for rewards in (accuracies, shaped):
        population, sample = group_advantages(rewards), group_advantages(rewards, ddof=1)
        np.testing.assert_allclose([population[0], population[5]], [-0.57735, 1.73205], atol=1e-4)
        np.testing.assert_allclose([sample[0], sample[5]], [-0.54006, 1.62019], atol=1e-4)


def test_ex_3_2() -> None:
    expected = [1.4321, 1.4321, -0.6509, -0.6509, -0.6509, -1.1717, 0.9113, -0.6509]
    np.testing.assert_allclose(group_advantages(EX_3_2), expected, atol=5e-5)
    sample = [1.3396, 1.3396, -0.6089, -0.6089, -0.6089, -1.0960, 0.8525, -0.6089]
    np.testing.assert_allclose(group_advantages(EX_3_2, ddof=1), sample, atol=5e-5)


@pytest.mark.parametrize("value", [0.2, 0.1 + 0.2, 1 / 3, 0.0, -1.0])
@pytest.mark.parametrize("kind", [float, np.float32, np.float16])
def test_ex_3_3_no_variance_is_exactly_zero(value: float, kind: type) -> None:
    for size in (2, 7, 8, 16):
        assert not group_advantages([kind(value)] * size).any()


def test_ex_3_4_format_only_variance_has_a_gradient() -> None:
    advantages = group_advantages([0.2, 0.2, 0.2, 0, 0.2, 0.2, 0.2, 0.2])
    np.testing.assert_allclose(advantages, [0.3780] * 3 + [-2.6457] + [0.3780] * 4, atol=1e-4)


def test_ex_3_5_mean_size_by_number_correct() -> None:
    sizes = [np.abs(group_advantages([1] * k + [0] * (8 - k))).mean() for k in range(9)]
    np.testing.assert_allclose(sizes, [0, 0.6614, 0.8660, 0.9682, 1, 0.9682, 0.8660, 0.6614, 0], atol=5e-5)


def test_ex_7_dr_grpo_does_not_divide() -> None:
    advantages = group_advantages([1, 1] + [0] * 6, normalise=False)
    np.testing.assert_array_equal(advantages, [0.75] * 2 + [-0.25] * 6)


def test_unscored_rollouts_are_left_out() -> None:
    known = group_advantages([1, 0, 0.2])
    np.testing.assert_array_equal(group_advantages([1, None, 0, float("nan"), 0.2]), [known[0], 0, known[1], 0, known[2]])
    assert not group_advantages([None, 1.0]).any()
    assert not group_advantages([None, float("nan")]).any()


@pytest.mark.parametrize(
    ("rewards", "ddof", "message"),
    [
        ([1.0], 0, "a group of 1 has no baseline"),
        ([], 0, "a group of 0"),
        ([1.0, float("inf")], 0, "must be finite"),
        ([0, 1], 2, "expected 0 or 1"),
    ],
)
def test_what_cannot_be_standardised_is_refused(rewards: list[float], ddof: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, ddof=ddof)


REWARDS = st.lists(st.sampled_from([0.0, 0.2, 0.8, 1.0, None]) | st.floats(-2, 2), min_size=2, max_size=32)


@given(REWARDS, st.sampled_from([0, 1]), st.booleans(), st.randoms())
def test_property_2_advantages_sum_to_zero_in_any_order(rewards: list[float | None], ddof: int, normalise: bool, random) -> None:
    advantages = group_advantages(rewards, ddof, normalise)
    assert abs(advantages.sum()) < 1e-9 * len(rewards)
    order = list(range(len(rewards)))
    random.shuffle(order)
    np.testing.assert_array_equal(group_advantages([rewards[i] for i in order], ddof, normalise), advantages[order])
