"""Save, resume, export.

A checkpoint is a folder ``step_000025`` that appears whole or not at all: everything is written and flushed into a hidden
folder beside it, which is then renamed. ``latest`` names the one to resume from. Inside:

    state.json                 step, learner counters, parameter names and shapes, configuration, whatever the caller adds
    .metadata, *.distcp        weights and moments through torch.distributed.checkpoint: any number of ranks may load them

The data files are read by torch with ``weights_only``. The index ``.metadata`` is a pickle by torch's choice; it is read here by
an unpickler that knows the index's own record types and nothing else, so a doctored one is refused and never runs.
"""

import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from headrace.encoding import Encoder
from headrace.policy.model import Policy
from headrace.policy.parallel import full_tensor, of_policy
from headrace.policy.update import Learner

FORMAT = 1
_REASON = 200  # characters of a reason that a message shows
_FOLDER = re.compile(r"step_(\d+)(?:-(\d+))?")


class CheckpointError(ValueError):
    """A checkpoint cannot be written, read or used for this model; the message names the path and what is wrong."""


# ------------------------------------------------------------------------------------------------------ save


def save(folder: Path, step: int, learner: Learner, extra: Mapping[str, Any], keep: int = 2) -> Path:
    """Write a checkpoint under ``folder``, point ``latest`` at it and drop all but the newest ``keep``. Collective.

    ``extra`` is JSON: ledger, controller, anything that a resumed run needs. A finished checkpoint is never touched: the
    same step saved again gets a new folder, ``step_000025-1``.

    Raises:
        CheckpointError: the disk is full or the folder not writable; earlier checkpoints are as before.
    """
    folder = Path(folder)
    parallel = learner.parallel
    target = folder / _free_name(folder, step)
    partial = folder / f".saving-{target.name}"
    state = {
        "format": FORMAT,
        "step": step,
        "world_size": parallel.world_size,
        "learner": learner.counters(),
        "parameters": _shapes(learner),
        "config": learner.config.model_dump(mode="json"),
        "extra": dict(extra),
    }
    text = json.dumps(state)

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(".saving-*"):
            shutil.rmtree(stale, ignore_errors=True)
        partial.mkdir()

    def finish() -> None:
        _write(partial / "state.json", text)
        _flush(partial)
        partial.rename(target)
        _flush(folder)
        _write(folder / ".latest", target.name + "\n")
        (folder / ".latest").replace(folder / "latest")
        _flush(folder)
        _prune(folder, keep)

    try:
        with _one_line(f"checkpoint {target} cannot be written"):
            parallel.run_on_main(begin)
            dcp.save(learner.state_dict(), storage_writer=FileSystemWriter(partial), no_dist=parallel.world_size == 1)
            parallel.run_on_main(finish)
    except CheckpointError:
        if parallel.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def _free_name(folder: Path, step: int) -> str:
    """``step_000025``, or with a suffix where a finished checkpoint has that name."""
    name, again = f"step_{step:06d}", 0
    while (folder / name).exists():
        again += 1
        name = f"step_{step:06d}-{again}"
    return name


def _write(path: Path, text: str) -> None:
    """Write a small file through to the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _flush(folder: Path) -> None:
    """Make renames and new entries of a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prune(folder: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` checkpoints; never the one that ``latest`` names."""
    current = latest(folder)
    for old in _finished(folder)[:-keep]:
        if old != current:
            aside = folder / f".saving-{old.name}"  # renamed first, so that a kill half-way leaves no half checkpoint
            old.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)


# ------------------------------------------------------------------------------------------------------ resume


def _finished(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest step first."""
    found = []
    for path in folder.glob("step_*"):
        match = _FOLDER.fullmatch(path.name)
        if match and (path / "state.json").is_file() and (path / ".metadata").is_file():
            found.append((int(match[1]), int(match[2] or 0), path))
    return [path for _, _, path in sorted(found)]


def latest(folder: Path) -> Path | None:
    """The checkpoint to resume from: the one ``latest`` names, else the newest complete one; None if there is none."""
    folder = Path(folder)
    finished = _finished(folder)
    try:
        named = folder / (folder / "latest").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        named = None
    if named in finished:
        return named
    return finished[-1] if finished else None


@dataclass(frozen=True, slots=True)
class Restored:
    """What a resumed run goes on from, besides the weights."""

    step: int
    extra: dict[str, Any]


def restore(folder: Path, learner: Learner) -> Restored | None:
    """Load the newest checkpoint under ``folder`` into ``learner``; None if there is none. Collective, any number of ranks.

    Raises:
        CheckpointError: the checkpoint is damaged, or belongs to another model.
    """
    newest = learner.parallel.broadcast_json(str(latest(folder) or "") if learner.parallel.is_main else None)
    if not newest:
        return None
    path = Path(newest)
    state = read_state(path)
    _check_model(path, state["parameters"], _shapes(learner))
    with _one_line(f"checkpoint {path} cannot be read"):
        _Reader(path).read_metadata()  # first by itself: torch would print a traceback before it raises
        dcp.load(learner.state_dict(), storage_reader=_Reader(path), no_dist=learner.parallel.world_size == 1)
        learner.load_counters(state["learner"])
    return Restored(state["step"], state["extra"])


def read_state(path: Path) -> dict[str, Any]:
    """``state.json`` of a checkpoint, checked."""
    with _one_line(f"checkpoint {path} cannot be read"):
        state = json.loads((Path(path) / "state.json").read_text(encoding="utf-8"))
    wanted = {"format": int, "step": int, "learner": dict, "parameters": dict, "extra": dict}
    sound = isinstance(state, dict) and all(isinstance(state.get(name), kind) for name, kind in wanted.items())
    if not sound or state["format"] != FORMAT or not all(isinstance(count, int) for count in state["learner"].values()):
        raise CheckpointError(f"checkpoint {path}: state.json is not of format {FORMAT} with {', '.join(sorted(wanted))}")
    return state


def _shapes(learner: Learner) -> dict[str, list[int]]:
    """Global shape of every tensor of the model, by name."""
    return {name: list(tensor.shape) for name, tensor in learner.state_dict()["model"].items()}


def _check_model(path: Path, saved: Mapping[str, list[int]], wanted: Mapping[str, list[int]]) -> None:
    """Raise at the first tensor that the checkpoint and the model do not share."""
    for name, shape in wanted.items():
        if saved.get(name) != shape:
            there = f"has it as {saved[name]}" if name in saved else "has no such tensor"
            raise CheckpointError(f"checkpoint {path} belongs to another model: {name} is {shape} here, the checkpoint {there}")
    surplus = next((name for name in saved if name not in wanted), None)
    if surplus is not None:
        raise CheckpointError(f"checkpoint {path} belongs to another model: it has {surplus} {saved[surplus]}, the model has not")


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


class _Reader(FileSystemReader):
    """torch's reader with the index read safely."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            metadata = _IndexUnpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turn whatever reading or writing a checkpoint raises into one line: ``what (why)``."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{what} ({_reason(cause)})") from None
    except (OSError, ValueError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{what} ({_reason(error)})") from None


def _reason(error: BaseException) -> str:
    """The error in one line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:_REASON] or type(error).__name__


# ------------------------------------------------------------------------------------------------------ export


def export(policy: Policy, encoder: Encoder, directory: Path) -> Path:
    """Write the policy as a Hugging Face directory: config, safetensors, tokenizer or processor.

    Collective when the policy is sharded; rank 0 writes.

    Names and tied weights are as in the directory the policy was loaded from, so transformers and vLLM load it alike.
    An existing ``directory`` is replaced once the new one is complete.

    Raises:
        CheckpointError: it cannot be written.
    """
    directory = Path(directory)
    parallel = of_policy(policy)
    model = policy.model
    weights = _model_weights(model, parallel.is_main)
    partial = directory.with_name(f".saving-{directory.name}")

    def write() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        model.save_pretrained(partial, state_dict=weights)
        encoder.save(partial)
        if directory.exists():
            shutil.rmtree(directory)
        partial.rename(directory)

    with _one_line(f"model directory {directory} cannot be written"):
        parallel.run_on_main(write)
    return directory


def _model_weights(model: torch.nn.Module, wanted: bool) -> dict[str, torch.Tensor]:
    """The model's state dict with whole tensors in the model's dtype, tied names sharing one tensor; empty unless ``wanted``."""
    gathered: dict[int, torch.Tensor] = {}
    weights = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in gathered:
            whole = full_tensor(tensor)
            if whole.is_floating_point():
                whole = whole.to(model.config.dtype or whole.dtype)
            gathered[id(tensor)] = whole.cpu() if wanted else whole.new_empty(0)
        weights[name] = gathered[id(tensor)]
    return weights if wanted else {}
