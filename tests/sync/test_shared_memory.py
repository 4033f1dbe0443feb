"""Bucket folders: private, gone with their process, and a full disk is one clear line."""

import contextlib
import os
import resource
import signal
import time
from pathlib import Path

import pytest
import torch

from headrace.sync import shared_memory
from headrace.sync.servers import SyncError
from headrace.sync.shared_memory import BucketFolder, SharedMemoryTransport, remove_orphans
from headrace.sync.source import WeightSource
from tests.sync import models
from tests.sync.models import Learner


@pytest.fixture
def holder(tmp_path):
    """A process with a bucket folder under ``tmp_path``, and the folder."""
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        folder = BucketFolder(tmp_path)
        (folder.path / "bucket-1").write_bytes(b"x" * 100)
        os.write(tell, str(folder.path).encode())
        time.sleep(60)
        os._exit(0)
    yield child, Path(os.read(ready, 1000).decode())
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_what_a_killed_process_left_is_removed_at_the_next_start(holder, tmp_path):
    child, folder = holder
    remove_orphans(tmp_path)
    assert (folder / "bucket-1").exists(), "its process lives"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert folder.exists()
    with_new = BucketFolder(tmp_path)
    assert not folder.exists()
    with_new.close()
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_that_ends_leaves_the_folder(tmp_path):
    folder = BucketFolder(tmp_path)
    child = os.fork()
    if child == 0:
        folder.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert folder.path.exists()
    folder.close()
    assert not folder.path.exists()


def test_links_are_not_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "owner").touch()
    (tmp_path / f"{shared_memory.PREFIX}link").symlink_to(precious)
    remove_orphans(tmp_path)
    assert precious.exists()


def test_only_the_owner_may_enter(tmp_path):
    folder = BucketFolder(tmp_path)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.close()


@pytest.fixture
def transport(tmp_path):
    transport = SharedMemoryTransport(WeightSource(Learner(models.qwen3(tmp_path, tied=True)).model, torch.float32), 40_000, 10)
    yield transport
    transport.close()


class Receiver:
    name = "receiver"

    def __init__(self, folder, seconds=0.0, fail_at=None):
        self.folder, self.seconds, self.fail_at = folder, seconds, fail_at
        self.loaded = []
        self.files = 0

    def update_weights(self, info):
        self.files = max(self.files, len(list(self.folder.glob("bucket-*"))))
        time.sleep(self.seconds)
        if len(self.loaded) == self.fail_at:
            raise RuntimeError("no")
        self.loaded.append(info)


def test_at_most_three_buckets_lie_in_memory_and_none_stays(transport):
    folder = transport._folder.path
    receiver = Receiver(folder, seconds=0.02)
    sent = transport.send([receiver])
    assert sum(info["size"] for info in receiver.loaded) >= sent == sum(entry.nbytes for entry in transport.source.entries())
    assert [name for info in receiver.loaded for name in info["names"]] == [entry.name for entry in transport.source.entries()]
    assert len(receiver.loaded) > 5
    assert receiver.files in (2, 3), "the next bucket is written while one is loaded"
    assert not list(folder.glob("bucket-*"))


def test_a_refused_bucket_ends_the_pass_and_leaves_no_file(transport):
    receiver = Receiver(transport._folder.path, fail_at=2)
    with pytest.raises(SyncError, match=r"receiver: loading bucket-3 failed \(no\)"):
        transport.send([receiver])
    assert len(receiver.loaded) == 2
    assert not list(transport._folder.path.glob("bucket-*"))


def test_full_memory_says_so(transport):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(SyncError, match=r"bucket-1: File too large after .* bytes; three buckets of engine.bucket_mib must fit"):
            transport.send([Receiver(transport._folder.path)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(transport._folder.path.glob("bucket-*"))
