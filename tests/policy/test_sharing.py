"""Tokens that rows of one prompt have in common run once: which those are, and that states and gradients stay what they were."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.policy.packing import build_batch
from headrace.policy.score import packed_rows
from headrace.policy.sharing import Sharing, share_fronts
from tests.policy.learner_cases import (
    SAMPLING,
    make_config,
    make_group,
    make_learner,
    make_rollout,
    picture_batch,
    random_batch,
    tiny_model,
    tiny_vision_model,
)

CPU = torch.device("cpu")


def shared(rows, prompts):
    return share_fronts(np.concatenate(rows), np.cumsum([0, *map(len, rows)]), prompts, CPU)


def test_the_longest_beginning_that_all_rows_of_a_prompt_have():
    sharing = shared([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 9], [1, 2, 3, 4]], ["a", "a", "a", "b"])
    assert sharing.kept.tolist() == [0, 1, 2, 3, 6, 7, 10, 11, 12, 13, 14]  # 1 2 once for a, all of b
    assert sharing.source.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 0, 1, 6, 7, 8, 9, 10]


def test_rows_that_are_equal_or_begin_one_another():
    sharing = shared([[1, 2], [1, 2], [1, 2, 3]], ["a", "a", "a"])
    assert sharing.kept.tolist() == [0, 1, 6]
    assert sharing.source.tolist() == [0, 1, 0, 1, 0, 1, 2]


def test_nothing_in_common():
    assert shared([[1, 2], [1, 3]], ["a", "b"]).kept is None
    assert shared([[1, 2], [4, 2]], ["a", "a"]).kept is None


def test_spreading_and_picking_are_each_others_inverse_and_copies_add_up():
    sharing = shared([[1, 2, 3], [1, 2, 4], [1, 5]], ["a", "a", "a"])
    x = torch.randn(len(sharing.kept), 2, 3, dtype=torch.float64, requires_grad=True)
    assert sharing.pick(sharing.spread(x)).equal(x)
    assert torch.autograd.gradcheck(sharing.spread, x)
    assert torch.autograd.gradcheck(sharing.pick, sharing.spread(x).detach().requires_grad_())
    doubled = sharing.twice()
    assert doubled.spread(torch.cat([x, -x])).equal(torch.cat([sharing.spread(x), -sharing.spread(x)]))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    return tiny_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.mark.parametrize(("kind", "options"), [("text", {}), ("vision", {}), ("vision", {"train_vision": True})])
def test_states_and_gradients_are_those_of_separate_rows(request, kind, options):
    directory = request.getfixturevalue(kind)
    config = make_config(directory, model=options)
    policy = make_learner(config).policy
    batch = random_batch(3, config.loss) if kind == "text" else picture_batch(directory, 3, config.loss)
    rows = packed_rows(batch, CPU)
    assert rows.sharing.kept is not None
    weights = torch.randn(len(batch.token_ids), len(policy.head_weight), generator=torch.Generator().manual_seed(0))
    found = []
    for each in (rows, replace(rows, sharing=Sharing())):
        policy.zero_grad()
        hidden = policy(each, lambda hidden, weight: hidden)
        policy(each, lambda hidden, weight: ((hidden @ weight.T).log_softmax(1) * weights).sum()).backward()
        found.append((hidden.detach(), [parameter.grad for _, parameter in policy.trainable_parameters()]))
    (mine, gradients), (separate, want) = found
    torch.testing.assert_close(mine, separate, rtol=0, atol=1e-5)
    for one, other in zip(gradients, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


def test_the_decoder_sees_a_prompt_once(text):
    """Every copy of a prompt takes part in the loss, one in the layers."""
    config = make_config(text)
    learner = make_learner(config)
    group = make_group([make_rollout(i, [-1.0] * 4, ids=[10 + i, 20, 21, 22]) for i in range(5)], [1, -1, 1, -1, 0], prompt=range(1, 7))
    batch = build_batch([group], config.loss, SAMPLING)
    seen = []
    layer = learner.policy.model.get_decoder().layers[0]
    layer.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[1]))
    learner.policy(packed_rows(batch, CPU), lambda hidden, weight: seen.append(len(hidden)))
    assert seen == [6 + 5 * 4, 5 * (6 + 4)]
