"""VPPO and PACG on batches: what they change, what they leave alone, EX-6.6 to EX-6.8, EX-7.3, and what they measure."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.config import CreditConfig, LossConfig
from headrace.credit.rules import credit_rules
from headrace.kernels import PolicySpec, policy_loss
from headrace.policy.packing import build_batch, take_rows
from headrace.records import CounterfactualScores, CreditRule, Media, StepBatch
from tests.policy.learner_cases import SAMPLING, make_group, make_rollout, random_groups

PICTURE = (Media("image", "a.png"),)
ROUTER = {"kind": "rules", "patterns": ["x"]}
CLEAN = [-0.20, -0.50, -0.30, -0.10, -0.40, -0.05, -0.30, -0.20, -0.40, -0.60]
DEGRADED = [-0.25, -0.52, -0.31, -0.20, -1.30, -0.07, -0.33, -0.22, -0.45, -0.68]
CLAIMS = ((1, 3), (2, 5))


def rules(**config: Any) -> list[CreditRule]:
    if "pacg" in config and config["pacg"].get("claims", "routed") == "routed":
        config["pacg"].setdefault("router", ROUTER)
    return credit_rules(CreditConfig.model_validate(config))


def one_row(advantage: float, claims: Any = CLAIMS, clean: Any = CLEAN, masked: Any = None) -> StepBatch:
    """A response and a second one without an advantage that keeps the group a group."""
    rollouts = [replace(make_rollout(0, clean, masked), claims=claims), make_rollout(1, [-1.0])]
    return build_batch([make_group(rollouts, [advantage, 0], media=PICTURE, name="q1")], LossConfig(), SAMPLING)


def scores_of(batch: StepBatch, degraded: Any, rows: Any = None) -> CounterfactualScores:
    """CounterfactualScores whose clean half is the behaviour policy's."""
    other = np.zeros(len(batch.token_ids), dtype=np.float32)
    flat = np.concatenate([np.asarray(values, dtype=np.float32) for values in degraded])
    other[batch.response_mask] = flat
    scored = np.array([bool(media) for media in batch.media]) if rows is None else np.asarray(rows)
    return CounterfactualScores(scored, batch.loss_mask, batch.old_logprobs, other, np.abs(other))


def response(batch: StepBatch, name: str, row: int = 0) -> np.ndarray:
    part = take_rows(batch, [row])
    return getattr(part, name)[part.response_mask]


def random_batch(seed: int, groups: int = 4, pictures: bool = True) -> tuple[StepBatch, CounterfactualScores]:
    """Random responses with random claims and random scores."""
    rng = np.random.default_rng(seed)
    made = []
    for group in random_groups(rng, groups):
        rollouts = []
        for rollout in group.rollouts:
            length = len(rollout.completion.token_ids)
            cuts = np.sort(rng.integers(0, length + 1, (2, 2)), axis=1)
            rollouts.append(replace(rollout, claims=tuple((int(a), int(b)) for a, b in cuts if b > a)))
        question = replace(group.prompt.question, media=PICTURE if pictures else ())
        made.append(replace(group, rollouts=tuple(rollouts), prompt=replace(group.prompt, question=question)))
    batch = build_batch(made, LossConfig(), SAMPLING)
    noise = rng.normal(0, 0.1, int(batch.response_mask.sum()))
    return batch, scores_of(batch, [batch.old_logprobs[batch.response_mask] + noise])


def apply(batch: StepBatch, scores: CounterfactualScores, **config: Any) -> StepBatch:
    for rule in rules(**config):
        batch = rule.refine(batch, scores)
    return batch


# ------------------------------------------------------------------------------------------------------ worked numbers


def test_ex_6_6_token_credit() -> None:
    batch = one_row(1.7320508)
    refined = apply(batch, scores_of(batch, [DEGRADED, [-1.0]]), pacg={})
    credits = response(refined, "gates") * response(refined, "advantages")
    np.testing.assert_allclose(credits[[1, 2]], 0.804640, atol=2e-6)
    np.testing.assert_allclose(credits[[0, 3, 4, 9]], 1.732051, atol=2e-6)
    assert refined.measured["pacg/retention"] == pytest.approx(0.732280, abs=1e-6)
    assert refined.measured["pacg/attenuated_share"] == 0.5
    assert refined.measured["pacg/span_gate"] == pytest.approx((0.464559 + 1) / 2, abs=1e-6)
    assert refined.measured["pacg/delta_mean"] == pytest.approx((0.026667 - 0.295) / 2, abs=1e-6)
    assert refined.measured["pacg/margin_violations"] == 0.5
    assert refined.measured["pacg/floor_share"] == 0
    assert refined.measured["pacg/direct_tokens"] == pytest.approx(0.4)
    assert refined.measured["pacg/intervention_valid"] == refined.measured["pacg/routed_rollouts"] == 1
    assert refined.measured["pacg/efs"] == pytest.approx((np.mean([0.52, 0.31]) + np.mean([0.31, 0.2, 1.3])) / 2)


def test_ex_6_6_a_negative_advantage_is_not_even_scored() -> None:
    batch = one_row(-0.5773503)
    (rule,) = rules(pacg={})
    assert rule.wanted(batch) == [(), ()]
    refined = rule.refine(batch, scores_of(batch, [DEGRADED, [-1.0]]))
    assert (refined.gates == 1).all()
    np.testing.assert_array_equal(refined.advantages, batch.advantages)


def test_ex_6_7_residual_ablation() -> None:
    batch = one_row(1.0)
    refined = apply(batch, scores_of(batch, [DEGRADED, [-1.0]]), pacg={"calibrate": False})
    np.testing.assert_allclose(response(refined, "gates")[[1, 2]], 0.704688, atol=1e-6)


@pytest.mark.parametrize(("advantage", "expected"), [(0.5, [0, 0.33, 0, 0.165, 0]), (-0.5, [0, -0.55, 0, -0.55, 0])])
def test_ex_6_8_the_loss_gates_what_vppo_scaled_and_selected(advantage: float, expected: list[float]) -> None:
    """The loss's gradient at ratio 1 is minus the token's credit."""
    import torch

    scaled = torch.full((5,), 1.1 * advantage, dtype=torch.float64)
    logprobs = torch.full((5,), -1.0, dtype=torch.float64, requires_grad=True)
    gates = torch.tensor([1, 0.6, 1, 0.3, 1], dtype=torch.float64)
    mask = torch.tensor([0, 1, 0, 1, 0], dtype=torch.bool)
    entropies, weights = torch.zeros(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    loss = policy_loss(logprobs, entropies, logprobs.detach(), scaled, weights, PolicySpec(), gates=gates, mask=mask).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)
    np.testing.assert_allclose(-gradient.numpy(), expected, atol=1e-12)


def test_ex_7_1_and_7_3_vppo_keeps_two_of_five_tokens_and_all_of_the_denominator() -> None:
    batch = one_row(1.2, clean=[-0.2, -1, -0.3, -2, -0.1])
    refined = apply(batch, scores_of(batch, [[-0.25, -2.5, -0.3, -1.2, -0.6], [-1.0]]), vppo={})
    assert response(refined, "loss_mask").tolist() == [False, True, False, True, False]
    np.testing.assert_array_equal(refined.loss_weight, batch.loss_weight)
    alone = response(refined, "advantages") * response(refined, "loss_mask")
    assert alone.sum() / 5 == pytest.approx(0.48)
    assert refined.measured["vppo/dependency_selected"] == pytest.approx((0.723130 + 0.425541) / 2, abs=1e-6)
    assert refined.measured["vppo/dependency_unselected"] == pytest.approx((0.001229 + 0 + 0.106531) / 3, abs=1e-6)


def test_ex_7_2_one_scale_for_the_whole_step() -> None:
    """Means .1 .3 .5 .2, whose statistics two devices of two would get wrong."""
    grid = np.linspace(0, 2, 400_001)
    changes = np.interp([0.1, 0.3, 0.5, 0.2], np.expm1(grid) - grid, grid)  # of a response's only token
    groups = [make_group([make_rollout(0, [-1.0]), make_rollout(1, [-1.0])], [1, -1], media=PICTURE, name=name) for name in "ab"]
    batch = build_batch(groups, LossConfig(), SAMPLING)
    refined = apply(batch, scores_of(batch, [[-1 + change] for change in changes]), vppo={"fraction": 1.0})
    scales = refined.advantages[refined.response_mask] / batch.advantages[batch.response_mask]
    np.testing.assert_allclose(scales, [0.9, 1.014286, 1.128571, 0.957143], atol=1e-5)
    assert refined.measured["vppo/scale_max"] == pytest.approx(1.128571, abs=1e-5)


# ------------------------------------------------------------------------------------------------------ properties


@pytest.mark.parametrize("open_gate", [{"alpha": 0.0}, {"floor": 1.0}, {"positive_only": False, "alpha": 0.0}])
@pytest.mark.parametrize("parent", [{}, {"vppo": {}}])
def test_gate_one_everywhere_is_bit_equal_to_the_parent(parent: dict, open_gate: dict) -> None:
    batch, scores = random_batch(0)
    alone, gated = apply(batch, scores, **parent), apply(batch, scores, **parent, pacg=open_gate)
    for name in ("gates", "advantages", "loss_mask", "loss_weight", "old_logprobs"):
        assert getattr(alone, name).tobytes() == getattr(gated, name).tobytes(), name
    assert gated.measured["pacg/retention"] == 1


@pytest.mark.parametrize("seed", range(5))
def test_gates_touch_positive_claim_tokens_alone_and_stay_in_range(seed: int) -> None:
    batch, scores = random_batch(seed)
    refined = apply(batch, scores, pacg={})
    in_claim = np.zeros(len(batch.token_ids), dtype=bool)
    for row, spans in enumerate(batch.claims):
        start = batch.cu_seqlens[row + 1] - response(batch, "gates", row).size
        for first, last in spans or ():
            in_claim[start + first : start + last] = True
    attenuated = refined.gates < 1
    assert attenuated.any()
    assert not (attenuated & ~(in_claim & (batch.advantages > 0))).any()
    assert (refined.gates >= np.float32(0.3)).all()
    np.testing.assert_array_equal(refined.advantages, batch.advantages)


@pytest.mark.parametrize("seed", range(5))
def test_a_shift_of_every_response_token_moves_no_gate(seed: int) -> None:
    batch, scores = random_batch(seed)
    shifted = replace(scores, logprobs_cf=scores.logprobs_cf - np.float32(0.25))
    np.testing.assert_allclose(apply(batch, scores, pacg={}).gates, apply(batch, shifted, pacg={}).gates, atol=1e-5)
    uncalibrated = [apply(batch, values, pacg={"calibrate": False}).gates for values in (scores, shifted)]
    assert np.abs(uncalibrated[0] - uncalibrated[1]).max() > 0.1


def test_rows_in_another_order_get_the_same_credit() -> None:
    batch, scores = random_batch(3)
    order = np.random.default_rng(0).permutation(len(batch.prompts))
    positions = np.concatenate([np.arange(*batch.cu_seqlens[row : row + 2]) for row in order])
    per_token = {name: getattr(scores, name)[positions] for name in ("logprobs", "own", "logprobs_cf", "kl")}
    one = apply(batch, scores, vppo={}, pacg={})
    two = apply(take_rows(batch, order), replace(scores, rows=scores.rows[order], **per_token), vppo={}, pacg={})
    for name in ("gates", "loss_mask"):
        np.testing.assert_array_equal(getattr(one, name)[positions], getattr(two, name))
    np.testing.assert_allclose(one.advantages[positions], two.advantages, rtol=1e-6)
    assert one.measured == pytest.approx(two.measured)


def test_only_responses_that_can_change_the_update_are_scored() -> None:
    batch, _ = random_batch(1)
    positive, signed = (np.array([(response(batch, "advantages", row) * sign > 0).any() for row in range(16)]) for sign in (1, -1))
    spoken = np.array([bool(claims) for claims in batch.claims])
    assert [bool(media) for media in rules(pacg={})[0].wanted(batch)] == (positive & spoken).tolist()
    assert [bool(media) for media in rules(pacg={"positive_only": False})[0].wanted(batch)] == ((positive | signed) & spoken).tolist()
    assert [bool(media) for media in rules(pacg={"claims": "every_token"})[0].wanted(batch)] == positive.tolist()
    assert [bool(media) for media in rules(vppo={})[0].wanted(batch)] == (positive | signed).tolist()
    for config in ({"vppo": {}}, {"pacg": {}}):
        assert not any(rules(**config)[0].wanted(random_batch(1, pictures=False)[0]))
    both = [rule.wanted(batch) for rule in rules(vppo={}, pacg={})]
    assert all(ours in ((), theirs) for theirs, ours in zip(*both, strict=True))


def test_masked_tokens_count_in_no_mean() -> None:
    masked = np.isin(np.arange(10), [1, 9])
    batch = one_row(1.0, masked=masked)
    degraded = [*DEGRADED]
    degraded[1] = degraded[9] = -12.0
    refined = apply(batch, scores_of(batch, [degraded, [-1.0]]), pacg={})
    rest = np.mean([-0.05, -0.02, -0.03, -0.02, -0.05])
    assert refined.measured["pacg/delta_mean"] == pytest.approx(np.mean([-0.01, np.mean([-0.01, -0.10, -0.90])]) - rest, abs=1e-6)


def test_vppo_hides_no_token_from_the_means_of_pacg() -> None:
    batch = one_row(1.0)
    scores = scores_of(batch, [DEGRADED, [-1.0]])
    one, two = apply(batch, scores, pacg={}), apply(batch, scores, vppo={}, pacg={})
    np.testing.assert_array_equal(one.gates, two.gates)
    assert two.loss_mask.sum() < one.loss_mask.sum()
    # S is largest on 4, 3, 9 and then 0: attenuated are 1 and 2
    assert two.measured["pacg/selection_jaccard"] == two.measured["pacg/attenuated_selected"] == 0


def test_the_ablation_of_both_signs_scales_advantages_and_sets_no_gate() -> None:
    batch = one_row(-1.0)
    refined = apply(batch, scores_of(batch, [DEGRADED, [-1.0]]), pacg={"positive_only": False})
    assert (refined.gates == 1).all()
    np.testing.assert_allclose(response(refined, "advantages")[:4], [-1, -0.464559, -0.464559, -1], atol=1e-6)


def test_the_ablation_without_routing_makes_every_token_a_claim() -> None:
    batch = one_row(1.0, claims=None)
    refined = apply(batch, scores_of(batch, [DEGRADED, [-1.0]]), pacg={"claims": "every_token"})
    change = np.subtract(DEGRADED, CLEAN)
    np.testing.assert_allclose(response(refined, "gates"), np.maximum(0.3, np.exp(-10 * np.maximum(0, change + 0.05))), atol=1e-5)


def test_what_cannot_be_judged_passes_everything() -> None:
    batch = one_row(1.0)
    nan = np.full(10, np.nan)
    for degraded, rows in (([nan, [-1.0]], [True, True]), ([DEGRADED, [-1.0]], [False, False])):
        refined = apply(batch, scores_of(batch, degraded, rows), vppo={}, pacg={})
        assert (refined.gates == 1).all()
        np.testing.assert_array_equal(refined.loss_mask, batch.loss_mask)
        np.testing.assert_array_equal(refined.advantages, batch.advantages)
        assert refined.measured["pacg/intervention_valid"] == 0
    whole = one_row(1.0, claims=((0, 10),))
    assert (apply(whole, scores_of(whole, [DEGRADED, [-1.0]]), pacg={}).gates == 1).all()
