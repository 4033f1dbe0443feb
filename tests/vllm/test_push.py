"""Weights pushed to a server over HTTP, by one learner rank and by two."""

import asyncio
import copy
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.policy.model import Policy
from headrace.policy.parallel import Parallel
from headrace.policy.score import score_sequence
from headrace.records import TRIAL, Completion, SampleRequest, SamplingParameters
from headrace.sync.push import WeightSync
from headrace.sync.servers import SyncError
from tests import runs
from tests.sampling.tiny_policy import ROUNDING
from tests.vllm.conftest import Served

pytestmark = pytest.mark.vllm
CPU = torch.device("cpu")
TOKENS = list(range(5, 45))


def connect(served: Served, policy: Policy) -> WeightSync:
    sync = WeightSync(
        policy, lambda: [served.control], served.config, Parallel(), partial(score_sequence, policy, device=CPU), deadline=120
    )
    sync._transport.bucket_bytes = 50_000
    return sync


@pytest.fixture
def learner(served: Served) -> Iterator[Policy]:
    """A copy of the served policy, free to change; in the end the server is as it was."""
    yield copy.deepcopy(served.tiny.policy)
    restore = connect(served, served.tiny.policy)
    restore.push(0)
    restore.close()


@pytest.fixture
def sync(served: Served, learner: Policy) -> Iterator[WeightSync]:
    sync = connect(served, learner)
    yield sync
    sync.close()


@torch.no_grad()
def scale(policy: Policy, factor: float) -> None:
    for parameter in policy.parameters():
        parameter.mul_(factor)


def apart(served: Served, policy: Policy) -> float:
    """Largest difference in nats between the server's and a policy's log-probs of a sequence."""
    return float(np.abs(np.subtract(score_sequence(policy, TOKENS, CPU), served.control.score(TOKENS))).max())


def test_the_server_becomes_the_learner_and_refuses_a_corrupted_bucket(
    served: Served, learner: Policy, sync: WeightSync, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale(learner, 0.9)
    assert apart(served, learner) > 0.1
    sync.push(3)
    assert apart(served, learner) < ROUNDING
    update = served.control.update_weights
    with monkeypatch.context() as patch:
        patch.setattr(served.control, "update_weights", lambda info: update(info | {"checksum": info["checksum"] ^ 1}))
        with pytest.raises(SyncError, match=r"http://.*: loading bucket-\d+ failed .*checksum [0-9a-f]{8}, the learner wrote"):
            sync.push(4)
    assert served.control.paused()
    scale(learner, 0.9)
    sync.push(5)
    assert not served.control.paused()
    assert apart(served, learner) < ROUNDING


def draw_during(served: Served, action: Callable[[], object]) -> list[Completion]:
    """Responses of 300 tokens, ``action()`` being done while they are drawn."""
    parameters = SamplingParameters(max_tokens=300)
    requests = [SampleRequest(prompt, index, index, parameters) for prompt in served.tiny.prompts([4, 30]) for index in range(2)]

    async def run() -> list[Completion]:
        engine = served.engine()
        try:
            drawing = asyncio.create_task(engine.sample(requests))
            await asyncio.sleep(0.3)
            await asyncio.to_thread(action)
            return await drawing
        finally:
            await engine.close()

    return asyncio.run(run())


def test_tokens_of_responses_on_their_way_carry_their_versions(served: Served, learner: Policy, sync: WeightSync) -> None:
    sync.push(1)
    scale(learner, 0.9)
    drawn = draw_during(served, lambda: sync.push(2))
    assert any(set(completion.versions.tolist()) == {1, 2} for completion in drawn), "the push came too late to test anything"
    assert all((np.diff(completion.versions) >= 0).all() for completion in drawn)


def test_what_a_server_drew_on_trial_is_drawn_again(served: Served, learner: Policy, sync: WeightSync) -> None:
    sync.push(1)
    served.control._call("POST", "/update_weight_version", json={"new_version": TRIAL})
    drawn = draw_during(served, lambda: served.control.set_version(6))
    assert all(set(completion.versions.tolist()) == {6} for completion in drawn)


def test_two_sharded_ranks_push_to_one_server(served: Served, learner: Policy, tmp_path: Path) -> None:
    model = tmp_path / "model"
    learner.model.save_pretrained(model)
    served.tiny.encoder.save(model)
    runs.on_two_ranks(Path(__file__).with_name("push_ranks.py"), tmp_path, str(model), served.control.name, deadline=280)
    gaps = [json.loads((tmp_path / f"rank-{rank}.json").read_text())["sync/canary_gap"] for rank in range(2)]
    assert gaps[0] == gaps[1] < ROUNDING, "every rank learns how the push went"
    scale(learner, 0.9)
    assert apart(served, learner) < ROUNDING
