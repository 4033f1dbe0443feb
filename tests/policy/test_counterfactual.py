"""Scoring beside degraded media and what the learner makes of it: exact, shared, only where it counts, however rows are packed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.credit.intervention import degraded
from headrace.policy import counterfactual
from headrace.policy.counterfactual import all_logprobs, score_counterfactual, wanted_media
from headrace.policy.packing import take_rows
from headrace.policy.score import packed_rows, score_batch
from headrace.policy.update import Learner
from headrace.records import CounterfactualScores, StepBatch
from tests.policy.learner_cases import BANNED, make_config, make_learner, moved, picture_batch, tiny_vision_model, with_claims

ROUTER = {"kind": "rules", "patterns": ["x"]}
PACG = {"pacg": {"router": ROUTER}}
BOTH = {"vppo": {}, **PACG}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_model(tmp_path_factory.mktemp("visual"))


@pytest.fixture(scope="module")
def batch(model: Path) -> StepBatch:
    return with_claims(picture_batch(model, 0, make_config(model).loss))


def learner_of(model: Path, **sections: Any) -> Learner:
    return moved(make_learner(make_config(model, **sections)), scale=0.1)


def scored(learner: Learner, batch: StepBatch, budget: int = 60) -> CounterfactualScores:
    return score_counterfactual(learner.policy, batch, wanted_media(learner.rules, batch), BANNED, budget, learner.parallel)


def logits(learner: Learner, batch: StepBatch, row: int) -> torch.Tensor:
    """[n, V] log-distribution of every response token of a row."""
    part = take_rows(batch, [row])
    with torch.no_grad():
        full = learner.policy(packed_rows(part, CPU), lambda hidden, weight: hidden @ weight.T)
    full[:, list(BANNED)] = -torch.inf
    return full.log_softmax(-1)[np.flatnonzero(part.response_mask) - 1]


def test_both_halves_are_those_of_separate_passes(model: Path, batch: StepBatch) -> None:
    learner = learner_of(model, credit=BOTH)
    scores = scored(learner, batch)
    media = wanted_media(learner.rules, batch)
    other = replace(batch, media=tuple(items or own for items, own in zip(media, batch.media, strict=True)))
    plain, dark = (score_batch(learner.policy, case, BANNED, 10**6, CPU) for case in (batch, other))
    inside = np.repeat(scores.rows, np.diff(batch.cu_seqlens)) & batch.response_mask
    assert scores.rows.tolist() == [bool(items) for items in batch.media]
    np.testing.assert_allclose(scores.logprobs[inside], plain.logprobs[inside], atol=2e-6)
    np.testing.assert_allclose(scores.logprobs_cf[inside], dark.logprobs[inside], atol=2e-6)
    assert np.abs(scores.logprobs - scores.logprobs_cf)[inside].max() > 0.1
    for name in ("logprobs", "logprobs_cf", "kl"):
        assert not getattr(scores, name)[~inside].any()
    row = int(np.flatnonzero(scores.rows)[0])
    one, two = logits(learner, batch, row), logits(learner, other, row)
    expected = torch.nan_to_num(one.exp() * (one - two)).sum(-1)
    np.testing.assert_allclose(take_kl(scores, batch, row), expected.numpy(), atol=2e-5)


def take_kl(scores: CounterfactualScores, batch: StepBatch, row: int) -> np.ndarray:
    inside = slice(*batch.cu_seqlens[row : row + 2])
    return scores.kl[inside][batch.response_mask[inside]]


@pytest.mark.parametrize("budget", [1, 40, 10**6])
def test_packing_changes_nothing(model: Path, batch: StepBatch, budget: int) -> None:
    learner = learner_of(model, credit=BOTH)
    one, two = scored(learner, batch), scored(learner, batch, budget)
    for name in ("rows", "logprobs", "logprobs_cf", "kl"):
        np.testing.assert_allclose(getattr(one, name), getattr(two, name), atol=3e-6)


def test_a_frozen_tower_sees_each_picture_and_its_degradation_once(model: Path, batch: StepBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = learner_of(model, credit=BOTH, learner={"micro_batch_tokens": 20})
    vision = learner.policy.vision
    assert vision is not None
    seen: list[Any] = []
    run = vision._run_tower
    monkeypatch.setattr(vision, "_run_tower", lambda items: seen.extend(items) or run(items))
    learner.update(batch)
    learner.update(batch)
    distinct = {item for items in batch.media for item in items}
    assert len(seen) == len(set(seen)) == 2 * len(distinct)
    assert sum(item.intervention is not None for item in seen) == len(distinct)


def test_rules_share_one_pass_over_the_rows_that_count(model: Path, batch: StepBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens: list[int] = []
    doubled = counterfactual._doubled
    monkeypatch.setattr(counterfactual, "_doubled", lambda rows, media: tokens.append(len(rows.token_ids)) or doubled(rows, media))

    def spent(**credit: Any) -> int:
        tokens.clear()
        learner = learner_of(model, credit=credit)
        metrics = learner.update(batch)
        lengths = np.diff(batch.cu_seqlens)[[bool(items) for items in wanted_media(learner.rules, batch)]]
        assert sum(tokens) == lengths.sum()
        assert metrics["learner/scored_rows"] == len(lengths)
        return sum(tokens)

    alone, together = spent(vppo={}), spent(**BOTH)
    gated = spent(**PACG)
    assert together == alone > gated > 0


@pytest.mark.parametrize("parent", [{}, {"vppo": {}}])
@pytest.mark.parametrize("loss", [{}, {"kl_coef": 0.01, "surprisal_coef": 0.1}])
def test_open_gates_train_bit_equal_to_the_parent(model: Path, batch: StepBatch, parent: dict, loss: dict) -> None:
    one, two = (
        learner_of(model, loss=loss, credit=credit, learner={"updates_per_batch": 2})
        for credit in (parent, {**parent, "pacg": {"alpha": 0.0, "router": ROUTER}})
    )
    for _ in range(2):
        metrics = [learner.update(batch) for learner in (one, two)]
    assert metrics[1]["pacg/retention"] == 1
    assert metrics[0]["loss"] == metrics[1]["loss"]
    for ours, theirs in zip(one.policy.parameters(), two.policy.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_gates_change_what_is_learned(model: Path, batch: StepBatch) -> None:
    ungated, gated = learner_of(model), learner_of(model, credit={"pacg": {"router": ROUTER, "margin": 1.0}})
    ungated.update(batch)
    metrics = gated.update(batch)
    assert 0.3 <= metrics["pacg/retention"] < 1
    assert any(not torch.equal(one, two) for one, two in zip(ungated.policy.parameters(), gated.policy.parameters(), strict=True))


@pytest.mark.parametrize("budget", [20, 10**6])
def test_updates_do_not_depend_on_micro_batches(model: Path, batch: StepBatch, budget: int) -> None:
    one, two = (
        learner_of(model, credit=BOTH, optimizer={"learning_rate": 5e-4}, learner={"micro_batch_tokens": size, "updates_per_batch": 2})
        for size in (48, budget)
    )
    metrics = [learner.update(batch) for learner in (one, two)]
    for name in metrics[0]:
        if not name.startswith("time/") and name != "learner/micro_batches":
            assert metrics[0][name] == pytest.approx(metrics[1][name], rel=1e-3, abs=1e-5), name
    for ours, theirs in zip(one.policy.parameters(), two.policy.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_clean_half_serves_as_proximal_log_probs(model: Path, batch: StepBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = learner_of(model, credit=BOTH)
    scores = scored(learner, batch)
    expected = all_logprobs(learner.policy, batch, None, BANNED, 60, learner.parallel)
    again: list[int] = []
    whole = counterfactual.score_on_all_ranks

    def counted(policy: Any, part: StepBatch, *rest: Any) -> Any:
        again.append(len(part.prompts))
        return whole(policy, part, *rest)

    monkeypatch.setattr(counterfactual, "score_on_all_ranks", counted)
    found = all_logprobs(learner.policy, batch, scores, BANNED, 60, learner.parallel)
    np.testing.assert_allclose(found, expected, atol=2e-6)
    assert again == [int((~scores.rows).sum())]


def test_positive_update_mass_is_what_the_clip_lets_through(model: Path, batch: StepBatch) -> None:
    """With old log-probs far below the policy's every ratio is above the clip; with its own none is."""
    learner = learner_of(model, credit=PACG)
    own = all_logprobs(learner.policy, batch, None, BANNED, 60, learner.parallel)
    masses = [
        learner_of(model, credit=PACG).update(replace(batch, old_logprobs=np.where(batch.response_mask, own - drop, 0).astype(np.float32)))
        for drop in (0.0, 2.0)
    ]
    assert masses[0]["pacg/positive_update_mass"] > 0 == masses[1]["pacg/positive_update_mass"]


def test_a_picture_that_its_degradation_leaves_alone_judges_nothing(model: Path, batch: StepBatch, tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (32, 32)).save(tmp_path / "black.png")
    media = tuple((replace(items[0], path=str(tmp_path / "black.png")),) if items else () for items in batch.media)
    learner = learner_of(model, credit=BOTH)
    metrics = learner.update(replace(batch, media=media))
    assert metrics["pacg/intervention_valid"] == 0
    assert "pacg/retention" not in metrics
    assert "vppo/dependency" not in metrics


def test_the_surprisal_penalty_lowers_the_surprisal_of_drawn_tokens(model: Path, batch: StepBatch) -> None:
    """+ c mean(-log p) over all response tokens; a penalty, not a bonus."""
    still = replace(batch, advantages=np.zeros_like(batch.advantages))
    learner = make_learner(make_config(model, loss={"surprisal_coef": 0.1}, optimizer={"learning_rate": 1e-3, "warmup_steps": 0}))
    before = score_batch(learner.policy, still, BANNED, 10**6, CPU).logprobs[still.response_mask]
    metrics = learner.update(still)
    after = score_batch(learner.policy, still, BANNED, 10**6, CPU).logprobs[still.response_mask]
    assert metrics["loss"] == pytest.approx(-0.1 * before.mean(), rel=1e-5)
    assert after.mean() > before.mean()


def test_a_rule_that_wants_other_media_than_its_neighbour_is_a_fault(model: Path, batch: StepBatch) -> None:
    class Other:
        def wanted(self, batch: StepBatch) -> list:
            return [degraded("other", media, "blur") for media in batch.media]

    learner = learner_of(model, credit={"vppo": {}})
    with pytest.raises(AssertionError, match="different media"):
        wanted_media([*learner.rules, Other()], batch)  # type: ignore[list-item]
