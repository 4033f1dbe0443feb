"""A study: arms of one configuration, each with several seeds, trained one after another in processes of their own.

Every run is an ordinary run folder under ``runs/studies/NAME``; the same command goes on where a study stopped, and a run that is
finished is not started again.
"""

import ctypes
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, field_validator, model_validator

from headrace.config import Config, Model, build_model, load_model, read_tree
from headrace.journal.store import make_folder

_POLL_SECONDS = 0.5
_GRACE_SECONDS = 120.0
"""For a run to save itself after it was told to stop."""
_TAIL_CHARACTERS = 400
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Arm(Model):
    """One variant of the base configuration."""

    name: str = Field(pattern=r"^[A-Za-z0-9._=+-]+$")
    """Part of its runs' names."""
    label: str = ""
    """How pages call it; empty takes the name."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Dotted fields and their values."""


class Measure(Model):
    """One number per run."""

    metric: str
    """A metric of the step table; ``evaluation/KEY`` is the last evaluation's, ``gain/KEY`` the last minus the first."""
    label: str = ""
    """Row of the table; empty takes the metric's name."""
    part: str = Field("all", pattern="^(all|early|later)$")
    """Steps that count: all, or one half."""


class StudyConfig(Model):
    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    """Folder of the study under ``folder``."""
    title: str
    """Headline of its page."""
    question: str
    """What it is to find out, and what would be evidence for it."""
    base: Path
    """Configuration that all arms start from; relative to the study's file."""
    folder: Path = Path("runs/studies")
    """Where the study's folder is made."""
    seeds: tuple[int, ...] = Field((0, 1, 2), min_length=1)
    """Every arm runs with each; the same seed of two arms is a pair."""
    common: dict[str, Any] = Field(default_factory=dict)
    """Overrides of every arm."""
    arms: tuple[Arm, ...] = ()
    """Variants by name."""
    grid: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    """Further arms: every combination of these values of dotted fields."""
    baseline: str
    """Arm that the others are compared with."""
    measures: tuple[Measure, ...] = Field(min_length=1)
    """Rows of the table."""
    curves: tuple[str, ...] = ()
    """Metrics drawn over the steps."""
    run_minutes: float = Field(120.0, gt=0)
    """Time after which a run is stopped and counts as failed."""

    @field_validator("seeds")
    @classmethod
    def _different(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds):
            raise ValueError("expected different seeds")
        return seeds

    @model_validator(mode="after")
    def _has_arms(self) -> "StudyConfig":
        names = [arm.name for arm in self.variants()]
        if len(names) < 2 or len(set(names)) < len(names):
            raise ValueError(f"expected at least two arms of different names, got {names}")
        if self.baseline not in names:
            raise ValueError(f"baseline {self.baseline!r} is none of the arms {names}")
        return self

    def variants(self) -> list[Arm]:
        """The named arms, then those of the grid."""
        axes = [[(field, value) for value in values] for field, values in self.grid.items()]
        points = itertools.product(*axes) if axes else ()
        return [*self.arms, *(Arm(name=_point_name(point), overrides=dict(point)) for point in points)]


def _point_name(point: Sequence[tuple[str, Any]]) -> str:
    return "+".join(f"{field.rsplit('.', 1)[-1]}={value}" for field, value in point)


@dataclass(frozen=True, slots=True)
class StudyRun:
    """One arm with one seed."""

    arm: Arm
    seed: int
    config: Config

    @property
    def folder(self) -> Path:
        return self.config.run_folder

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def finished(self) -> bool:
        try:
            return json.loads((self.folder / "outcome.json").read_text(encoding="utf-8"))["status"] == "finished"
        except (OSError, ValueError, KeyError, TypeError):
            return False

    @property
    def steps(self) -> int:
        """Steps on record."""
        try:
            return (self.folder / "metrics.jsonl").read_bytes().count(b"\n")
        except OSError:
            return 0


@dataclass(frozen=True)
class Study:
    config: StudyConfig
    runs: tuple[StudyRun, ...]
    """Seed by seed, so that a study that is stopped early has pairs."""

    @property
    def folder(self) -> Path:
        return self.config.folder / self.config.name


def load_study(path: Path, overrides: Sequence[str] = ()) -> Study:
    """Read a study's file and check the configuration of every run.

    Args:
        overrides: ``section.field=value`` for every arm, over the file's own.

    Raises:
        ConfigError: a field of the study or of a run's configuration is unknown, missing or out of range.
    """
    path = Path(path)
    config = load_model(StudyConfig, path)
    base = path.parent / config.base
    runs = []
    for seed in config.seeds:
        for arm in config.variants():
            own = {**config.common, **arm.overrides}
            fixed = {"run.name": f"{arm.name}-seed{seed}", "run.folder": str(config.folder / config.name), "run.seed": seed}
            lines = [f"{field}={yaml.safe_dump(value, default_flow_style=True)}" for field, value in own.items()]
            lines += [*overrides, *(f"{field}={value}" for field, value in fixed.items())]
            runs.append(StudyRun(arm, seed, build_model(Config, read_tree(base), lines, f"{path}, arm {arm.name}")))
    return Study(config, tuple(runs))


# ------------------------------------------------------------------------------------------------------ running

Watch = Callable[[StudyRun, int], None]
"""Told the run under way and its steps on record."""


def execute(study: Study, watch: Watch = lambda *_: None) -> list[str]:
    """Train every run that is not finished; why some failed, one line each.

    A run that fails does not stop the study. Ctrl-C or SIGTERM lets the run under way save itself and ends the study.

    Raises:
        KeyboardInterrupt: the study was stopped.
    """
    make_folder(study.folder)
    failures = []
    with _terminable():
        for run in study.runs:
            if not run.finished:
                fault = _train(run, study.folder, study.config.run_minutes, watch)
                if fault:
                    failures.append(f"{run.name}: {fault}")
    return failures


def _train(run: StudyRun, folder: Path, minutes: float, watch: Watch) -> str:
    """Train one run in a process of its own; why it failed, or nothing."""
    config, log = folder / f"{run.name}.yaml", folder / f"{run.name}.log"
    config.write_text(yaml.safe_dump(run.config.model_dump(mode="json"), sort_keys=False, allow_unicode=True), encoding="utf-8")
    give_up = time.monotonic() + 60 * minutes
    with log.open("ab") as output:
        command = [sys.executable, "-m", "headrace", "train", str(config)]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_die_with_parent
        )
        try:
            while process.poll() is None:
                watch(run, run.steps)
                if time.monotonic() > give_up:
                    return f"was stopped after {minutes:g} minutes at step {run.steps}; the same command goes on, or raise run_minutes"
                time.sleep(_POLL_SECONDS)
        finally:
            _stop(process)
    watch(run, run.steps)
    return "" if process.returncode == 0 and run.finished else f"ended with status {process.returncode}: {_last_line(log)} (log: {log})"


def _die_with_parent() -> None:
    """Ask Linux to send SIGTERM when the study's process is gone, however it went: the run saves itself and ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Let a run save itself; kill its whole group when it does not."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][-_TAIL_CHARACTERS:] if lines else "it said nothing"


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the study as Ctrl-C does."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def paired_seeds(study: Study, arm: str) -> list[int]:
    """Seeds that have finished in an arm and in the baseline."""
    done = {(run.arm.name, run.seed) for run in study.runs if run.finished}
    return [seed for seed in study.config.seeds if {(arm, seed), (study.config.baseline, seed)} <= done]
