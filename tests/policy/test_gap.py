"""The gap between engine and learner: measured exactly, corrected by truncated importance sampling or by dropping tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.config import LossConfig
from headrace.policy.gap import corrected, gap_metrics
from headrace.policy.parallel import Parallel
from headrace.policy.score import score_batch, score_on_all_ranks
from tests.policy.learner_cases import BANNED, make_config, make_learner, moved, random_batch, tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


def learner_of(model, **loss):
    return moved(make_learner(make_config(model, loss=loss, optimizer={"clip_norm": 1e9})))


def first_moments(learner):
    """After one step from nothing Adam's first moment is a tenth of the gradient."""
    return torch.cat([entry["exp_avg"].flatten() for entry in learner.optimizer.state_dict().values()])


def stale_batch(learner, seed, spread=0.5):
    """A batch whose engine is ``spread`` nats away from the learner on the tokens that count."""
    batch = random_batch(seed, learner.config.loss)
    scores = score_batch(learner.policy, batch, BANNED, 10**6, CPU)
    noise = np.random.default_rng(seed).normal(0, spread, len(batch.token_ids)).astype(np.float32)
    return replace(batch, old_logprobs=np.where(batch.loss_mask, scores.logprobs + noise, batch.old_logprobs)), scores.logprobs


def test_a_worked_gap():
    """Gaps 0.1 and 0.5 count; the masked token, one nat off, does not. Bound 0.4 drops one of two, cap 1.05 holds the other."""
    batch = random_batch(0, LossConfig(), groups=1, size=2)
    at = np.flatnonzero(batch.response_mask)[:3]
    mask = np.zeros_like(batch.loss_mask)
    mask[at[:2]] = True
    proximal = batch.old_logprobs.copy()
    proximal[at] += np.float32([0.1, -0.5, 1.0])
    batch = replace(batch, loss_mask=mask)
    assert gap_metrics(batch, proximal) == pytest.approx({"gap/mean": 0.3, "gap/p99": 0.496, "gap/max": 0.5}, abs=1e-5)
    kept, metrics = corrected(batch, proximal, LossConfig(tis_cap=1.05, max_gap=0.4))
    assert metrics["gap/dropped"] == 0.5
    assert (metrics["learner/dropped_tokens"], metrics["gap/capped"]) == (1, 1)
    assert np.flatnonzero(kept.loss_mask).tolist() == [at[0]]
    assert kept.proximal_logprobs is proximal
    assert np.array_equal(kept.loss_weight, batch.loss_weight)  # the denominator stays
    assert gap_metrics(replace(batch, loss_mask=np.zeros_like(mask)), proximal) == {}


@pytest.mark.parametrize("kind", ["ppo", "cispo"])
def test_truncated_importance_sampling_weighs_each_token(model, kind):
    """Before the first step the ratio is 1, so the loss is −Σ w min(exp(proximal − old), cap) A, for cispo times log π."""
    cap = 1.2
    learner = learner_of(model, kind=kind, tis_cap=cap)
    batch, proximal = stale_batch(learner, 1)
    metrics = learner.update(batch)
    weight = np.minimum(np.exp(proximal - batch.old_logprobs), cap)
    surrogate = batch.advantages * (proximal if kind == "cispo" else 1)
    expected = -(batch.loss_weight * weight * surrogate)[batch.loss_mask].sum(dtype=np.float64)
    assert metrics["loss"] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert metrics["gap/capped"] == pytest.approx((np.exp(proximal - batch.old_logprobs) > cap)[batch.loss_mask].mean())
    assert metrics["ppo/ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert metrics["ppo/clip_share"] == 0
    assert 0.1 < metrics["gap/mean"] < metrics["gap/p99"] <= metrics["gap/max"]


def test_its_first_gradient_is_that_of_a_clipped_ratio_held_constant(model):
    """min(exp(π − old), cap) A ∇log π either way: against proximal log-probs, or as cispo against the engine's without lower clip."""
    tis = learner_of(model, tis_cap=1.3)
    cispo = learner_of(model, kind="cispo", clip_low=1.0, clip_high=0.3)
    batch, _ = stale_batch(tis, 2)
    tis.update(batch)
    cispo.update(batch)
    one, other = first_moments(tis), first_moments(cispo)
    assert (one - other).norm() < 1e-4 * one.norm()


def test_tokens_beyond_the_bound_leave_the_numerator_alone(model):
    """The same gradient as with those tokens masked beforehand; the ratio stays against the engine."""
    learner, plain = learner_of(model, max_gap=0.4), learner_of(model)
    batch, proximal = stale_batch(learner, 3)
    far = batch.loss_mask & (np.abs(proximal - batch.old_logprobs) > 0.4)
    metrics = learner.update(batch)
    others = plain.update(replace(batch, loss_mask=batch.loss_mask & ~far))
    assert 0 < metrics["learner/dropped_tokens"] == far.sum() < batch.loss_mask.sum()
    assert metrics["gap/dropped"] == pytest.approx(far.sum() / batch.loss_mask.sum())
    assert metrics["loss"] == others["loss"]
    assert torch.equal(first_moments(learner), first_moments(plain))


def test_later_steps_of_a_batch_keep_the_log_probs_from_before_the_first(model):
    """Two steps: the second one's ratio has moved away from 1, while the gap is that from before both."""
    learner = moved(make_learner(make_config(model, loss={"tis_cap": 2.0}, learner={"updates_per_batch": 2})))
    batch, proximal = stale_batch(learner, 4, spread=0.01)
    metrics = learner.update(batch)
    assert metrics["ppo/ratio_max"] > 1.001
    assert metrics["gap/mean"] == pytest.approx(gap_metrics(batch, proximal)["gap/mean"], rel=1e-3)


@pytest.mark.parametrize("parts", [1, 3])
def test_without_corrections_the_first_step_measures_the_gap(model, parts):
    learner = moved(make_learner(make_config(model, learner={"updates_per_batch": parts})))
    batch, proximal = stale_batch(learner, 5)
    first = np.isin(batch.prompts, np.array_split(np.unique(batch.prompts), parts)[0])
    expected = gap_metrics(batch, proximal, first)
    metrics = learner.update(batch)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-3)


def test_scores_of_all_ranks_are_those_of_one(model):
    learner = learner_of(model)
    batch = random_batch(6, learner.config.loss, groups=5)
    alone, dealt = (score_batch(learner.policy, batch, BANNED, 48, CPU), score_on_all_ranks(learner.policy, batch, BANNED, 48, Parallel()))
    assert np.array_equal(alone.logprobs, dealt.logprobs)
    assert np.array_equal(alone.entropies, dealt.entropies)
    assert (alone.logprobs[batch.response_mask] < 0).all()
    assert (alone.logprobs[~batch.response_mask] == 0).all()


@pytest.mark.parametrize("token", [BANNED[0], 10**6, -1])
def test_a_token_that_no_policy_draws_is_refused_before_anything_runs(model, token):
    learner = learner_of(model)
    batch = random_batch(7, learner.config.loss)
    at = int(np.flatnonzero(batch.response_mask & np.repeat(batch.prompts == 1, np.diff(batch.cu_seqlens)))[0])
    batch.token_ids[at] = token
    with pytest.raises(ValueError, match=rf"^batch: row 4 has response token {token}, which is banned or not among the model's 80 tokens$"):
        learner.update(batch)
    assert learner.updates == 0
