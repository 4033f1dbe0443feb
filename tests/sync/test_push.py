"""The order of a push and what every failure leaves behind, with servers that load buckets into a transformers model."""

import copy
import threading
import time
import zlib

import pytest
import torch

from headrace.config import VLLMEngineConfig
from headrace.sync.push import DEADLINE, WeightSync
from headrace.sync.servers import SyncError
from tests.sync import models
from tests.sync.models import Learner, OneRank


class Replica:
    """A server that is a model: what it lacks of vLLM is only speed."""

    def __init__(self, learner, name="http://one:1"):
        self.name = name
        self.generation = 0
        self.model = copy.deepcopy(learner)
        self.calls, self.version, self.state = [], "default", "running"
        self.fault = {}
        self.folder = None
        self.running = threading.Event()

    def _do(self, call, *states):
        self.calls.append(call)
        assert self.state in states, f"{call} while {self.state}"
        if call in self.fault:
            self.fault[call]()

    def pause(self, mode):
        self._do(f"pause {mode}", "running", "paused", "updating")
        self.running.clear()
        self.state = "paused"

    def resume(self):
        self._do("resume", "paused")
        self.state = "running"
        self.running.set()

    def init_weight_transfer_engine(self, init_info):
        self._do("init", "paused")
        self.folder = init_info["folder"]

    def start_weight_update(self):
        self._do("start", "paused")
        self.state, self.got = "updating", set()

    def update_weights(self, info):
        self._do("update", "updating")
        data = bytearray(open(f"{self.folder}/{info['file']}", "rb").read())  # noqa: SIM115
        assert zlib.crc32(data) == info["checksum"]
        parameters = dict(self.model.model.named_parameters())
        for name, shape, offset in zip(info["names"], info["shapes"], info["offsets"], strict=True):
            values = torch.frombuffer(data, dtype=torch.float32, offset=offset, count=torch.Size(shape).numel())
            parameters[name].data.copy_(values.view(shape))
            self.got.add(name)

    def finish_weight_update(self, weight_version=None):
        self._do(f"finish {weight_version}", "updating")
        self.state, self.version = "paused", weight_version

    def call_workers(self, method):
        if method == "headrace_abandon":
            self._do("abandon", "paused")
            return [{"abandoned": False}]
        self._do("coverage", "updating")
        return [{"missing": [name for name, _ in self.model.model.named_parameters() if name not in self.got]}]

    def score(self, token_ids):
        assert self.state == "paused", "queued before the others go on"
        self.running.wait(10)
        self._do("score", "running")
        return self.model.score(token_ids)

    @property
    def steps(self):
        """Calls without the buckets' number."""
        return [call for index, call in enumerate(self.calls) if call != "update" or self.calls[index - 1] != "update"]


PUSH = ["pause keep", "abandon", "start", "update", "coverage", "finish 1", "resume", "score"]
TRIAL = ["pause keep", "abandon", "init", "start", "update", "coverage", "finish trial", "resume", "score"]


@pytest.fixture
def learner(tmp_path):
    return Learner(models.qwen3(tmp_path, tied=True))


@pytest.fixture
def make(learner):
    made = []

    def make(servers, ranks=None, deadline=DEADLINE):
        sync = WeightSync(learner, lambda: servers, VLLMEngineConfig(kind="vllm"), ranks or OneRank(), learner.score, deadline=deadline)
        if sync._transport is not None:
            sync._transport.bucket_bytes = 40_000
        made.append(sync)
        return sync

    yield make
    for sync in made:
        sync.close()


def same(learner, server):
    return all(torch.equal(one, other) for one, other in zip(learner.parameters(), server.model.parameters(), strict=True))


def test_a_push_goes_step_by_step_and_a_new_server_stands_trial_first(learner, make):
    server = Replica(learner)
    sync = make([server])
    report = sync.push(1)
    assert server.steps == TRIAL + PUSH
    assert same(learner, server)
    assert report.version == sync.version == 1
    assert report.bytes == sum(entry.nbytes for entry in sync.source.entries())
    assert report.seconds >= report.paused > 0
    assert report.metrics()["sync/canary_gap"] == report.canary_gap < 1e-6
    server.calls.clear()
    learner.learn(2)
    sync.push(2)
    assert server.steps == [*PUSH[:5], "finish 2", *PUSH[6:]], "connected and proven already"
    assert same(learner, server)


def test_a_restarted_server_stands_trial_again_and_the_others_do_not(learner, make):
    servers = [Replica(learner, "http://one:1"), Replica(learner, "http://two:2")]
    sync = make(servers)
    sync.push(0)
    servers[1].generation += 1
    for server in servers:
        server.calls.clear()
    sync.push(1)
    assert servers[0].steps == [*PUSH[:2], "init", *PUSH[2:]]
    assert servers[1].steps == [*TRIAL, *PUSH[:2], "init", *PUSH[2:]]
    assert all(same(learner, server) for server in servers)


def fail():
    raise ConnectionError("gone")


@pytest.mark.parametrize("step", ["pause keep", "abandon", "start", "update", "coverage", "finish 2", "resume", "score"])
def test_no_failure_is_followed_by_a_resume_and_a_new_push_mends_it(learner, make, step):
    servers = [Replica(learner, "http://one:1"), Replica(learner, "http://two:2")]
    sync = make(servers)
    sync.push(1)
    learner.learn(2)
    servers[1].fault = {step: fail}
    servers[1].calls.clear()
    with pytest.raises(SyncError, match=r"weights '2': http://two:2: .* failed \(gone\)"):
        sync.push(2)
    assert sync.version == 1
    assert "resume" not in servers[1].calls or step in ("resume", "score")
    if step == "score":
        assert servers[1].calls[-2:] == ["score", "pause abort"], "what was drawn with weights that are not proven is ended"
        assert servers[0].state == servers[1].state == "paused"
    if step not in ("finish 2", "resume", "score"):
        assert servers[1].version == "1"
    servers[1].fault = {}
    sync.push(3)
    assert all(same(learner, server) and server.version == "3" and server.state == "running" for server in servers)


def test_a_server_that_hangs_is_named_after_the_deadline(learner, make):
    servers = [Replica(learner, "http://one:1"), Replica(learner, "http://two:2")]
    sync = make(servers, deadline=0.5)
    freed = threading.Event()
    servers[0].fault = {"start": lambda: freed.wait(20)}
    begun = time.monotonic()
    with pytest.raises(SyncError, match=r"^weights 'trial': http://one:1: starting the update took longer than 0.5 s$"):
        sync.push(1)
    assert time.monotonic() - begun < 5
    freed.set()


def test_missing_weights_are_named_before_the_version_changes(learner, make):
    server = Replica(learner)
    sync = make([server])
    sync.push(1)
    whole = sync.source._tensors
    sync.source._tensors = lambda merge: [item for item in whole(merge) if "1.mlp.up_proj" not in item[0]]
    with pytest.raises(SyncError, match=r"one:1: 1 parameters of its model got no weights.*: model.layers.1.mlp.up_proj.weight"):
        sync.push(2)
    assert (server.version, server.state) == ("1", "updating")


def test_a_canary_that_differs_aborts_and_pauses(learner, make):
    server = Replica(learner)
    sync = make([server])
    sync.push(1)
    server.score = lambda token_ids: [value + 0.002 for value in learner.score(token_ids)]
    with pytest.raises(SyncError, match=r"weights '2': .*canary differ by 0.002 nats from the learner's, allowed are 0.001"):
        sync.push(2)
    assert server.calls[-1] == "pause abort"
    assert sync.version == 1


def test_the_learner_is_bit_for_bit_itself_after_a_trial_that_failed(learner, make):
    before = [parameter.clone() for parameter in learner.parameters()]
    server = Replica(learner)
    server.fault = {"coverage": fail}
    with pytest.raises(SyncError):
        make([server]).push(1)
    assert all(torch.equal(one, other) for one, other in zip(before, learner.parameters(), strict=True))


def test_every_failure_is_one_that_all_ranks_raise(learner, make):
    sync = make([])
    sync.servers = fail
    with pytest.raises(SyncError, match="asking for the servers: ConnectionError: gone"):
        sync.push(1)


class Rank1:
    """Another rank, which hears that rank 0 failed."""

    is_main = False

    def __init__(self, said):
        self.said = iter(said)

    def broadcast_json(self, value):
        return next(self.said)


def test_other_ranks_gather_everything_and_raise_too(make):
    sync = make([], ranks=Rank1([[0, None], [None, "http://one:1: pausing failed (gone)"], [0, None], [[0.5, 100, 0.25], None]]))
    gathered = []
    whole = sync.source._tensors
    sync.source._tensors = lambda merge: (gathered.append(name) or (name, tensor) for name, tensor in whole(merge))
    with pytest.raises(SyncError, match="weights '4': http://one:1: pausing failed"):
        sync.push(4)
    assert len(gathered) == len(sync.source.entries())
    assert sync.push(4).canary_gap == 0.25, "and report what rank 0 does"
