"""The canary's parts: a sequence of plain text tokens, a gap that nothing slips through, a shift that leaves no trace."""

import contextlib
import math

import pytest
import torch

from headrace.sync import canary
from tests.sync import models
from tests.sync.models import Learner


def test_the_sequence_is_plain_and_spread():
    tokens = canary.sequence(151_936, avoid=[151_643, 151_655])
    assert len(tokens) == len(set(tokens)) == canary.LENGTH
    assert max(tokens) < 151_936 // 2
    assert max(tokens) - min(tokens) > 151_936 // 3
    assert tokens == canary.sequence(151_936, avoid=[151_643, 151_655])


def test_tokens_to_avoid_are_avoided():
    assert set(canary.sequence(40, avoid=range(3, 18))) <= {0, 1, 2, 18, 19}


@pytest.mark.parametrize(
    ("learner", "server", "expected"),
    [
        ([-1.0, -2.0], [-1.0, -2.0], 0.0),
        ([-1.0, -2.0], [-1.0, -2.5], math.sqrt(0.125)),
        ([-1.0], [-1.0, -2.0], math.inf),
        ([-1.0], [math.nan], math.inf),
        ([-1.0], [-math.inf], math.inf),
    ],
)
def test_gap(learner, server, expected):
    assert canary.gap(learner, server) == pytest.approx(expected)


def test_one_wrong_token_of_the_sequence_is_seen_in_bfloat16():
    right = [-3.0] * (canary.LENGTH - 1)
    assert canary.gap(right, [*right[:-1], -6.0]) > canary.TOLERANCE[torch.bfloat16]


def test_a_shift_changes_every_matrix_and_leaves_no_trace(tmp_path):
    learner = Learner(models.qwen3(tmp_path, tied=True))
    before = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    tokens = canary.sequence(300)
    plain = learner.score(tokens)
    with contextlib.suppress(KeyError), canary.shifted(learner):
        assert all(not torch.equal(tensor, before[name]) for name, tensor in learner.state_dict().items() if tensor.dim() > 1)
        assert canary.gap(plain, learner.score(tokens)) > 3 * canary.TOLERANCE[torch.bfloat16]
        raise KeyError  # restored also when a push fails
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.state_dict().items())
