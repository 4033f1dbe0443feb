"""Warm start: the right tokens carry the loss, the same inputs give the same bits, nothing non-finite is trained on."""

import numpy as np
import pytest
import torch

from headrace.config import ModelConfig, MultiHopSource, ScratchTextModel, WarmStartConfig
from headrace.encoding import Encoder
from headrace.policy.model import Policy
from headrace.policy.scratch import build_text
from headrace.policy.warm_start import pack_examples, response_ids, warm_start
from headrace.questions import load

SOURCE = ScratchTextModel(kind="scratch_text", hidden=32, layers=1, heads=2)
TASK = load(MultiHopSource(kind="multi_hop", hops=(2,), count=64), 0, "train")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("text")
    build_text(path, SOURCE, TASK.vocabulary(), seed=0)
    return path


@pytest.fixture(scope="module")
def encoder(directory):
    return Encoder.load(directory, think_prefill=True, system_prompt=None, max_prompt_tokens=128)


def policy(directory):
    return Policy.load(directory, ModelConfig(source=SOURCE), "cpu")


def batches(encoder, size=8):
    """``examples`` over the task, and the noise of every call."""
    calls = []

    def examples(step, noise):
        calls.append((step, noise))
        rng = np.random.default_rng(step)
        return [(encoder.encode(TASK.question(i)), TASK.trace(i, rng, noise)) for i in rng.integers(len(TASK), size=size).tolist()]

    return examples, calls


def test_targets_are_the_response_and_the_end_token_only(directory, encoder):
    prompt, trace = encoder.encode(TASK.question(0)), TASK.trace(0, np.random.default_rng(0))
    rows, targets = pack_examples([(prompt, trace)] * 2, encoder)
    predicted = targets[targets != -100].reshape(2, -1)[0]
    assert encoder.decode(predicted) == trace.removeprefix("<think> ") + " <|end|>"
    first = int((targets != -100).nonzero()[0])
    assert encoder.decode([rows.token_ids[first]]) == "<think>"
    assert rows.cu_seqlens.tolist() == [0, len(targets) // 2, len(targets)]


def test_the_loss_is_the_token_mean_of_plain_cross_entropy_without_banned_tokens(directory, encoder):
    examples, _ = batches(encoder)
    (rows, targets), model = pack_examples(examples(0, 0.0), encoder), policy(directory)
    losses = []
    for start, stop in zip(rows.cu_seqlens[:-1].tolist(), rows.cu_seqlens[1:].tolist(), strict=True):
        logits = model.model(rows.token_ids[None, start:stop]).logits[0].double()
        logits[:, list(encoder.banned_ids)] = -torch.inf
        losses.append(
            torch.nn.functional.cross_entropy(logits, targets[start:stop], ignore_index=-100, reduction="none")[targets[start:stop] != -100]
        )
    seen = []
    warm_start(model, encoder, WarmStartConfig(steps=1), examples, 0, lambda done, total, note: seen.append(note))
    assert seen == [f"loss {torch.cat(losses).mean():.3f}"]


def test_it_learns_and_the_same_inputs_give_the_same_bits(directory, encoder):
    config, results = WarmStartConfig(steps=12, learning_rate=1e-2), []
    for _ in range(2):
        model, notes = policy(directory), []
        metrics = warm_start(model, encoder, config, batches(encoder)[0], 0, lambda done, total, note, to=notes: to.append(note))
        results.append((metrics["loss"], [parameter.detach().clone() for parameter in model.parameters()]))
        assert float(notes[0].split()[1]) > metrics["loss"] + 0.5
    assert results[0][0] == results[1][0]
    assert all(torch.equal(*pair) for pair in zip(results[0][1], results[1][1], strict=True))


def test_noisy_steps_come_last(directory, encoder):
    examples, calls = batches(encoder, size=2)
    metrics = warm_start(policy(directory), encoder, WarmStartConfig(steps=2, noisy_steps=3, noise=0.4), examples, 0)
    assert calls == [(0, 0.0), (1, 0.0), (2, 0.4), (3, 0.4), (4, 0.4)]
    assert metrics["steps"] == 5


def test_a_loss_that_is_not_finite_stops_it(directory, encoder):
    model = policy(directory)
    with torch.no_grad():
        model.head_weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"warm_start: loss nan .* step 1 of 4"):
        warm_start(model, encoder, WarmStartConfig(steps=4), batches(encoder)[0], 0)


def test_a_trace_must_begin_with_the_tag_that_the_prompt_opened(encoder):
    with pytest.raises(ValueError, match="opens a think tag"):
        response_ids(encoder.encode(TASK.question(0)), "q1 yes </think>", encoder)
