"""Which weights are diagnosed: model directories, and run folders with all their checkpoints."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from headrace import checkpoint_files
from headrace.assembly import learner_at_start, start_of
from headrace.checkpoint import read_state, restore_exactly
from headrace.checkpoint_files import SUMS
from headrace.config import ConfigError, DirectoryModel, ModelConfig, load_config
from headrace.evaluation.run import fingerprint
from headrace.policy.model import Policy

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Point:
    """Weights at one moment."""

    series: str
    """Name of the run, or of the model directory."""
    step: int | None
    """Training step; None for a model directory."""
    directory: Path
    """Has the tokenizer."""
    dtype: Precision
    fingerprint: str
    load: Callable[[], Policy]

    @property
    def name(self) -> str:
        return self.series if self.step is None else f"{self.series}, step {self.step}"


def find(paths: Sequence[Path], dtype: Precision | None = None) -> list[Point]:
    """The points of every path in order: of a run folder the starting model and each checkpoint, oldest first.

    Args:
        dtype: in which model directories are read, float32 by default; runs have their own.

    Raises:
        ValueError: a path is neither, or two have the same name.
    """
    points = [point for path in paths for point in _of(Path(path), dtype)]
    names = [point.name for point in points]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{twice}: two checkpoints have this name; rename a folder")
    return points


def _of(path: Path, dtype: Precision | None) -> list[Point]:
    if (path / "config.json").is_file():
        return [_exported(_name(path.resolve()), None, path, dtype or "float32")]
    if not (path / "config.yaml").is_file():
        raise ConfigError(f"{path}: is neither a model directory (config.json) nor a run folder (config.yaml)")
    finished = checkpoint_files.finished(path / "checkpoints")
    if finished:
        return _of_run(path, finished)
    if not (path / "model" / "config.json").is_file():
        raise ConfigError(f"{path}: has neither a checkpoint nor a model yet")
    config = load_config(path / "config.yaml")
    return [_exported(path.resolve().name, config.run.steps, path / "model", config.model.dtype)]


def _name(directory: Path) -> str:
    """What a model directory is called: its own name, behind that of the run it lies in."""
    run = directory.parent
    return f"{run.name}/{directory.name}" if (run / "config.yaml").is_file() else directory.name


def _exported(name: str, step: int | None, directory: Path, dtype: Precision) -> Point:
    model = ModelConfig(source=DirectoryModel(kind="directory", path=directory), dtype=dtype)
    return Point(name, step, directory, dtype, fingerprint(directory), lambda: Policy.load(directory, model, _device()))


def _of_run(run: Path, checkpoints: Sequence[Path]) -> list[Point]:
    """A run's starting model and its checkpoints; of a step that was saved twice the later one."""
    name, (config, start) = run.resolve().name, start_of(run)
    dtype = config.model.dtype

    def at(checkpoint: Path) -> Callable[[], Policy]:
        def load() -> Policy:
            learner, _ = learner_at_start(run)
            restore_exactly(checkpoint, learner)
            return learner.policy.to(_device())

        return load

    points = {0: _exported(name, 0, start, dtype)}
    for folder in checkpoints:
        step, sums = int(read_state(folder)["step"]), (folder / SUMS).read_bytes()
        points[step] = Point(name, step, start, dtype, hashlib.sha256(sums).hexdigest(), at(folder))
    return [points[step] for step in sorted(points)]


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
