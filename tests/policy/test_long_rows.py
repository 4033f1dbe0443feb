"""Rows of 32 k tokens: packed, scored and trained in memory that is linear in their length."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.policy.packing import build_batch, take_rows
from headrace.policy.score import score_batch
from tests.policy.learner_cases import BANNED, SAMPLING, make_config, make_group, make_learner, make_rollout, tiny_model

LENGTH = 32_768
SCORES = LENGTH**2 * 4 / 2**20  # MiB of one head's attention scores, were they ever held
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), layers=1)


def long_batch(loss):
    """A row of 32,768 tokens, prompt included, beside one of eight."""
    rng = np.random.default_rng(0)
    allowed = np.setdiff1d(np.arange(64), BANNED)
    rollouts = [make_rollout(i, np.full(n, -4.0), ids=rng.choice(allowed, n)) for i, n in enumerate((LENGTH - 3, 5))]
    return build_batch([make_group(rollouts, [1.0, -1.0])], loss, SAMPLING)


class Peak:
    """Most resident memory since the start of the context, MiB above what was there; Linux."""

    def __enter__(self):
        Path("/proc/self/clear_refs").write_text("5")  # starts the high-water mark over
        self._start = self._read()
        return self

    def __exit__(self, *_):
        self.mib = self._read() - self._start

    @staticmethod
    def _read():
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def test_a_row_of_32k_tokens_is_scored_in_linear_memory(model):
    learner = make_learner(make_config(model, learner={"micro_batch_tokens": LENGTH}))
    batch = long_batch(learner.config.loss)
    assert np.diff(batch.cu_seqlens).tolist() == [LENGTH, 8]
    with Peak() as peak:
        scores = score_batch(learner.policy, batch, BANNED, LENGTH, CPU)
    assert peak.mib < SCORES / 8
    assert np.isfinite(scores.logprobs).all()
    assert (scores.logprobs[batch.response_mask] < 0).all()
    head = replace(
        take_rows(batch, [1]), token_ids=batch.token_ids[:8], response_mask=batch.response_mask[:8], loss_mask=batch.loss_mask[:8]
    )
    start = score_batch(learner.policy, head, BANNED, LENGTH, CPU)  # the future changes nothing
    np.testing.assert_allclose(scores.logprobs[:8], start.logprobs, rtol=1e-4, atol=1e-5)


@pytest.mark.soak
def test_a_row_of_32k_tokens_trains(model):
    config = make_config(model, learner={"micro_batch_tokens": LENGTH}, model={"activation_checkpointing": True})
    learner = make_learner(config)
    with Peak() as peak:
        metrics = learner.update(long_batch(config.loss))
    assert peak.mib < SCORES / 8
    assert metrics["learner/micro_batches"] == 2
    assert metrics["learner/skipped_steps"] == 0
