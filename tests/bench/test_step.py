"""The bench of a whole step: our side trains on every token it was told to draw, and its parts add up; TRL is optional."""

import importlib.util
import re

import pytest

from headrace.bench.grpo_step import OwnStep, make_setting, reward
from headrace.bench.step import step


def test_a_step_is_sampling_and_update(tmp_path) -> None:
    setting = make_setting(tmp_path, prompts=2, rollouts=4, tokens=6, steps=2)
    assert {len(setting.encoder.encode(question).token_ids) for question in setting.questions} == {setting.prompt_tokens}
    assert len({question.id for question in setting.questions}) == 4  # new ones in every step
    with OwnStep(setting) as own:
        before = own.learner.policy.head_weight.clone()
        times = [own(), own()]  # each raises unless it trained on 2 x 4 x 6 response tokens
        assert own.learner.updates == 2
        assert not own.learner.policy.head_weight.equal(before)
        assert len(list(own.journal.metrics.rows())) == 2
    for each in times:
        assert 0 < each.sampling < each.whole
        assert each.update == each.whole - each.sampling


def test_reward_tells_responses_apart() -> None:
    assert reward("a z") == 2 / 3
    assert reward("z a") == 4 / 3


@pytest.mark.skipif(importlib.util.find_spec("trl") is not None, reason="tells what is printed without TRL")
def test_without_trl_our_figures_alone(capsys) -> None:
    step(prompts=2, rollouts=2, tokens=4, rounds=2)
    first, ours, last = capsys.readouterr().out.splitlines()
    assert first.startswith("4 rows x 4 tokens after ")
    whole, sampling, update = (float(re.search(rf"{part} ([\d.]+) s", ours)[1]) for part in ("whole", "sampling", "update"))
    assert 0 < sampling < whole
    assert 0 < update < whole
    assert last.startswith("not measured: TRL (")
    assert "pip install trl" in last
