"""Two waves, the trigger and the control arm, with fakes for engine and scorer."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import CGEConfig, SamplingConfig
from headrace.records import Array, Completion, Group, Prompt, Question, Reward, Rollout, SampleRequest
from headrace.sampling.waves import draw_groups, first_wave_size, should_intervene
from headrace.streams import stream, stream_seed

MASK_TOKEN = 99


def prompt(name: str) -> Prompt:
    return Prompt(Question(id=name, messages=(), answer=""), np.array([1, 2, 3]), prefilled=True)


class FakeEngine:
    """Draws one token that tells the seed; under the mask a second, flagged one."""

    def __init__(self, abort: frozenset[int] = frozenset()) -> None:
        self.calls: list[list[SampleRequest]] = []
        self.abort = abort

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        self.calls.append(list(requests))
        return [self._complete(request) for request in requests]

    def _complete(self, request: SampleRequest) -> Completion:
        tokens = np.array([request.seed % 97, MASK_TOKEN] if request.mask else [request.seed % 97], dtype=np.int32)
        return Completion(
            token_ids=tokens,
            logprobs=np.zeros(len(tokens), dtype=np.float32),
            masked=tokens == MASK_TOKEN,
            versions=np.zeros(len(tokens), dtype=np.int32),
            finish_reason="abort" if request.index in self.abort else "stop",
        )


class FakeScorer:
    """Gives rollout i of a question the i-th accuracy of its table; None fails."""

    def __init__(self, table: dict[str, Sequence[float | None]]) -> None:
        self.table = table
        self.seen: list[int] = []

    async def score(self, question: Question, rollouts: Sequence[Rollout]) -> list[Rollout]:
        await asyncio.sleep(0)
        self.seen += [rollout.index for rollout in rollouts]
        return [self._score(rollout, self.table[question.id][rollout.index]) for rollout in rollouts]

    def _score(self, rollout: Rollout, accuracy: float | None) -> Rollout:
        return replace(rollout, failure="error") if accuracy is None else replace(rollout, reward=Reward(accuracy, accuracy))


class FakeEncoder:
    def response_text(self, prompt: Prompt, token_ids: Array) -> str:
        return f"<think>{token_ids.tolist()}"


def config(cge: CGEConfig | None = CGEConfig(), group_size: int = 4) -> SamplingConfig:  # noqa: B008
    return SamplingConfig(group_size=group_size, max_tokens=8, stop=("x",), cge=cge)


def draw(
    table: dict[str, Sequence[float | None]], sampling: SamplingConfig, engine: FakeEngine | None = None, **extra: object
) -> list[Group]:
    options = {"seed": 1, "epochs": [0] * len(table), "encoder": FakeEncoder(), **extra}
    return asyncio.run(draw_groups([prompt(name) for name in table], engine or FakeEngine(), FakeScorer(table), sampling, **options))


@pytest.mark.parametrize(
    ("accuracies", "max_mean", "expected"),
    [
        ([0, 0, 0, 0], 1.0, True),
        ([1, 1, 1, 1], 1.0, True),
        ([1, 1, 1, 1], 0.5, False),
        ([0, 0, 0, 0], 0.5, True),
        ([1, 0, 0, 0], 1.0, False),
        ([1, 0, 1, 0], 1.0, False),
        ([None, None, None, 1], 1.0, False),
        ([0, None, 0, 0], 1.0, True),
        ([0, float("nan"), 0, 0], 1.0, True),
        ([0.1, 0.1, 0.1], 1.0, True),  # a float variance of 1.9e-34 is no variance
        ([None, None], 1.0, False),
        ([], 1.0, False),
    ],
)
def test_ex_4_1_trigger(accuracies: list[float | None], max_mean: float, expected: bool) -> None:
    assert should_intervene(accuracies, max_mean) is expected


def test_ex_4_1_first_wave_size() -> None:
    assert [first_wave_size(size, 0.5) for size in (2, 3, 4, 5, 6, 7, 8, 16)] == [1, 2, 2, 2, 3, 4, 4, 8]
    assert (first_wave_size(8, 0.01), first_wave_size(8, 0.99)) == (1, 7)
    with pytest.raises(ValueError, match="group_size = 1"):
        first_wave_size(1, 0.5)


def test_ex_4_1_a_group_of_two_never_triggers() -> None:
    (group,) = draw({"a": [0, 0]}, config(group_size=2))
    assert (group.intervened, group.arm) == (False, "free")
    assert [rollout.wave for rollout in group.rollouts] == [1, 2]


def test_each_wave_is_one_call_and_only_triggered_groups_are_masked() -> None:
    engine = FakeEngine()
    none, mixed, all_ = draw({"none": [0, 0, 0, 1], "mixed": [0, 1, 0, 0], "all": [1, 1, 1, 0]}, config(), engine)
    assert [len(call) for call in engine.calls] == [6, 6]
    assert [(group.intervened, group.arm) for group in (none, mixed, all_)] == [(True, "masked"), (False, "free"), (True, "masked")]
    for group in (none, mixed, all_):
        assert [rollout.index for rollout in group.rollouts] == [0, 1, 2, 3]
        assert [(rollout.wave, rollout.arm) for rollout in group.rollouts] == [(1, "free"), (1, "free"), (2, group.arm), (2, group.arm)]
        assert [bool(rollout.completion.masked.any()) for rollout in group.rollouts] == [False, False, group.intervened, group.intervened]
        assert all(rollout.reward is not None and rollout.text.startswith("<think>") for rollout in group.rollouts)


def test_max_mean_leaves_groups_that_are_all_correct_alone() -> None:
    wrong, right = draw({"wrong": [0, 0, 0, 0], "right": [1, 1, 1, 1]}, config(CGEConfig(max_mean=0.5)))
    assert (wrong.arm, right.arm) == ("masked", "free")


def test_the_rule_reaches_the_engine() -> None:
    engine = FakeEngine()
    draw({"a": [0, 0, 0, 0]}, config(CGEConfig(threshold=0.9, token_filter="none", cap=7)), engine)
    free, masked = engine.calls[0][0], engine.calls[1][0]
    assert free.mask is None
    assert free.confidence == masked.confidence == 0.9
    assert masked.mask is not None
    assert (masked.mask.threshold, masked.mask.token_filter, masked.mask.cap) == (0.9, "none", 7)
    assert (masked.parameters.max_tokens, masked.parameters.stop) == (8, ("x",))


@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0, None]), min_size=5, max_size=5), min_size=1, max_size=4), st.sampled_from([0.0, 0.5, 1.0])
)
def test_a_rollout_that_is_not_masked_is_the_plain_one(accuracies: list[list[float | None]], share: float) -> None:
    table = {f"q{number}": row for number, row in enumerate(accuracies)}
    plain = draw(table, config(None, 5))
    gated = draw(table, config(CGEConfig(control_share=share), 5))
    for parent, group in zip(plain, gated, strict=True):
        assert (parent.intervened, parent.arm, {rollout.wave for rollout in parent.rollouts}) == (False, "free", {1})
        assert group.intervened == should_intervene([None if r.reward is None else r.reward.accuracy for r in group.rollouts[:2]])
        for before, after in zip(parent.rollouts, group.rollouts, strict=True):
            if after.arm != "masked":
                assert before.completion.token_ids.tolist() == after.completion.token_ids.tolist()


def test_seeds_are_those_of_the_named_streams() -> None:
    engine = FakeEngine()
    draw({"a": [0, 0, 0, 0], "b": [0, 1, 0, 0]}, config(), engine, seed=5, epochs=[2, 3])
    drawn = {(request.prompt.question.id, request.index): request.seed for call in engine.calls for request in call}
    assert drawn == {(name, i): stream_seed(5, "rollout", epoch, name, i) for name, epoch in (("a", 2), ("b", 3)) for i in range(4)}


def test_the_control_arm_is_drawn_by_its_own_stream_and_leaves_the_mask_out() -> None:
    names = [f"q{number}" for number in range(400)]
    engine = FakeEngine()
    groups = draw({name: [0, 0, 0, 0] for name in names}, config(CGEConfig(control_share=0.25)), engine)
    assert [group.arm == "control" for group in groups] == [stream(1, "control", 0, name).random() < 0.25 for name in names]
    share = np.mean([group.arm == "control" for group in groups])
    assert abs(share - 0.25) < 0.07
    for group in groups:
        assert group.intervened
        assert group.arm == "masked" or not any(rollout.completion.masked.any() for rollout in group.rollouts)


def test_a_larger_control_share_only_adds_to_the_control_arm() -> None:
    table = {f"q{number}": [0, 0, 0, 0] for number in range(50)}
    small, large = (draw(table, config(CGEConfig(control_share=share))) for share in (0.2, 0.6))
    assert all(b.arm == "control" for a, b in zip(small, large, strict=True) if a.arm == "control")


def test_an_unscored_rollout_does_not_count_and_does_not_stop_the_group() -> None:
    (one_valid, two_valid) = draw({"one": [None, 0, 0, 0, 0, 0], "two": [None, 0, 0, None, 1, 1]}, config(group_size=6))
    assert (one_valid.arm, two_valid.arm) == ("masked", "masked")  # two of three valid
    (single,) = draw({"single": [None, 0, 0, 0]}, config())
    assert single.arm == "free"
    assert (single.rollouts[0].reward, single.rollouts[0].failure) == (None, "error")


def test_an_aborted_response_is_not_scored() -> None:
    engine, scorer = FakeEngine(abort=frozenset({1})), FakeScorer({"a": [0, 0, 0, 0]})
    (group,) = asyncio.run(draw_groups([prompt("a")], engine, scorer, config(), seed=0, epochs=[0], encoder=FakeEncoder()))
    assert 1 not in scorer.seen
    assert (group.rollouts[1].reward, group.rollouts[1].failure) == (None, "aborted")
    assert [rollout.index for rollout in group.rollouts] == [0, 1, 2, 3]
    assert group.arm == "free"


def test_questions_are_scored_concurrently() -> None:
    class Barrier(FakeScorer):
        async def score(self, question: Question, rollouts: Sequence[Rollout]) -> list[Rollout]:
            await asyncio.wait_for(barrier.wait(), timeout=5)  # passes only when all three questions are waiting
            return await super().score(question, rollouts)

    barrier = asyncio.Barrier(3)
    table = {name: [0, 0, 0, 0] for name in "abc"}
    groups = asyncio.run(
        draw_groups([prompt(n) for n in table], FakeEngine(), Barrier(table), config(), seed=0, epochs=[0] * 3, encoder=FakeEncoder())
    )
    assert len(groups) == 3


def test_a_scorer_may_answer_in_any_order() -> None:
    class Reversed(FakeScorer):
        async def score(self, question: Question, rollouts: Sequence[Rollout]) -> list[Rollout]:
            return (await super().score(question, rollouts))[::-1]

    (group,) = asyncio.run(
        draw_groups([prompt("a")], FakeEngine(), Reversed({"a": [0, 1, 0, 1]}), config(), seed=0, epochs=[0], encoder=FakeEncoder())
    )
    assert [rollout.reward.accuracy for rollout in group.rollouts if rollout.reward] == [0, 1, 0, 1]


def test_no_prompts_give_no_groups() -> None:
    assert draw({}, config()) == []


def test_an_engine_that_loses_a_request_is_an_error() -> None:
    class Losing(FakeEngine):
        async def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
            return (await super().sample(requests))[:-1]

    with pytest.raises(RuntimeError, match="3 completions for 4 requests"):
        draw({"a": [0] * 4}, config(None), Losing())
