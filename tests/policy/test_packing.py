"""From groups to rows: streams, denominators, and who runs what."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import LossConfig
from headrace.kernels import PolicySpec, policy_loss
from headrace.policy.packing import (
    build_batch,
    deal_rows,
    loss_weights,
    micro_batches,
    response_lengths,
    rows_with_gradient,
    schedule,
    split_batch,
    take_rows,
)
from headrace.policy.score import predicted
from headrace.records import Intervention, Media, StepBatch
from headrace.wire import pack, unpack
from tests.policy.learner_cases import SAMPLING, make_group, make_rollout, random_groups


def replace_media(group, media):
    return make_group(group.rollouts, group.advantages, group.prompt.token_ids, group.prompt.question.id, media)


def surrogate(batch, ratios, spec=None):
    """J of the batch when response tokens have these probability ratios: minus the kernel's loss."""
    logprobs = np.array(batch.old_logprobs)
    logprobs[batch.response_mask] += np.log(np.concatenate(ratios))
    tensors = [torch.from_numpy(np.ascontiguousarray(x)) for x in (logprobs, np.zeros_like(logprobs))]
    streams = [torch.from_numpy(x) for x in (batch.old_logprobs, batch.advantages, batch.loss_weight)]
    spec = spec or PolicySpec()
    cu = torch.from_numpy(batch.cu_seqlens)
    result = policy_loss(
        *tensors, *streams, spec, gates=torch.from_numpy(batch.gates), mask=torch.from_numpy(batch.loss_mask), cu_seqlens=cu
    )
    return -float(result.loss)


# ------------------------------------------------------------------------------------------------------ worked numbers


@pytest.mark.parametrize(("normalisation", "expected"), [("token_mean", -0.5), ("sequence_mean", 0.0), ("constant", -2.0 / 8)])
def test_ex_3_7_aggregation(normalisation, expected):
    """A = +1 on 2 tokens and −1 on 6, ratio 1; the constant form divides by sequences x max_tokens (sequence sum −2)."""
    group = make_group([make_rollout(0, [-1.0] * 2), make_rollout(1, [-1.0] * 6)], [1, -1])
    batch = build_batch([group], LossConfig(normalisation=normalisation), SAMPLING)
    assert surrogate(batch, [np.ones(2), np.ones(6)]) == pytest.approx(expected, abs=1e-6)


def test_ex_3_6_token_objectives_through_a_batch():
    """(ratio, A) -> objective with clip .2 / .3, one token a row, so that J is their mean."""
    cases = [(1, 1, 1), (1.5, 1, 1.3), (0.5, 1, 0.5), (0.5, -1, -0.8), (1.5, -1, -1.5), (12, -1, -12), (0.05, 1, 0.05), (0.05, -1, -0.8)]
    group = make_group([make_rollout(i, [-3.0]) for i in range(len(cases))], [a for _, a, _ in cases])
    batch = build_batch([group], LossConfig(), SAMPLING)
    ratios = [np.array([float(r)]) for r, _, _ in cases]
    assert surrogate(batch, ratios) == pytest.approx(np.mean([j for _, _, j in cases]), abs=1e-5)
    floored = [max(j, -10) for _, _, j in cases]
    assert surrogate(batch, ratios, PolicySpec(dual_clip=10.0)) == pytest.approx(np.mean(floored), abs=1e-5)


def test_ex_4_6_mask_leaves_the_sum_and_not_the_denominator():
    ratios = [np.array([1, 1.4, 0.9]), np.array([0.05, 1])]
    plain = make_group([make_rollout(0, [-1.0] * 3), make_rollout(1, [-3.0, -1.0])], [1, -1])
    masked = make_group([make_rollout(0, [-1.0] * 3), make_rollout(1, [-3.0, -1.0], masked=[1, 0])], [1, -1])
    assert surrogate(build_batch([plain], LossConfig(), SAMPLING), ratios) == pytest.approx(0.28, abs=1e-6)
    batch = build_batch([masked], LossConfig(), SAMPLING)
    assert surrogate(batch, ratios) == pytest.approx(0.44, abs=1e-6)
    assert batch.loss_weight[batch.response_mask] == pytest.approx(1 / 5)
    assert batch.loss_mask.sum() == 4


def test_ex_7_3_selected_tokens_are_divided_by_all():
    """A 1.2, five tokens, two kept -> J = .48 (divided by 5), not 1.2."""
    batch = build_batch([make_group([make_rollout(0, [-1.0] * 5)], [1.2])], LossConfig(), SAMPLING)
    keep = np.flatnonzero(batch.response_mask)[[1, 3]]
    batch.loss_mask[:] = False
    batch.loss_mask[keep] = True
    assert surrogate(batch, [np.ones(5)]) == pytest.approx(0.48, abs=1e-6)


def test_ex_7_gspo_ratio_of_a_packed_row():
    """Log-ratios .2 −.1 .05 -> sequence ratio 1.051271, clipped to 1.0004; a second row does not leak into it."""
    group = make_group([make_rollout(0, [-1.0] * 3), make_rollout(1, [-1.0] * 2)], [1, 0])
    batch = build_batch([group], LossConfig(kind="gspo", normalisation="sequence_mean"), SAMPLING)
    spec = PolicySpec(kind="gspo", clip_low=3e-4, clip_high=4e-4)
    assert surrogate(batch, [np.exp([0.2, -0.1, 0.05]), np.exp([5.0, 5.0])], spec) == pytest.approx(1.0004 / 2, abs=1e-6)


def test_ex_7_cispo_weights_of_a_packed_row():
    """Log-ratios .5 −.5 .1 -> weights 1.3 .8 1.105171 on A log π."""
    batch = build_batch([make_group([make_rollout(0, [-1.0] * 3)], [1])], LossConfig(kind="cispo"), SAMPLING)
    weights, logprobs = np.array([1.3, 0.8, 1.105171]), -1.0 + np.array([0.5, -0.5, 0.1])
    assert surrogate(batch, [np.exp([0.5, -0.5, 0.1])], PolicySpec(kind="cispo")) == pytest.approx((weights * logprobs).mean(), abs=1e-5)


# ------------------------------------------------------------------------------------------------------ streams


def test_streams_are_aligned_with_their_tokens():
    media = (Media("image", "a.png", max_pixels=64),)
    group = make_group([make_rollout(0, [-0.5, -0.25]), make_rollout(1, [-0.125])], [2.0, -1.0], prompt=[4, 5, 6], media=media)
    batch = build_batch([group], LossConfig(), SAMPLING)
    assert batch.token_ids.tolist() == [4, 5, 6, 50, 51, 4, 5, 6, 50]
    assert batch.cu_seqlens.tolist() == [0, 5, 9]
    assert batch.response_mask.tolist() == [False, False, False, True, True, False, False, False, True]
    assert batch.old_logprobs.tolist() == [0, 0, 0, -0.5, -0.25, 0, 0, 0, -0.125]
    assert batch.advantages.tolist() == [0, 0, 0, 2, 2, 0, 0, 0, -1]
    assert (batch.prompts.tolist(), batch.media) == ([0, 0], (media, media))
    assert predicted(batch.old_logprobs).tolist() == [0, 0, -0.5, -0.25, 0, 0, 0, -0.125, 0]


def test_what_cannot_train_is_left_out_of_rows_and_denominators_and_counted():
    rollouts = [
        make_rollout(0, [-1.0, -1.0]),
        make_rollout(1, [-1.0] * 7, reward=None),
        make_rollout(2, [-1.0] * 7, failure="timeout"),
        make_rollout(3, []),
        make_rollout(4, [-1.0, np.nan]),
    ]
    batch = build_batch([make_group(rollouts, [1, 9, 9, 9, -1])], LossConfig(), SAMPLING)
    assert dict(batch.left_out) == {"unscored": 2, "empty": 1, "non_finite": 1}
    assert len(batch.prompts) == 2
    assert batch.loss_weight[batch.response_mask] == pytest.approx(1 / 4)
    assert batch.loss_mask.sum() == 3
    assert np.isfinite(batch.old_logprobs).all()


def test_a_batch_of_nothing_is_a_batch():
    batch = build_batch([make_group([make_rollout(0, [-1.0], reward=None)], [0])], LossConfig(), SAMPLING)
    assert (len(batch.token_ids), batch.cu_seqlens.tolist()) == (0, [0])
    assert schedule(batch, rows_with_gradient(batch, False), 2, 8) == [[], []]


def test_faults_are_named():
    with pytest.raises(ValueError, match=r"question q: expected one advantage per rollout \(1\), got 2"):
        build_batch([make_group([make_rollout(0, [-1.0])], [1, 1])], LossConfig(), SAMPLING)
    with pytest.raises(ValueError, match="the prompt has no token"):
        build_batch([make_group([make_rollout(0, [-1.0])], [1], prompt=[])], LossConfig(), SAMPLING)


def test_zero_variance_groups_stay_in_the_denominator_and_cost_no_gradient():
    rng = np.random.default_rng(0)
    batch = build_batch(random_groups(rng, 4, zero_groups=2), LossConfig(), SAMPLING)
    assert batch.loss_weight[batch.response_mask] == pytest.approx(1 / batch.response_mask.sum())
    gradient = rows_with_gradient(batch, every_token=False)
    assert gradient.tolist() == [False] * 8 + [bool(m) for m in response_lengths(batch.loss_mask, batch.cu_seqlens)[8:] > 0]
    assert rows_with_gradient(batch, every_token=True).all()


def test_a_batch_survives_the_way_between_ranks():
    rng = np.random.default_rng(1)
    groups = random_groups(rng, 3)
    media = (Media("video", "ü.mp4", frames=4, intervention=Intervention("blur", 2**64 - 1)),)
    rollouts = [replace(rollout, claims=((0, 1),)) for rollout in groups[0].rollouts]
    groups[0] = make_group(rollouts, groups[0].advantages, media=media)
    batch = build_batch(groups, LossConfig(), SAMPLING)
    copy = unpack(pack(batch), StepBatch)
    for name in batch.__dataclass_fields__:
        ours, theirs = getattr(batch, name), getattr(copy, name)
        if isinstance(ours, np.ndarray):
            assert ours.dtype == theirs.dtype
            assert np.array_equal(ours, theirs)
        else:
            assert ours == theirs
    with pytest.raises(ValueError, match=r"."):
        unpack(pack(batch)[:-8], StepBatch)


# ------------------------------------------------------------------------------------------------------ plan


@given(
    seed=st.integers(0, 10**6),
    groups=st.integers(1, 6),
    parts=st.integers(1, 8),
    kind=st.sampled_from(["token_mean", "sequence_mean", "constant"]),
)
@settings(max_examples=40, deadline=None)
def test_mini_batches_have_whole_groups_and_their_own_denominator(seed, groups, parts, kind):
    loss = LossConfig(normalisation=kind)
    made = random_groups(np.random.default_rng(seed), groups)
    batch = build_batch(made, loss, SAMPLING)
    minis = split_batch(batch, parts, loss, SAMPLING)
    assert len(minis) == min(parts, groups)
    assert np.concatenate([mini.prompts for mini in minis]).tolist() == batch.prompts.tolist()
    sizes = [len(np.unique(mini.prompts)) for mini in minis]
    assert max(sizes) - min(sizes) <= 1
    for mini in minis:
        alone = build_batch([made[g] for g in np.unique(mini.prompts)], loss, SAMPLING)
        assert np.array_equal(mini.loss_weight, alone.loss_weight)
        assert np.array_equal(mini.token_ids, alone.token_ids)
        if kind != "constant":
            assert mini.loss_weight.sum() == pytest.approx(1, abs=1e-5)


@given(seed=st.integers(0, 10**6), budget=st.integers(1, 80), world_size=st.integers(1, 4), zero=st.integers(0, 3))
@settings(max_examples=80, deadline=None)
def test_the_plan_runs_every_row_once_and_matches_over_ranks(seed, budget, world_size, zero):
    batch = build_batch(random_groups(np.random.default_rng(seed), 3, zero_groups=zero), LossConfig(), SAMPLING)
    lengths = np.diff(batch.cu_seqlens)
    gradient = rows_with_gradient(batch, every_token=False)
    plans = schedule(batch, gradient, world_size, budget)
    assert plans == schedule(batch, gradient, world_size, budget)
    assert len({tuple(micro.gradient for micro in plan) for plan in plans}) == 1
    real = [micro for plan in plans for micro in plan if not micro.filler]
    assert sorted(row for micro in real for row in micro.rows) == list(range(len(lengths)))
    for micro in real:
        assert all(gradient[row] == micro.gradient for row in micro.rows)
        assert lengths[list(micro.rows)].sum() <= budget or len(micro.rows) == 1
    if world_size == 1:
        assert len(real) == len(plans[0])


def test_ranks_get_equal_loads():
    rng = np.random.default_rng(3)
    batch = build_batch(random_groups(rng, 16, size=8, longest=200), LossConfig(), SAMPLING)
    lengths = np.diff(batch.cu_seqlens)
    loads = [lengths[share].sum() for share in deal_rows(batch, 4)]
    assert max(loads) - min(loads) <= lengths.max()


def test_packing_wastes_less_than_half_a_micro_batch():
    rng = np.random.default_rng(4)
    batch = build_batch(random_groups(rng, 16, size=8, longest=100), LossConfig(), SAMPLING)
    total = int(batch.cu_seqlens[-1])
    bins = micro_batches(batch, range(128), 1000)
    assert len(bins) <= -(-total // 1000) + 1
    loads = [np.diff(batch.cu_seqlens)[rows].sum() for rows in bins]
    assert max(loads) <= 1000


def test_rows_that_share_a_picture_stay_together():
    """A trained vision tower then meets each picture once, not once per micro-batch; the budget and the balance still hold."""
    rng = np.random.default_rng(6)
    groups = [replace_media(group, (Media("image", f"{number}.png"),)) for number, group in enumerate(random_groups(rng, 12, size=8))]
    batch = build_batch(groups, LossConfig(), SAMPLING)
    lengths = np.diff(batch.cu_seqlens)
    bins = micro_batches(batch, range(96), 300)
    assert sorted(row for rows in bins for row in rows) == list(range(96))
    assert max(lengths[rows].sum() for rows in bins) <= 300
    assert sum(len(np.unique(batch.prompts[rows])) for rows in bins) == 12
    shares = deal_rows(batch, 2)
    assert not set(batch.prompts[shares[0]]) & set(batch.prompts[shares[1]])
    loads = [lengths[share].sum() for share in shares]
    assert max(loads) - min(loads) < lengths.sum() / 4
    assert sorted(row for rows in micro_batches(batch, range(96), 20) for row in rows) == list(range(96))


def test_rows_keep_their_streams_when_taken():
    batch = build_batch(random_groups(np.random.default_rng(5), 3), LossConfig(), SAMPLING)
    rows = [7, 0, 11]
    part = take_rows(batch, rows)
    for place, row in enumerate(rows):
        there, here = slice(*batch.cu_seqlens[row : row + 2]), slice(*part.cu_seqlens[place : place + 2])
        for name in ("token_ids", "response_mask", "loss_mask", "loss_weight", "old_logprobs", "advantages", "gates"):
            assert np.array_equal(getattr(batch, name)[there], getattr(part, name)[here])
    assert part.prompts.tolist() == batch.prompts[rows].tolist()


def test_weights_of_a_row_without_response_are_zero():
    weights = loss_weights(np.array([False, False, False, True]), np.array([0, 2, 4]), "sequence_mean", 8)
    assert weights.tolist() == [0, 0, 0, 0.5]


def test_a_rollout_of_another_question_keeps_its_own_prompt_and_pictures():
    """HSR over the whole batch: each donor keeps its own prompt in the forward pass."""
    here = make_group([make_rollout(0, [-1.0])], [1.0], prompt=(1, 2, 3), name="here")
    there = make_group([make_rollout(0, [-2.0, -2.0])], [1.0], prompt=(4, 5), name="there", media=(Media("image", "there.png"),))
    gone = make_group([], [], prompt=(6,), name="gone")
    taken = [replace(there.rollouts[0], prompt=there.prompt), replace(make_rollout(1, [-3.0]), prompt=gone.prompt)]
    assembled = replace(here, rollouts=(*here.rollouts, *taken, *taken), advantages=np.ones(5, np.float32))
    batch = build_batch([assembled, there], LossConfig(), SAMPLING)
    assert batch.prompts.tolist() == [0, 1, 2, 1, 2, 1]
    assert [tuple(item.path for item in media) for media in batch.media] == [(), ("there.png",), (), ("there.png",), (), ("there.png",)]
    assert batch.token_ids[~batch.response_mask].tolist() == [1, 2, 3, 4, 5, 6, 4, 5, 6, 4, 5]
