"""Weights through shared memory: the learner writes buckets as files in ``/dev/shm``, servers on the same machine map them.

The learner's half of the ``shm`` transport; ``worker.py`` is the servers'.
"""

import fcntl
import os
import queue
import shutil
import tempfile
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from headrace.sync.servers import Server, SyncError, on_each
from headrace.sync.source import Entry, WeightSource, aligned, as_bytes, buckets, type_name

ROOT = Path("/dev/shm")
PREFIX = "headrace-weights-"
_LOCK = "owner"


class BucketFolder:
    """A folder in shared memory that only this user can open, locked for as long as its process lives.

    Making one removes those whose process is gone: after kill -9 nobody else would, and their buckets take memory.
    """

    def __init__(self, root: Path = ROOT) -> None:
        remove_orphans(root)
        try:
            unlocked = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=root))  # hidden until it is locked: nobody takes it for an orphan
            self._lock = os.open(unlocked / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.path = unlocked.rename(root / unlocked.name.removeprefix("."))
        except OSError as error:
            raise SyncError(f"{root}: no folder for weights can be made ({error.strerror}); engine.transport = shm needs it") from None
        self._remove = weakref.finalize(self, _remove, self.path, self._lock, os.getpid())

    def close(self) -> None:
        """Remove the folder; at the latest when the process ends in good order."""
        self._remove()


def _remove(folder: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child ends; its parent still needs the folder
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def remove_orphans(root: Path = ROOT) -> None:
    """Remove this user's bucket folders that no living process holds."""
    for folder in root.glob(f"{PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # not ours, or just going
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # its process lives
        finally:
            os.close(lock)


class SharedMemoryTransport:
    """Buckets as files: while servers load one, the next is gathered and written.

    A bucket's file is new and is unlinked once the servers have it; what a server still maps of it stays readable, unchanged.
    """

    def __init__(self, source: WeightSource, bucket_bytes: int, deadline: float) -> None:
        self.source = source
        self.bucket_bytes = bucket_bytes
        self.deadline = deadline
        self._folder = BucketFolder()
        self._written = 0

    def connect(self, servers: Sequence[Server]) -> None:
        """Tell servers where the buckets will lie."""
        info = {"folder": str(self._folder.path)}
        on_each(servers, "opening the bucket folder", lambda server: server.init_weight_transfer_engine(info), self.deadline)

    def send(self, servers: Sequence[Server]) -> int:
        """One pass over the source to servers that have started an update; returns the bytes of it.

        Raises:
            SyncError: shared memory is full, or a server refused a bucket.
        """

        def update(info: dict[str, Any]) -> None:
            on_each(servers, f"loading {info['file']}", lambda server: server.update_weights(info), self.deadline)

        ready: queue.Queue[tuple[Path, dict[str, Any]] | None] = queue.Queue(maxsize=1)
        failure: list[Exception] = []
        sender = threading.Thread(target=_deliver, args=(ready, update, failure), name="sync-sender", daemon=True)
        sender.start()
        try:
            for bucket in self._buckets():
                if failure:
                    bucket[0].unlink()
                    break
                ready.put(bucket)
        finally:
            ready.put(None)
            sender.join()
        if failure:
            raise failure[0]
        return sum(entry.nbytes for entry in self.source.entries())

    def _buckets(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        weights = iter(self.source)
        for entries in buckets(self.source.entries(), self.bucket_bytes):
            yield self._write(entries, weights)

    def _write(self, entries: list[Entry], weights: Iterator[tuple[str, Any]]) -> tuple[Path, dict[str, Any]]:
        """One bucket's file and what servers are told of it."""
        self._written += 1
        path = self._folder.path / f"bucket-{self._written}"
        offsets, end, checksum = [], 0, 0
        try:
            with open(path, "xb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_CLOEXEC, 0o600)) as file:
                for entry in entries:
                    name, tensor = next(weights)
                    assert (name, tensor.dtype, tuple(tensor.shape)) == (entry.name, entry.dtype, entry.shape), name
                    data = as_bytes(tensor)
                    offsets.append(end)
                    for block in (data, bytes(aligned(len(data)) - len(data))):
                        checksum = zlib.crc32(block, checksum)
                        _write_all(file, block)
                    end += aligned(len(data))
        except OSError as error:
            path.unlink(missing_ok=True)
            raise SyncError(f"{path}: {error.strerror} after {end:,} bytes; three buckets of engine.bucket_mib must fit") from None
        return path, {
            "file": path.name,
            "size": end,
            "checksum": checksum,
            "names": [entry.name for entry in entries],
            "dtype_names": [type_name(entry.dtype) for entry in entries],
            "shapes": [list(entry.shape) for entry in entries],
            "offsets": offsets,
        }

    def close(self) -> None:
        """Remove the folder."""
        self._folder.close()


def _write_all(file: Any, block: Any) -> None:
    """``write`` until all is written: one call takes at most 2 GiB."""
    view = memoryview(block)
    while view:
        view = view[file.write(view) :]


def _deliver(
    ready: "queue.Queue[tuple[Path, dict[str, Any]] | None]", update: Callable[[dict[str, Any]], None], failure: list[Exception]
) -> None:
    """Hand buckets to the servers until told that there are no more; after a failure only remove them."""
    while (bucket := ready.get()) is not None:
        path, info = bucket
        try:
            if not failure:
                update(info)
        except Exception as error:
            failure.append(error)
        finally:
            path.unlink(missing_ok=True)
