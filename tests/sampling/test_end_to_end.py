"""Waves over the real local engine: a gated run is its plain parent but for what the mask draws."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from headrace.config import CGEConfig, SamplingConfig
from headrace.records import Group, Question, Reward, Rollout
from headrace.sampling.local import LocalEngine
from headrace.sampling.waves import draw_groups
from tests.sampling.tiny_policy import ROUNDING, Tiny


class TableScorer:
    """One question's rollouts alternate between right and wrong; the others are all wrong."""

    async def score(self, question: Question, rollouts: Sequence[Rollout]) -> list[Rollout]:
        accuracies = [float(question.id == "q1" and rollout.index % 2) for rollout in rollouts]
        return [replace(rollout, reward=Reward(accuracy, accuracy)) for rollout, accuracy in zip(rollouts, accuracies, strict=True)]


def draw(tiny: Tiny, cge: CGEConfig | None) -> list[Group]:
    prompts = tiny.prompts([4, 9, 6, 12])
    engine = LocalEngine(tiny.policy, tiny.encoder)
    config = SamplingConfig(group_size=6, max_tokens=16, cge=cge)
    return asyncio.run(draw_groups(prompts, engine, TableScorer(), config, seed=0, epochs=[0] * 4, encoder=tiny.encoder))


@pytest.fixture(scope="module")
def plain(tiny: Tiny) -> list[Group]:
    return draw(tiny, None)


def test_two_waves_end_to_end(tiny: Tiny, plain: list[Group]) -> None:
    gated = draw(tiny, CGEConfig(token_filter="none"))
    assert {group.arm for group in gated} == {"masked", "free"}
    masked = [rollout for group in gated for rollout in group.rollouts if rollout.arm == "masked"]
    assert any(rollout.completion.masked.any() for rollout in masked)
    for parent, group in zip(plain, gated, strict=True):
        for before, after in zip(parent.rollouts, group.rollouts, strict=True):
            assert after.text.startswith("<think>")
            first = np.flatnonzero(after.completion.masked)
            shared = first[0] if len(first) else None  # up to the first masked position the two are one
            assert before.completion.token_ids[:shared].tolist() == after.completion.token_ids[:shared].tolist()
            if shared is None:
                np.testing.assert_allclose(before.completion.logprobs, after.completion.logprobs, atol=ROUNDING)


def test_the_control_arm_is_plain_sampling(tiny: Tiny, plain: list[Group]) -> None:
    control = draw(tiny, CGEConfig(token_filter="none", control_share=1.0))
    assert {group.arm for group in control} == {"control", "free"}
    for parent, group in zip(plain, control, strict=True):
        for before, after in zip(parent.rollouts, group.rollouts, strict=True):
            assert before.completion.token_ids.tolist() == after.completion.token_ids.tolist()


def test_the_same_seed_gives_the_same_bits(tiny: Tiny) -> None:
    runs = [draw(tiny, CGEConfig(token_filter="none", control_share=0.5)) for _ in range(2)]
    for a, b in zip(*runs, strict=True):
        assert a.arm == b.arm
        for before, after in zip(a.rollouts, b.rollouts, strict=True):
            assert before.completion.logprobs.tobytes() == after.completion.logprobs.tobytes()
