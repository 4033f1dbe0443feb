"""torch's checkpoint reader, with an index that cannot run code.

The index ``.metadata`` is a pickle by torch's choice. It is read by an unpickler that knows the index's own record types and
nothing else, so a doctored one is refused and never runs. The data files are read by torch with ``weights_only``.
"""

import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta


class _IndexUnpickler(pickle.Unpickler):
    """Reads the index of torch.distributed.checkpoint and refuses anything else."""

    RECORDS = frozenset(
        (module, name)
        for module, names in {
            "torch.distributed.checkpoint.metadata": (
                "Metadata MetadataIndex TensorStorageMetadata TensorProperties ChunkStorageMetadata BytesStorageMetadata "
                "StorageMeta _MEM_FORMAT_ENCODING"
            ),
            "torch.distributed.checkpoint.filesystem": "_StorageInfo",
            "torch.serialization": "_get_layout",
            "torch": "Size",
            "pathlib": "PosixPath WindowsPath",
            "pathlib._local": "PosixPath WindowsPath",
        }.items()
        for name in names.split()
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.RECORDS or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its index names {module}.{name}, which no index needs")


class SafeReader(FileSystemReader):
    """torch's reader with the index read safely."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            metadata = _IndexUnpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
