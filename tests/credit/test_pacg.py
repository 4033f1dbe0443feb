"""Gates from persistence: EX-6.4 to EX-6.8, invalid claims, and what may never happen."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.credit.pacg import FORMS, corrected_persistence, gate, token_gates
from headrace.kernels import PolicySpec, policy_loss

LOGPROBS = [-0.20, -0.50, -0.30, -0.10, -0.40, -0.05, -0.30, -0.20, -0.40, -0.60]
DEGRADED = [-0.25, -0.52, -0.31, -0.20, -1.30, -0.07, -0.33, -0.22, -0.45, -0.68]
CLAIMS = [[1, 2], [2, 3, 4]]
POSITIVE, NEGATIVE = 1.7320508, -0.5773503

EX_6_4 = {
    -0.30: (1, 1, 1),
    -0.1369: (1, 1, 1),
    -0.05: (1, 1, 1),
    -0.04: (0.904837, 0.933386, 0.9),
    -0.02: (0.740818, 0.818573, 0.7),
    0.0: (0.606531, 0.724571, 0.5),
    0.02: (0.496585, 0.647610, 0.3),
    0.05: (0.367879, 0.557516, 0.3),
    0.5: (0.3, 0.302861, 0.3),
}
nats = st.floats(-25, 25)
small = st.floats(-1, 1)


@pytest.mark.parametrize(("delta", "expected"), EX_6_4.items())
def test_ex_6_4(delta: float, expected: tuple[float, float, float]) -> None:
    np.testing.assert_allclose([gate(delta, form=form) for form in FORMS], expected, atol=6e-7)


def test_ex_6_4_where_form_a_meets_its_floor() -> None:
    np.testing.assert_allclose([gate(0.0704, form=form) for form in FORMS], [0.3, 0.509994, 0.3], atol=2e-5)
    assert gate(0.0703) > 0.3 == gate(0.0705)


def test_ex_6_5_margin_sweep() -> None:
    np.testing.assert_allclose([gate(0.0, margin=margin) for margin in (0, 0.05, 0.10)], [1, 0.606531, 0.367879], atol=6e-7)


def test_ex_6_6() -> None:
    delta, valid = corrected_persistence(LOGPROBS, DEGRADED, CLAIMS)
    np.testing.assert_allclose(delta, [0.026667, -0.295], atol=6e-7)
    assert valid.all()
    np.testing.assert_allclose(gate(delta), [0.464559, 1], atol=6e-7)
    gates = token_gates(delta, CLAIMS, 10)
    expected = np.ones(10)
    expected[[1, 2]] = 0.464559
    np.testing.assert_allclose(gates, expected, atol=6e-7)
    np.testing.assert_allclose((gates * POSITIVE)[[1, 0]], [0.804640, 1.732051], atol=2e-6)
    routed = [1, 2, 3, 4]
    np.testing.assert_allclose([gates[routed].mean(), gates.mean()], [0.732280, 0.892912], atol=6e-7)


def test_ex_6_7_without_the_residual_mean() -> None:
    delta, valid = corrected_persistence(LOGPROBS, DEGRADED, CLAIMS, calibrate=False)
    assert valid.all()
    np.testing.assert_allclose(gate(delta)[0], 0.704688, atol=6e-7)
    shifted = np.array(DEGRADED) - 0.3
    np.testing.assert_allclose(corrected_persistence(LOGPROBS, shifted, CLAIMS)[0][0], 0.026667, atol=6e-7)
    uncorrected = corrected_persistence(LOGPROBS, shifted, CLAIMS, calibrate=False)[0][0]
    np.testing.assert_allclose([uncorrected, gate(uncorrected)], [-0.315, 1], atol=6e-7)


@pytest.mark.parametrize(
    ("claims", "excluded", "valid"),
    [
        ([[0, 1, 2]], (), [False]),  # nothing left to calibrate by
        ([[0]], [1, 2], [False]),
        ([[0], [1]], [0], [False, True]),  # a claim whose only token was drawn under a mask
        ([[]], (), [False]),
    ],
)
def test_claims_that_cannot_be_judged_are_invalid_and_pass_everything(claims, excluded, valid) -> None:
    delta, found = corrected_persistence([-1.0, -2, -3], [-1.5, -2, -3.5], claims, excluded)
    assert found.tolist() == valid
    assert np.isnan(delta).tolist() == [not ok for ok in valid]
    assert (token_gates(delta, claims, 3)[[place for claim, ok in zip(claims, valid, strict=True) if not ok for place in claim]] == 1).all()


def test_values_that_are_not_finite_invalidate_what_they_touch() -> None:
    clean, degraded = [-1.0, -2, -3, -4], [-1.0, float("nan"), -3, -4]
    assert corrected_persistence(clean, degraded, [[1], [2]])[1].tolist() == [False, True]
    assert corrected_persistence(clean, degraded, [[2]])[1].tolist() == [False]
    assert gate([np.nan, np.inf, -np.inf]).tolist() == [1, 1, 1]


def test_masked_positions_count_neither_in_claims_nor_in_the_rest() -> None:
    degraded = [*DEGRADED]
    degraded[1] = degraded[9] = -15.0
    delta, _ = corrected_persistence(LOGPROBS, degraded, CLAIMS, excluded=[1, 9])
    rest = np.mean([-0.05, -0.02, -0.03, -0.02, -0.05])
    np.testing.assert_allclose(delta, [-0.01 - rest, np.mean([-0.01, -0.10, -0.90]) - rest], atol=1e-12)


@given(st.lists(st.tuples(small, small), min_size=4, max_size=12), small)
def test_a_shift_of_every_token_alike_changes_nothing(pairs, shift) -> None:
    clean, degraded = np.array(pairs).T
    claims = [[0], [0, 1], [1, 2]]
    one, two = (corrected_persistence(clean, values, claims)[0] for values in (degraded, degraded + shift))
    np.testing.assert_allclose(one, two, atol=1e-12)


@given(st.lists(nats, min_size=1, max_size=6), nats, st.floats(0, 0.5), st.floats(0, 50), st.floats(0, 1), st.sampled_from("ABC"))
def test_more_persistence_never_opens_a_gate_and_gates_stay_in_range(values, raised, margin, alpha, floor, form) -> None:
    ordered = np.sort([*values, raised])
    gates = gate(ordered, margin, alpha, floor, form)
    assert (np.diff(gates) <= 1e-15).all()
    assert ((gates >= floor - 1e-15) & (gates <= 1)).all()
    assert (gates[ordered <= -margin] == 1).all()


@given(st.lists(nats, min_size=1, max_size=6), st.sampled_from("ABC"))
def test_no_strength_or_a_floor_of_one_leaves_everything_open(values, form) -> None:
    assert (gate(values, alpha=0.0, form=form) == 1).all()
    assert (gate(values, floor=1.0, form=form) == 1).all()


def surrogate(ratio: float, gate_value: float) -> tuple[float, float]:
    """Value of a positive token's objective at DAPO's clip, and its gradient in the log-prob."""
    logprob = torch.tensor([np.log(ratio)], dtype=torch.float64, requires_grad=True)
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    loss = policy_loss(logprob, zero, zero, POSITIVE * one, one, PolicySpec(clip_high=0.28), gates=gate_value * one).loss
    (gradient,) = torch.autograd.grad(loss, logprob)
    return -loss.item(), -gradient.item()


@given(st.floats(0.05, 20), st.floats(0.3, 1))
def test_a_gate_scales_the_gradient_and_keeps_the_branch_of_the_clip(ratio: float, value: float) -> None:
    """The most a token's objective can lose is (1 - floor) A (1 + clip_high)."""
    (whole, slope), (gated, gated_slope) = surrogate(ratio, 1.0), surrogate(ratio, value)
    assert gated_slope == pytest.approx(value * slope, rel=1e-12)
    assert (gated_slope == 0) == (slope == 0) == (ratio > 1.28)
    assert whole - gated <= 0.7 * POSITIVE * 1.28 + 1e-9


def test_ex_6_6_the_bound_is_reached_beyond_the_clip() -> None:
    assert surrogate(1.5, 1.0)[0] - surrogate(1.5, 0.3)[0] == pytest.approx(1.551918, abs=1e-6)
