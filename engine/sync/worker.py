"""Inside the worker processes of a vLLM server, which alone import this: ``--worker-extension-cls headrace.sync.worker.Extension``.

Importing it registers the ``shm`` weight transfer with vLLM; ``Extension`` gives the worker two methods that the learner calls
around an update, whatever the transport. Nothing of vLLM is replaced.
"""

import mmap
import os
import re
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from headrace.sync import coverage
from headrace.sync.shared_memory import PREFIX, ROOT

_BUCKET = re.compile(r"bucket-\d+")


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):
    """Where the learner writes its buckets."""

    folder: str


@dataclass
class SharedMemoryUpdate(WeightTransferUpdateInfo):
    """One bucket: a file, its CRC-32, and the tensors in it."""

    file: str
    size: int
    checksum: int
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    offsets: list[int]


class SharedMemoryEngine(WeightTransferEngine[SharedMemoryInit, SharedMemoryUpdate]):
    """Receives weights as files in shared memory, in checkpoint format, layer by layer."""

    init_info_cls = SharedMemoryInit
    update_info_cls = SharedMemoryUpdate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model: Any
        self._folder: Path | None = None
        self._known: set[str] = set()  # names that have loaded something into this model

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        """Check the folder: the learner's user's own, directly in shared memory, closed to others.

        Raises:
            ValueError: it is not.
        """
        folder = Path(init_info.folder)
        if folder.parent != ROOT or not folder.name.startswith(PREFIX):
            raise ValueError(f"{folder} is no bucket folder; expected {ROOT}/{PREFIX}…")
        try:
            found = folder.lstat()
        except OSError as error:
            raise ValueError(f"{folder}: {error.strerror}; the shm transport needs servers on the learner's machine") from None
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ValueError(f"{folder} is not a folder of this user alone")
        self._folder = folder

    def start_weight_update(self) -> None:
        """Make every layer ready to be loaded anew."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class does, which waits for an accelerator that a CPU server lacks."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        """Load one bucket.

        Raises:
            ValueError: the bytes are not those the learner wrote, the description is senseless, or the model has no such weight.
        """
        tensors = list(self._tensors(update_info))
        new = [(name, tensor) for name, tensor in tensors if name not in self._known]
        self.model.load_weights((name, tensor) for name, tensor in tensors if name in self._known)
        for name, tensor in new:  # one by one: what a model does not know may be passed over without a word
            if not self.model.load_weights([(name, tensor)]):
                raise ValueError(f"the server's model has no weight {name}")
            self._known.add(name)

    def finish_weight_update(self) -> None:
        """Put the loaded layers in place."""
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():
            _repack_tied_heads(self.model)

    def shutdown(self) -> None:
        """Nothing is held between updates."""

    def _tensors(self, update: SharedMemoryUpdate) -> Iterator[tuple[str, Tensor]]:
        """The bucket's tensors, views of the mapped file; the mapping lives as long as they do."""
        memory = self._map(update.file, update.size)
        checksum = zlib.crc32(memory)
        if checksum != update.checksum:
            raise ValueError(f"{update.file}: checksum {checksum:08x}, the learner wrote {update.checksum:08x}; the bucket is corrupted")
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        for name, kind, shape, offset in zip(update.names, update.dtype_names, update.shapes, update.offsets, strict=True):
            dtype = getattr(torch, kind, None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{update.file}: {name} has type {kind!r}, which torch does not know")
            end = offset + dtype.itemsize * torch.Size(shape).numel()
            if not 0 <= offset <= end <= update.size:
                raise ValueError(f"{update.file}: {name} lies at {offset}:{end}, outside the {update.size} bytes of the file")
            yield name, whole[offset:end].view(dtype).view(shape)

    def _map(self, name: str, size: int) -> mmap.mmap:
        if self._folder is None:
            raise ValueError("a bucket came before the folder")
        if not _BUCKET.fullmatch(name):
            raise ValueError(f"{name!r} is no bucket's name")
        try:
            descriptor = os.open(self._folder / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise ValueError(f"{self._folder / name}: {error.strerror}") from None
        try:
            found = os.fstat(descriptor).st_size
            if found != size or not size:
                raise ValueError(f"{self._folder / name} has {found:,} bytes, the learner wrote {size:,}")
            return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(descriptor)


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """Let heads that share the embedding take their packed copy again.

    On a CPU vLLM multiplies by packed copies of the weights and makes them anew for layers that weights were loaded *into*. A tied
    head is none of those and would keep the copy of its old weights.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


class Extension:
    """Methods that vLLM mixes into its worker class; ``self`` is the worker. Reached through ``/collective_rpc``."""

    weight_transfer_engine: Any
    model_config: Any
    _weight_update_active: bool

    def headrace_abandon(self) -> dict[str, Any]:
        """Leave whatever an earlier push that failed or was killed has left half done; the model may hold garbage afterwards.

        Without this, layers that were half loaded would take the rest of a new push for the rest of the old.
        """
        half = self._weight_update_active or coverage.is_loading(self.weight_transfer_engine.model)
        if half:
            finalize_layerwise_reload(self.weight_transfer_engine.model, self.model_config)
            self._weight_update_active = False
        return {"abandoned": half}

    def headrace_coverage(self) -> dict[str, Any]:
        """Which parameters of the model the update that is going on has filled; called before it is finished."""
        filled, missing = coverage.coverage(self.weight_transfer_engine.model)
        return {"filled": filled, "missing": missing}


WeightTransferEngineFactory.register_engine("shm", SharedMemoryEngine)
