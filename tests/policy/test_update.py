"""One optimizer batch: loss and gradients are properties of the batch alone."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.policy.optimizer import Optimizer, learning_rate
from headrace.policy.packing import MicroBatch, loss_weights, rows_with_gradient, schedule, take_rows
from headrace.policy.score import score_batch
from headrace.policy.step_metrics import named
from headrace.policy.update import Learner, NonFiniteError
from tests.policy.learner_cases import BANNED, make_config, make_learner, moved, random_batch, tiny_model

LOSSES = {
    "ppo": {},
    "ppo_sequence_kl": {"normalisation": "sequence_mean", "kl_coef": 0.1, "entropy_coef": 0.01},
    "dual_clip_constant": {"normalisation": "constant", "dual_clip": 3.0},
    "gspo": {"kind": "gspo", "normalisation": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"kind": "cispo"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def learners(model):
    """One learner per loss; none of the tests that share them takes a step."""
    return {name: moved(make_learner(make_config(model, loss=loss))) for name, loss in LOSSES.items()}


def gradients(learner, batch, plan):
    """Summed metrics and flat gradient [P] of a batch run by ``plan``."""
    learner.optimizer.zero_grad()
    vectors = [learner._run(batch, micro) for micro in plan]
    values, norm = learner._reduce([v for v, micro in zip(vectors, plan, strict=True) if not micro.filler], True)
    flat = torch.cat([master.grad.flatten() for master in learner.optimizer.masters.values()])
    assert norm == pytest.approx(float(flat.norm()), rel=1e-5)
    learner.optimizer.zero_grad()
    return values, flat


def plan_of(learner, batch, budget, order=None):
    """Micro-batches under a token budget, rows shuffled by ``order``."""
    gradient = rows_with_gradient(batch, learner.spec.has_regulariser)
    plan = schedule(batch, gradient, 1, budget)[0]
    if order is None:
        return plan
    rng = np.random.default_rng(order)
    plan = [MicroBatch(tuple(rng.permutation(micro.rows).tolist()), micro.gradient) for micro in plan]
    return [plan[i] for i in rng.permutation(len(plan))]


def assert_same(first, second):
    (values, gradient), (others, other) = first, second
    finite = torch.isfinite(values)
    torch.testing.assert_close(values[finite], others[finite], rtol=1e-4, atol=1e-5)
    assert (gradient - other).norm() <= 1e-5 * gradient.norm() + 1e-8


@pytest.mark.parametrize("name", LOSSES)
@given(seed=st.integers(0, 10**6), budget=st.integers(1, 120), order=st.integers(0, 10**6), zero=st.integers(0, 2))
@settings(max_examples=15, deadline=None)
def test_loss_and_gradient_do_not_depend_on_the_split(learners, name, seed, budget, order, zero):
    """Micro-batch size and packing order change nothing."""
    learner = learners[name]
    batch = random_batch(seed, learner.config.loss, zero_groups=zero)
    whole = gradients(learner, batch, plan_of(learner, batch, 10**6))
    assert_same(whole, gradients(learner, batch, plan_of(learner, batch, budget, order)))


def test_a_mean_per_micro_batch_fails_that_test(learners):
    """The fault that the property is there to find: every micro-batch divided by its own tokens, averaged over micro-batches."""
    learner = learners["ppo"]
    batch = random_batch(3, learner.config.loss)
    whole = gradients(learner, batch, plan_of(learner, batch, 10**6))

    class Wrong(Learner):
        def _run(self, batch, micro):
            part = take_rows(batch, micro.rows)
            weights = loss_weights(part.response_mask, part.cu_seqlens, "token_mean", 1) / len(plan)
            return super()._run(replace(part, loss_weight=weights), replace(micro, rows=tuple(range(len(micro.rows)))))

    wrong = Wrong.__new__(Wrong)
    wrong.__dict__ = learner.__dict__
    plan = plan_of(learner, batch, 10**6)
    assert_same(whole, gradients(wrong, batch, plan))  # one micro-batch: the same
    plan = plan_of(learner, batch, 40)
    assert len(plan) > 1
    with pytest.raises(AssertionError):
        assert_same(whole, gradients(wrong, batch, plan))


def test_rows_without_advantage_cost_no_gradient_and_change_nothing(learners):
    learner = learners["ppo"]
    batch = random_batch(5, learner.config.loss, zero_groups=2)
    plan = plan_of(learner, batch, 48)
    assert any(not micro.gradient for micro in plan)
    all_with_gradient = [replace(micro, gradient=True) for micro in plan]
    assert_same(gradients(learner, batch, all_with_gradient), gradients(learner, batch, plan))


def test_a_masked_token_has_no_gradient_and_what_follows_it_does(learners):
    """Only the masked position itself leaves the loss."""
    learner = learners["ppo"]
    batch = random_batch(6, learner.config.loss, groups=1, size=1, longest=9)
    response = np.flatnonzero(batch.response_mask)
    batch.advantages[response] = 1.0
    batch.old_logprobs[response] = -4.2

    def loss_of(mask):
        return gradients(learner, replace(batch, loss_mask=mask), plan_of(learner, batch, 10**6))

    full = batch.response_mask.copy()
    without = full.copy()
    without[response[0]] = False
    only = full & ~without
    values, gradient = loss_of(full)
    parts = [loss_of(without), loss_of(only)]
    assert float(values[-2]) == pytest.approx(sum(float(part[0][-2]) for part in parts), abs=1e-6)
    torch.testing.assert_close(gradient, parts[0][1] + parts[1][1], rtol=1e-4, atol=1e-7)
    assert parts[0][1].norm() > 0
    garbage = replace(batch, loss_mask=without, old_logprobs=np.where(only, np.float32(-1e4), batch.old_logprobs).astype(np.float32))
    assert_same(parts[0], gradients(learner, garbage, plan_of(learner, batch, 10**6)))


def test_masked_tokens_keep_their_kl_and_entropy_terms(model):
    """Regularisers see every response token, the ratio metrics do not."""
    learner = moved(make_learner(make_config(model, loss={"kl_coef": 0.5, "entropy_coef": 0.1})))
    batch = random_batch(7, learner.config.loss)
    flat = replace(batch, advantages=np.zeros_like(batch.advantages))
    unmasked = replace(flat, loss_mask=flat.response_mask)
    plan = plan_of(learner, flat, 60)
    masked_values, masked_gradient = gradients(learner, flat, plan)
    values, gradient = gradients(learner, unmasked, plan)
    assert float(masked_values[-2]) == pytest.approx(float(values[-2]), rel=1e-5)
    torch.testing.assert_close(masked_gradient, gradient, rtol=1e-4, atol=1e-7)
    assert masked_values[0] == flat.loss_mask.sum() < values[0]


def test_metrics_say_what_happened(model):
    learner = make_learner(make_config(model, run={"steps": 4}))
    batch = random_batch(8, learner.config.loss, zero_groups=1)
    scores = score_batch(learner.policy, batch, BANNED, 50, torch.device("cpu"))
    on_policy = replace(batch, old_logprobs=np.where(batch.loss_mask, scores.logprobs, batch.old_logprobs))
    metrics = learner.update(on_policy)
    assert metrics["policy/entropy"] == pytest.approx(scores.entropies[batch.response_mask].mean(), rel=1e-4)
    assert metrics["ppo/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["ppo/clip_share"] == 0
    assert metrics["ppo/kl_k3"] == pytest.approx(0, abs=1e-6)
    weighted = (batch.loss_weight * batch.loss_mask * batch.advantages).sum()
    assert metrics["loss"] == pytest.approx(-weighted, abs=1e-5)
    assert metrics["ppo/tokens"] == batch.loss_mask.sum()
    assert metrics["learner/masked_tokens"] == (batch.response_mask & ~batch.loss_mask).sum()
    assert metrics["learner/rows_without_gradient"] >= 4
    assert metrics["lr"] == pytest.approx(1e-2 / 2)
    assert metrics["learner/skipped_steps"] == 0
    assert all(math.isfinite(value) and isinstance(value, float) for value in metrics.values())


@pytest.mark.parametrize("parts", [1, 3])
def test_entropy_and_reference_kl_cover_every_response_token(model, parts):
    """Masked positions leave the surrogate, not these; however many optimizer steps the batch is dealt to."""
    config = make_config(model, loss={"kl_coef": 0.1}, learner={"updates_per_batch": parts}, optimizer={"learning_rate": 1e-12})
    learner = moved(make_learner(config))
    batch = random_batch(15, config.loss)
    ours, theirs = (score_batch(policy, batch, BANNED, 60, torch.device("cpu")) for policy in (learner.policy, learner.reference))
    gap = (theirs.logprobs - ours.logprobs)[batch.response_mask].astype(np.float64)
    metrics = learner.update(batch)
    assert metrics["policy/reference_kl"] == pytest.approx((np.expm1(gap) - gap).mean(), rel=1e-4)
    assert metrics["policy/entropy"] == pytest.approx(ours.entropies[batch.response_mask].mean(), rel=1e-4)
    assert metrics["ppo/tokens"] == batch.loss_mask.sum() < metrics["learner/response_tokens"] == batch.response_mask.sum()


def test_clip_share_is_of_unmasked_positions_with_an_active_clip(learners):
    learner = learners["ppo"]
    batch = random_batch(9, learner.config.loss)
    scores = score_batch(learner.policy, batch, BANNED, 10**6, torch.device("cpu"))
    ratio = np.exp(scores.logprobs - batch.old_logprobs)[batch.loss_mask]
    advantage = batch.advantages[batch.loss_mask]
    clipped = ((advantage > 0) & (ratio > 1.3)) | ((advantage < 0) & (ratio < 0.8))
    values, _ = gradients(learner, batch, plan_of(learner, batch, 50))
    metrics = named(values, int(batch.response_mask.sum()))
    assert metrics["ppo/clip_share"] == pytest.approx(clipped.mean(), abs=1e-6)
    assert 0 < clipped.mean() < 1


def test_the_loss_falls_and_repeats_to_the_bit(model):
    config = make_config(model, learner={"updates_per_batch": 2})
    runs = []
    for _ in range(2):
        learner = make_learner(config)
        losses = [learner.update(random_batch(10, config.loss))["loss"] for _ in range(4)]
        runs.append((losses, torch.cat([p.detach().flatten() for p in learner.policy.parameters()])))
        assert learner.updates == 8
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])
    assert runs[0][0][-1] < runs[0][0][0]


def test_a_batch_without_any_advantage_takes_no_step(model):
    learner = make_learner(make_config(model))
    before = [p.detach().clone() for p in learner.policy.parameters()]
    learner.update(random_batch(11, learner.config.loss))  # moments that would carry the weights on
    moved_once = [p.detach().clone() for p in learner.policy.parameters()]
    metrics = learner.update(random_batch(12, learner.config.loss, zero_groups=3))
    assert metrics["learner/skipped_steps"] == 1
    assert metrics["grad_norm"] == 0
    assert metrics["policy/entropy"] > 0
    assert not all(map(torch.equal, before, learner.policy.parameters()))
    assert all(map(torch.equal, moved_once, learner.policy.parameters()))


@pytest.mark.parametrize("choice", ["stop", "skip"])
def test_a_non_finite_loss_never_reaches_the_weights(model, choice):
    learner = make_learner(make_config(model, learner={"on_non_finite": choice}))
    before = [p.detach().clone() for p in learner.policy.parameters()]
    batch = random_batch(13, learner.config.loss)
    batch.advantages[np.flatnonzero(batch.loss_mask)[0]] = np.nan
    if choice == "stop":
        with pytest.raises(NonFiniteError, match="the loss is nan and the gradient norm nan; the step was not taken"):
            learner.update(batch)
    else:
        assert learner.update(batch)["learner/skipped_steps"] == 1
    assert all(map(torch.equal, before, learner.policy.parameters()))
    assert all(master.grad is None for master in learner.optimizer.masters.values())
    assert learner.update(random_batch(14, learner.config.loss))["learner/skipped_steps"] == 0


def test_activation_checkpointing_changes_no_number(model):
    plain = make_learner(make_config(model))
    recomputed = make_learner(make_config(model, model={"activation_checkpointing": True}))
    batch = random_batch(15, plain.config.loss)
    for _ in range(2):
        assert plain.update(batch)["loss"] == recomputed.update(batch)["loss"]
    assert all(map(torch.equal, plain.policy.parameters(), recomputed.policy.parameters()))


def test_bf16_learns_steps_that_bf16_weights_would_lose(model):
    """1e-5 steps vanish in bf16 weights near 1; the fp32 masters collect them."""
    config = make_config(model, model={"dtype": "bfloat16"}, optimizer={"learning_rate": 1e-5, "warmup_steps": 0, "schedule": "constant"})
    learner = make_learner(config)
    start = {name: master.clone() for name, master in learner.optimizer.masters.items()}
    for _ in range(3):
        learner.update(random_batch(16, config.loss))
    for name, parameter in learner.policy.named_parameters():
        master = learner.optimizer.masters[name]
        assert (parameter.dtype, master.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(parameter, master.to(torch.bfloat16))
    shifts = torch.cat([(master - start[name]).abs().flatten() for name, master in learner.optimizer.masters.items()])
    assert 1e-5 < shifts.max() < 1e-4


# ------------------------------------------------------------------------------------------------------ optimizer


def test_the_rate_is_a_function_of_the_step(model):
    config = make_config(model, optimizer={"learning_rate": 1.0, "warmup_steps": 4, "schedule": "cosine"}).optimizer
    rates = [learning_rate(step, config, 24) for step in range(26)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[14] == pytest.approx(0.55)
    assert rates[24] == rates[25] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[3:]))


def test_decay_spares_norms_and_biases():
    matrix, norm = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    config = make_config("unused", optimizer={"weight_decay": 0.5}).optimizer
    optimizer = Optimizer([("matrix", matrix), ("norm", norm)], config)
    for parameter in (matrix, norm):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.1)
    assert torch.equal(matrix, torch.full((2, 2), 0.95))
    assert torch.equal(norm, torch.ones(2))


def test_gradients_are_clipped_over_the_global_norm(model):
    """With a tiny bound the step is that of the direction alone: Adam's first step hides the scale, its moments show it."""
    free, clipped = (
        make_learner(make_config(model, optimizer={"clip_norm": 1e9})),
        make_learner(make_config(model, optimizer={"clip_norm": 0.01})),
    )
    batch = random_batch(17, free.config.loss)
    norm = free.update(batch)["grad_norm"]
    assert clipped.update(batch)["grad_norm"] == norm > 0.01
    for name, entry in free.optimizer.state_dict().items():
        torch.testing.assert_close(entry["exp_avg"] * 0.01 / norm, clipped.optimizer.state_dict()[name]["exp_avg"], rtol=1e-4, atol=1e-9)
