"""Save, resume, export.

A checkpoint is a folder ``step_000025`` that appears whole or not at all: everything is written and flushed into a hidden
folder beside it, which is then renamed. ``latest`` names the one to resume from. Inside:

    state.json                 step, learner counters, parameter names and shapes, configuration, whatever the caller adds
    .metadata, *.distcp        weights and moments through torch.distributed.checkpoint: any number of ranks may load them
    groups.msgpack             groups that were drawn and had not trained, if there were any
    SHA256SUMS                 digests of all of these, compared before anything is loaded; ``sha256sum -c`` reads it too
"""

import json
import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from headrace import checkpoint_files as files
from headrace.checkpoint_reader import SafeReader
from headrace.encoding import Encoder
from headrace.policy.adapters import named_weights
from headrace.policy.model import Policy
from headrace.policy.parallel import full_tensor, of_policy
from headrace.policy.update import Learner

FORMAT = 2
GROUPS = "groups.msgpack"
_REASON = 200  # characters of a reason that a message shows


class CheckpointError(ValueError):
    """A checkpoint cannot be written, read or used for this model; the message names the path and what is wrong."""

    on_every_rank = True


# ------------------------------------------------------------------------------------------------------ save


def save(folder: Path, step: int, learner: Learner, extra: Mapping[str, Any], keep: int = 2, groups: bytes = b"") -> Path:
    """Write a checkpoint under ``folder``, point ``latest`` at it and drop all but the newest ``keep``. Collective.

    ``extra`` is JSON: ledger, controller, anything that a resumed run needs; ``groups`` are bytes beside it. A finished
    checkpoint is never touched: the same step saved again gets a new folder, ``step_000025-1``.

    Raises:
        CheckpointError: the disk is full or the folder not writable; earlier checkpoints are as before.
    """
    folder = Path(folder)
    parallel = learner.parallel
    target = folder / files.free_name(folder, step)
    partial = folder / f"{files.SAVING}{target.name}"
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
        files.clear_unfinished(folder)
        partial.mkdir()

    def finish() -> None:
        own = [partial / "state.json", partial / ".metadata"]
        files.write(own[0], text.encode())
        if groups:
            own.append(partial / GROUPS)
            files.write(own[-1], groups)
        written = {name: digest for part in parts for name, digest in part.items()}
        files.write_sums(partial, written | files.digests(own))
        files.flush(partial)
        partial.rename(target)
        files.flush(folder)
        files.write(folder / ".latest", f"{target.name}\n".encode())
        (folder / ".latest").replace(folder / "latest")
        files.flush(folder)
        files.prune(folder, keep)

    try:
        with _one_line(f"checkpoint {target} cannot be written"):
            parallel.run_on_main(begin)
            dcp.save(learner.state_dict(), storage_writer=FileSystemWriter(partial), no_dist=parallel.world_size == 1)
            parts = parallel.run_everywhere(lambda: files.digests(partial.glob(f"__{parallel.rank}_*.distcp")))
            parallel.run_on_main(finish)
    except CheckpointError:
        if parallel.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


# ------------------------------------------------------------------------------------------------------ resume


def latest(folder: Path) -> Path | None:
    """The checkpoint to resume from: the one ``latest`` names, else the newest complete one; None if there is none."""
    return next(iter(files.candidates(Path(folder))), None)


@dataclass(frozen=True, slots=True)
class Restored:
    """What a resumed run goes on from, besides the weights."""

    step: int
    extra: dict[str, Any]
    groups: bytes = b""
    damaged: tuple[str, ...] = ()
    """Newer checkpoints that could not be used, one line each."""


def restore(folder: Path, learner: Learner) -> Restored | None:
    """Load the newest sound checkpoint under ``folder`` into ``learner``; None if there is none. Collective, any number of ranks.

    A checkpoint whose files are not as they were written is passed over for the one before it.

    Raises:
        CheckpointError: every checkpoint is damaged, or the newest sound one belongs to another model.
    """
    parallel = learner.parallel
    damaged: list[str] = []
    for name in parallel.broadcast_json([str(path) for path in files.candidates(Path(folder))] if parallel.is_main else None):
        path = Path(name)
        try:
            state = _sound_state(path, learner)
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        return _loaded(path, state, learner, tuple(damaged))
    if damaged:
        raise CheckpointError(damaged[0])
    return None


def restore_exactly(path: Path, learner: Learner) -> Restored:
    """Load that checkpoint and no other. Collective.

    Raises:
        CheckpointError: it is damaged, or belongs to another model.
    """
    return _loaded(path, _sound_state(path, learner), learner)


def _loaded(path: Path, state: dict[str, Any], learner: Learner, damaged: tuple[str, ...] = ()) -> Restored:
    """Load the weights, moments and counters of a sound checkpoint."""
    _check_model(path, state["parameters"], _shapes(learner))
    with _one_line(f"checkpoint {path} cannot be read"):
        dcp.load(learner.state_dict(), storage_reader=SafeReader(path), no_dist=learner.parallel.world_size == 1)
        learner.load_counters(state["learner"])
        groups = (path / GROUPS).read_bytes() if (path / GROUPS).exists() else b""
    return Restored(state["step"], state["extra"], groups, damaged)


def _sound_state(path: Path, learner: Learner) -> dict[str, Any]:
    """``state.json`` of a checkpoint whose files are all as they were written; every rank checks a share of them. Collective.

    Raises:
        CheckpointError: on every rank, when any of them finds a fault.
    """
    parallel = learner.parallel
    states: list[dict[str, Any]] = []

    def check() -> None:
        files.check_sums(path, parallel.rank, parallel.world_size)
        states.append(read_state(path))
        SafeReader(path).read_metadata()  # by itself: torch would print a traceback before it raises

    with _one_line(f"checkpoint {path} cannot be read"):
        parallel.run_everywhere(check)
    return states[0]


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


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turn whatever reading or writing a checkpoint raises into one line: ``what (why)``."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield
    except CheckpointError:
        raise
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
    """The model's state dict with whole tensors in the model's dtype, adapters merged, tied names sharing one tensor.

    Empty unless ``wanted``.
    """
    gathered: dict[int, torch.Tensor] = {}
    weights = {}
    for name, tensor in named_weights(model):
        whole = gathered.get(id(tensor))
        if whole is None:
            whole = full_tensor(tensor)
            if whole.is_floating_point():
                whole = whole.to(model.config.dtype or whole.dtype)
            whole = whole.cpu() if wanted else whole.new_empty(0)
        weights[name] = whole
        if isinstance(tensor, torch.nn.Parameter):  # lives on, so its id is its own; a merged layer is gone after this turn
            gathered[id(tensor)] = whole
    return weights if wanted else {}
