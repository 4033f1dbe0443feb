"""Compiled layers: the numbers of plain ones, two versions of each graph however the rows' lengths change."""

import functools

import pytest
import torch
from torch._dynamo.utils import counters

from headrace.policy.score import score_batch
from tests.policy.learner_cases import BANNED, make_config, make_learner, random_batch, tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), layers=1)


@pytest.fixture
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def assert_equal_to_plain(directory, seeds, **sections):
    """Both learn from batches of ever other lengths; graphs so far after each."""
    sections = {**sections, "optimizer": {"learning_rate": 5e-4}}  # Adam turns noise in a gradient near zero into a share of the rate
    plain = make_learner(make_config(directory, **sections))
    fast = make_learner(make_config(directory, **{**sections, "learner": {"compile": True, **sections.get("learner", {})}}))
    graphs = []
    for seed in seeds:
        batch = random_batch(seed, plain.config.loss, groups=2 + seed % 3, longest=4 + seed, zero_groups=seed % 2)
        mine, theirs = plain.update(batch), fast.update(batch)
        score_batch(fast.policy, batch, BANNED, 40, torch.device("cpu"))
        for key in mine:
            if not key.startswith("time/"):
                assert theirs[key] == pytest.approx(mine[key], rel=1e-5, abs=1e-5), key
        graphs.append(counters["stats"]["unique_graphs"])
    for one, other in zip(plain.policy.parameters(), fast.policy.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    return graphs


def test_graphs_do_not_follow_the_lengths(model, fresh, monkeypatch):
    """Traced as for a real backend, executed as traced: what is recompiled does not depend on who makes the code."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    graphs = assert_equal_to_plain(model, range(1, 7))
    assert 0 < graphs[0] <= 16
    assert graphs[-1] == graphs[0]


@pytest.mark.soak
@pytest.mark.parametrize("recomputed", [False, True])
def test_compiled_code_learns_alike(model, fresh, recomputed):
    """Inductor's own C++, with and without recomputed activations; minutes on a busy machine."""
    graphs = assert_equal_to_plain(model, (1, 3, 5), model={"activation_checkpointing": recomputed})
    assert graphs[-1] == graphs[0]
