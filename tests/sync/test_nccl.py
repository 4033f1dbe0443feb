"""The NCCL transport without GPUs: what it hands to vLLM's trainer side, whose broadcast is stood in for."""

import threading

import pytest
import torch

from headrace.sync import nccl
from headrace.sync.nccl import NcclTransport
from headrace.sync.servers import SyncError
from headrace.sync.source import WeightSource
from tests.sync import models
from tests.sync.models import Learner

pytestmark = pytest.mark.vllm
transfer = pytest.importorskip("vllm.distributed.weight_transfer", reason="vLLM is not installed")


class Joiner:
    """A server that joins a group and receives what is broadcast."""

    generation = 0

    def __init__(self, port, workers):
        self.name, self.workers = f"http://127.0.0.1:{port}", workers
        self.joined, self.told, self.fault = [], [], None

    def world_size(self):
        return self.workers

    def init_weight_transfer_engine(self, init_info):
        self.joined.append(init_info)

    def update_weights(self, info):
        if self.fault:
            self.fault()
        self.told.append(info)


class Trainer:
    """As vLLM's sender: RPCs through the client, the source iterated and checked against its metadata."""

    def __init__(self, info, client, source):
        assert isinstance(client, transfer.base.VLLMWeightSyncClient)
        self.info, self.client, self.source, self.sent, self.left = info, client, source, [], False
        client.init_weight_transfer_engine({"master_port": info.master_port, "rank_offset": 1, "world_size": info.world_size})

    def send_weights(self):
        self.client.start_weight_update()
        entries = self.source.metadata()
        self.client.update_weights({"names": [entry.name for entry in entries]})
        self.sent = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.source]
        assert self.sent == [(entry.name, entry.dtype, entry.shape) for entry in entries]
        self.client.finish_weight_update()

    def shutdown(self):
        self.left = True


@pytest.fixture
def source(tmp_path):
    return WeightSource(Learner(models.qwen3(tmp_path, tied=True)).model, torch.bfloat16)


@pytest.fixture
def trainers(monkeypatch):
    made = []

    def trainer_init(info, *, client, source):
        made.append(Trainer(info, client, source))
        return made[-1]

    monkeypatch.setattr(transfer.WeightTransferTrainerFactory, "trainer_init", trainer_init)
    return made


def test_every_worker_of_every_server_has_a_rank_of_its_own(source, trainers):
    servers = [Joiner(1, 4), Joiner(2, 2), Joiner(3, 1)]
    transport = NcclTransport(source, 1 << 20, 10)
    transport.connect(servers)
    info = trainers[0].info
    assert (info.rank, info.world_size, info.packed, info.packed_buffer_size_bytes) == (0, 8, True, 1 << 20)
    assert info.master_address == "127.0.0.1"
    assert [server.joined[0]["rank_offset"] for server in servers] == [1, 5, 7]
    sent = transport.send(servers)
    assert sent == sum(entry.nbytes for entry in source.entries())
    assert [len(server.told[0]["names"]) for server in servers] == [len(source.entries())] * 3
    transport.connect(servers[:1])
    assert trainers[0].left
    assert trainers[1].info.world_size == 5


def test_a_broadcast_that_never_ends_is_left_behind(source, trainers):
    servers = [Joiner(1, 1)]
    transport = NcclTransport(source, 1 << 20, 0.3)
    transport.connect(servers)
    freed = threading.Event()
    servers[0].fault = lambda: freed.wait(20)
    with pytest.raises(SyncError, match=r"127.0.0.1:1.* took longer than 0.3 s"):
        transport.send(servers)
    freed.set()
    transport.connect(servers)
    servers[0].fault = None
    transport.send(servers)


def test_the_source_fits_both_forms_of_vllms_base_class(source, monkeypatch):
    """0.32 calls ``metadata()`` and iterates; 0.33 reads ``metadata`` and calls ``iter_full()``."""
    old = nccl._as_vllm_source(source)
    assert isinstance(old, transfer.base.WeightSource)

    class Base:
        def iter_full(self):
            raise NotImplementedError

    monkeypatch.setattr(transfer.base, "WeightSource", Base)
    new = nccl._as_vllm_source(source)
    assert new.metadata == new.metadata
    assert [entry.name for entry in new.metadata] == [name for name, _ in new.iter_full()] == [name for name, _ in source]
    if not hasattr(old, "iter_full"):
        assert [entry.name for entry in old.metadata()] == [name for name, _ in old]
