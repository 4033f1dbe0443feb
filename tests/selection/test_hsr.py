"""Stratified replay: EX-5.2 to EX-5.10 and property 10.7 of SPEC.md."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import Config, ConfigError, HSRConfig
from headrace.credit.advantage import group_advantages
from headrace.records import Completion, Group, Prompt, Question, Reward, Rollout
from headrace.selection import degenerate, hsr

PARITY = HSRConfig(ensure_contrast=False)
BATCH = HSRConfig(scope="global_batch", ensure_contrast=False)


class LowestFirst:
    """Stands in for the generator: draws the lowest positions instead of random ones."""

    def choice(self, count: int, size: int, replace: bool = True) -> np.ndarray:
        assert replace or size <= count
        return np.arange(size) % count


def completion(entropy: float | None, masked: tuple[int, ...] = ()) -> Completion:
    """Two tokens of that surprisal; no token at all for None. Masked positions are appended with a log-prob of -50."""
    values = ([] if entropy is None else [-entropy] * 2) + [-50.0] * len(masked)
    flags = [False] * (len(values) - len(masked)) + [True] * len(masked)
    length = len(values)
    return Completion(np.arange(length, dtype=np.int32), np.array(values), np.array(flags, dtype=bool), np.zeros(length, np.int32), "stop")


def group(name: str, members: list[tuple[float | None, float | None]], epoch: int = 0) -> Group:
    """A group of (accuracy, path entropy) pairs; accuracy None is unscored."""
    rollouts = tuple(
        Rollout(index, 1 + (index % 2), "free", completion(entropy), reward=None if right is None else Reward(right, right))
        for index, (right, entropy) in enumerate(members)
    )
    return Group(Prompt(Question(name, (), "1"), np.array([1])), rollouts, epoch=epoch)


def accuracies(made: Group) -> list[float]:
    return [rollout.reward.accuracy for rollout in made.rollouts if rollout.reward is not None]


Q1 = [(1, 0.10), (1, 0.20), (0, 0.12), (1, 0.95), (0, 0.90), (0, 0.50), (1, 0.45), (0, 0.40)]
Q2 = [(0, 0.11), (0, 0.15), (0, 0.30), (0, 0.35), (0, 0.55), (0, 0.60), (0, 0.88), (0, 0.99)]
THREE: dict[str, list[tuple[float | None, float | None]]] = {
    "q1": [(1, 0.05), (1, 0.07), (0, 0.06), (1, 1.9), (1, 1.7), (0, 1.8), (1, 0.6), (0, 0.7)],
    "q2": [(0, 0.08), (0, 0.5), (0, 0.55), (0, 0.9), (0, 0.95), (0, 2.0), (0, 0.65), (0, 0.75)],
    "q3": [(1, 0.2), (1, 0.3), (1, 0.4), (1, 0.45), (1, 0.8), (1, 0.85), (1, 1.0), (1, 1.1)],
}


@pytest.mark.parametrize(
    ("logprobs", "entropy"), [([-0.1, -0.5, -0.2], 0.266667), ([-0.01] * 10, 0.01), ([-2.0], 2.0), ([], None), ([-np.inf], None)]
)
def test_ex_5_2_path_entropy(logprobs: list[float], entropy: float | None) -> None:
    length = len(logprobs)
    drawn = Completion(np.zeros(length), np.array(logprobs), np.zeros(length, bool), np.zeros(length), "stop")
    assert drawn.path_entropy == (None if entropy is None else pytest.approx(entropy, abs=1e-6))


def test_path_entropy_skips_masked_positions() -> None:
    assert completion(0.3, masked=(2, 3)).path_entropy == pytest.approx(0.3)
    assert completion(None, masked=(0,)).path_entropy is None


def test_ex_5_3_thresholds() -> None:
    pool = [0.10, 0.12, 0.15, 0.20, 0.22, 0.25, 0.30, 0.35, 0.40, 0.45, 0.50, 0.55, 0.60, 0.70, 0.80, 0.90]
    assert hsr.thresholds(pool) == pytest.approx((0.135, 0.75))
    with pytest.raises(ValueError, match="at least one"):
        hsr.thresholds([])


def test_ex_5_4_classes() -> None:
    low, high = hsr.thresholds([entropy for _, entropy in Q1 + Q2])
    assert (low, high) == pytest.approx((0.115, 0.925))
    assert hsr.stratify(*zip(*Q1, strict=True), low, high) == ["anchor", "natural", "natural", "epiphany", *["natural"] * 4]
    assert hsr.stratify(*zip(*Q2, strict=True), low, high) == ["hard_negative", *["natural"] * 6, "noise"]


def test_equal_path_entropies_are_natural() -> None:
    low, high = hsr.thresholds([0.1 + 0.2] * 7)
    assert hsr.stratify([1, 0] * 3 + [1], [0.1 + 0.2] * 7, low, high) == ["natural"] * 7


QUOTAS = {16: (4, 2, 2, 8), 8: (2, 1, 1, 4), 12: (3, 1, 1, 7), 10: (2, 1, 1, 6), 4: (1, 0, 0, 3), 2: (0, 0, 0, 2)}


@pytest.mark.parametrize(("size", "expected"), QUOTAS.items())
def test_quotas(size: int, expected: tuple[int, ...]) -> None:
    assert hsr.quotas(size) == dict(zip(("epiphany", "anchor", "hard_negative", "natural"), expected, strict=True))


def test_ex_5_5_fallback() -> None:
    low, high = hsr.thresholds([entropy for _, entropy in Q1 + Q2])
    first = hsr.assemble(hsr.stratify(*zip(*Q1, strict=True), low, high), 8, np.random.default_rng(0))
    assert first[:2] == [3, 0]  # one epiphany of two, one anchor, no hard negative: six natural places
    assert len(first) == 8
    second = hsr.assemble(hsr.stratify(*zip(*Q2, strict=True), low, high), 8, np.random.default_rng(0))
    assert second[0] == 0
    assert sorted(second[1:]) == [0, 1, 2, 3, 4, 5, 6]  # seven places, a valid pool of seven: all but the noise


def test_ex_5_6_three_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hsr, "stream", lambda *_: LowestFirst())
    groups = [group(name, members) for name, members in THREE.items()]
    (one, two, three), metrics = hsr.assemble_groups(groups, PARITY, seed=0)
    assert (metrics["hsr/threshold_low"], metrics["hsr/threshold_high"]) == pytest.approx((0.073, 1.77))
    low, high = metrics["hsr/threshold_low"], metrics["hsr/threshold_high"]
    classes = hsr.stratify(*zip(*THREE["q1"], strict=True), low, high)
    assert classes == ["anchor", "anchor", "hard_negative", "epiphany", "natural", "noise", "natural", "natural"]
    assert [rollout.index for rollout in one.rollouts] == [3, 0, 2, 0, 1, 2, 3, 4]
    assert accuracies(one) == [1, 1, 0, 1, 1, 0, 1, 1]
    advantages = group_advantages(accuracies(one))
    assert sorted(set(advantages.round(4))) == pytest.approx([-1.7320, 0.5773], abs=1e-4)
    assert group_advantages([right for right, _ in THREE["q1"]])[[0, 2]] == pytest.approx([0.7746, -1.2910], abs=1e-4)
    assert [rollout.index for rollout in two.rollouts] == [0, 1, 2, 3, 4, 6, 7, 0]  # seven valid, one repeat
    assert [rollout.index for rollout in three.rollouts] == list(range(8))
    assert (metrics["degen/natural"], metrics["degen/assembled"], metrics["hsr/short_mean"]) == pytest.approx((2 / 3, 2 / 3, 3))
    assert (metrics["hsr/dup_share_n"], metrics["hsr/noise_n"], metrics["hsr/quota_full"]) == (3 + 1, 2, 0)


def test_ex_5_6_donors_from_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hsr, "stream", lambda *_: LowestFirst())
    groups = [group(name, members) for name, members in THREE.items()]
    (_, two, three), metrics = hsr.assemble_groups(groups, BATCH, seed=0)
    assert [(rollout.index, rollout.prompt is groups[0].prompt) for rollout in two.rollouts[:3]] == [(3, True), (0, True), (2, True)]
    assert [(rollout.index, rollout.prompt) for rollout in two.rollouts[3:]] == [(index, None) for index in range(5)]
    assert accuracies(two) == [1, 1, 0, 0, 0, 0, 0, 0]
    assert sorted(set(group_advantages(accuracies(two)).round(4))) == pytest.approx([-0.5773, 1.7320], abs=1e-4)
    assert metrics["degen/assembled"] == 0  # the third question has taken in the hard negative
    assert accuracies(three).count(0) == 1
    assert metrics["hsr/donated_share_n"] == 6


def test_ex_5_7_and_5_8_variance_and_baseline() -> None:
    assert np.std([1] * 6 + [0] * 2) == pytest.approx(0.433013, abs=1e-6)
    assert np.var([1] * 7 + [0] * 9) == pytest.approx(0.246094, abs=1e-6)
    for right, expected in ((2, (2.6457, -0.3780)), (4, (1.7320, -0.5773))):
        advantages = group_advantages([1] * right + [0] * (16 - right))
        assert (advantages[0], advantages[-1]) == pytest.approx(expected, abs=1e-4)
        assert abs(advantages.sum()) < 1e-9


def test_ex_5_8_original_baseline_travels_with_the_copies() -> None:
    members = [(1, 0.9), (1, 0.1)] + [(0, 0.2 + 0.01 * place) for place in range(14)]
    natural = group("q", members)
    natural = replace(natural, advantages=group_advantages(accuracies(natural)))
    (made,), _ = hsr.assemble_groups([natural], HSRConfig(baseline="original"), seed=1)
    assert made.advantages is not None
    of_right = [advantage for advantage, right in zip(made.advantages, accuracies(made), strict=True) if right]
    assert of_right == pytest.approx([2.6457] * len(of_right), abs=1e-4)
    assert made.advantages.tolist() == [natural.advantages[rollout.index] for rollout in made.rollouts]
    with pytest.raises(ValueError, match="question q has no advantages"):
        hsr.assemble_groups([replace(natural, advantages=None)], HSRConfig(baseline="original"), seed=1)
    (fresh,), _ = hsr.assemble_groups([natural], HSRConfig(), seed=1)
    assert fresh.advantages is None


def lone_right(name: str) -> Group:
    """One right rollout among sixteen, natural; an anchor's and an epiphany's places cannot be filled, two hard negatives can."""
    return group(name, [(1, 0.5), (0, 0.1), (0, 0.1001)] + [(0, 0.5)] * 13)


def test_ex_5_9_the_minority_is_lost_as_often_as_stated_and_the_guard_keeps_it() -> None:
    classes: list[Any] = ["natural", "hard_negative", "hard_negative", *["natural"] * 13]
    draws = 4000
    lost = sum(0 not in hsr.assemble(classes, 16, np.random.default_rng(seed)) for seed in range(draws))
    assert abs(lost / draws - 0.125) < 4 * np.sqrt(0.125 * 0.875 / draws)
    groups = [lone_right(f"q{number}") for number in range(200)]
    kept, metrics = hsr.assemble_groups(groups, HSRConfig(), seed=0)
    assert all(len(set(accuracies(each))) == 2 for each in kept)
    _, bare = hsr.assemble_groups(groups, PARITY, seed=0)
    assert metrics["hsr/rescued_n"] == bare["hsr/created_degenerate_n"] > 0
    assert (metrics["hsr/created_degenerate"], bare["hsr/rescued_n"]) == (0, 0)


EXPECTED = {
    (0.5, 16): 3.1e-5, (0.5, 8): 0.0078, (0.9, 16): 0.1853, (0.95, 16): 0.4401, (0.05, 16): 0.4401, (0.05, 8): 0.6634, (0.01, 16): 0.8515
}  # fmt: skip


def test_ex_5_10_expected_and_empirical_share() -> None:
    for (success, size), expected in EXPECTED.items():
        assert degenerate.expected(success, size) == pytest.approx(expected, rel=2e-2 if expected < 1e-2 else 1e-3)
    groups = [[0.0] * 8, [1.0] * 8, [1.0, 0.0] * 4, [1.0] * 7 + [0.0]]
    assert degenerate.share_metrics("natural", groups)["degen/natural"] == 0.5
    assert "degen/natural" not in degenerate.share_metrics("natural", [[]])


Members = st.lists(st.tuples(st.sampled_from([0.0, 1.0, None]), st.sampled_from([None, 0.1, 0.2, 0.3, 0.9, 2.0])), min_size=2, max_size=12)


@given(st.lists(Members, min_size=1, max_size=5), st.sampled_from([PARITY, BATCH, HSRConfig(), HSRConfig(short_buffers="repeat")]))
def test_property_10_7(batch: list[Any], config: HSRConfig) -> None:
    """The size is kept, noise trains only where nothing else is there, and per query no outcome appears that was not drawn."""
    groups = [group(f"q{number}", members) for number, members in enumerate(batch)]
    final, metrics = hsr.assemble_groups(groups, config, seed=3)
    low, high = metrics.get("hsr/threshold_low", 0.0), metrics.get("hsr/threshold_high", 0.0)
    for before, after in zip(groups, final, strict=True):
        assert len(after.rollouts) == len(before.rollouts)
        assert after.prompt is before.prompt
        usable = [r for r in before.rollouts if r.reward is not None and r.completion.path_entropy is not None]
        if len(usable) < 2:
            assert after is before
            continue
        noise = [r.reward.accuracy < 1 and r.completion.path_entropy > high for r in after.rollouts]
        valid = [r for r in usable if not (r.reward.accuracy < 1 and r.completion.path_entropy > high)]
        assert not any(noise) or not valid
        if config.scope == "per_query":
            assert {id(r) for r in after.rollouts} <= {id(r) for r in usable}
            assert set(accuracies(after)) <= set(accuracies(before))
        assert all(r.prompt is None or r.prompt is not before.prompt for r in after.rollouts)
        assert low <= high


def test_a_question_draws_from_its_own_stream() -> None:
    """What else is in the batch moves nothing but thresholds and donors; a re-queued question draws the same again."""
    mine = group("mine", [(i % 2, 0.3) for i in range(8)], epoch=4)
    others = [group(f"o{n}", [(1, 0.3)] * 8) for n in range(3)]
    alone, _ = hsr.assemble_groups([mine], HSRConfig(), seed=9)
    last, _ = hsr.assemble_groups([*others, mine], HSRConfig(), seed=9)
    assert [r.index for r in alone[0].rollouts] == [r.index for r in last[-1].rollouts]
    again, _ = hsr.assemble_groups([replace(mine, epoch=5)], HSRConfig(), seed=9)
    assert [r.index for r in again[0].rollouts] != [r.index for r in alone[0].rollouts]


def test_structured_places_prefer_the_own_question() -> None:
    rich = group("rich", [(1, 5.0 + i) for i in range(4)] + [(0, 1.0)] * 12)
    poor = group("poor", [(1, 9.5)] + [(0, 1.0)] * 15)
    for seed in range(20):
        (_, made), _ = hsr.assemble_groups([rich, poor], HSRConfig(scope="global_batch", high=0.8), seed=seed)
        surprising = [r for r in made.rollouts[:4] if r.reward.accuracy >= 1]
        assert Counter(r.prompt is None for r in surprising) == {True: 1, False: 3}


def test_short_buffers_may_repeat() -> None:
    classes: list[Any] = ["epiphany", *["natural"] * 15]
    made = hsr.assemble(classes, 16, np.random.default_rng(0), repeat=True)
    assert (made[:4], len(made)) == ([0] * 4, 16)


def test_wave_labels_survive_and_nothing_is_left_of_the_step() -> None:
    (made,), _ = hsr.assemble_groups([group("q", [(i % 2, 0.1 * i + 0.1) for i in range(8)])], HSRConfig(), seed=0)
    assert all(rollout.wave == 1 + rollout.index % 2 for rollout in made.rollouts)
    state = {name: value for name, value in vars(hsr).items() if isinstance(value, list | dict | set) and not name.startswith("__")}
    assert not state  # the module holds no buffer


def test_an_empty_batch_is_no_error() -> None:
    assert hsr.assemble_groups([], HSRConfig(), seed=0) == ([], {})
    unscored = group("q", [(None, 0.1), (None, 0.2)])
    assert hsr.assemble_groups([unscored], HSRConfig(), seed=0) == ([unscored], {})


def test_hsr_and_dynamic_sampling_are_exclusive() -> None:
    tree = {"model": {"source": {"kind": "scratch_text"}}, "sampling": {"max_tokens": 8}, "hsr": {}}
    assert Config.model_validate(tree).hsr == HSRConfig()
    with pytest.raises(ValueError, match="exclude each other"):
        Config.model_validate({**tree, "dynamic_sampling": {}})
    with pytest.raises(ValueError, match="expected low below high"):
        HSRConfig(low=0.9, high=0.1)
    assert issubclass(ConfigError, ValueError)
