"""The run folder: what a run writes while it goes, exact across kills and resumes.

``runs/NAME/`` holds

====================  =========================================================================================
``config.yaml``       the resolved configuration
``about.json``        versions and hardware
``metrics.jsonl``     one row per step; equal on every run with the same seed but for ``time/*`` and ``machine/*``
``samples.jsonl``     groups with prompts, responses, rewards and masked positions
``mask_tokens.jsonl`` per step: tokens removed, tokens drawn, masked positions, with counts
``evaluations.jsonl`` results on held-out questions (:class:`Evaluation`)
``outcome.json``      how the run ended; absent while it goes or after a kill
``tensorboard/``      event files
====================  =========================================================================================
"""

import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NotRequired, Protocol, TypedDict

import yaml

from headrace.config import Config
from headrace.journal.alerts import Alerts
from headrace.journal.mask import mask_counts
from headrace.journal.metrics import group_metrics
from headrace.journal.progress import Screen
from headrace.journal.samples import Decode, chosen, sample_row
from headrace.journal.store import Table, line, make_folder, plain, write_text
from headrace.journal.trackers import Tracker, scalars, trackers
from headrace.ranges import span
from headrace.records import Group

BESIDE_STEPS = ("warm start", "starting servers", "evaluation", "checkpoint", "report")
"""Phases that ``time/step`` leaves out; they show in ``time/wall``, the gap between two steps."""


class QuestionResult(TypedDict):
    """Outcome of one held-out question; 1 is right."""

    id: str
    hops: NotRequired[int | None]
    greedy: int
    samples: list[int]
    maj: int
    """Whether the majority answer of the samples is right."""
    source: NotRequired[str]
    types: NotRequired[list[str]]
    """Kinds of its hops."""


class Evaluation(TypedDict):
    """Result of one evaluation. Rates are in [0, 1]; intervals are bootstrapped from ``per_question``."""

    step: int
    name: str
    """``before``, ``after``, or ``held_out`` during training."""
    questions: int
    mean_accuracy: float
    greedy_accuracy: float
    maj_accuracy: float
    pass_at: NotRequired[dict[str, float]]
    """Probability that k samples hold a right one, by k."""
    format_rate: float
    length_mean: float
    clipped_share: NotRequired[float]
    """Sampled responses that end at the length limit."""
    by_hops: dict[str, dict[str, Any]]
    per_question: list[QuestionResult]


class Tick(Protocol):
    """Reports progress inside a phase."""

    def __call__(self, done: int, total: int, note: str = "") -> None: ...


class Journal:
    """Writes a run folder and shows the run on screen.

    Call :meth:`start` (or :meth:`resume`) once, then :meth:`log` after every step. ``active=False`` makes every method do nothing, for
    the ranks that do not write.

    Raises:
        JournalError: the folder cannot be written (one line with the path and the reason), or a tracker is not installed.
    """

    def __init__(self, config: Config, total_steps: int, *, active: bool = True, quiet: bool = False) -> None:
        self.config = config
        self.folder: Path = config.run_folder
        self.active = active
        self.screen = Screen(config.run.name, total_steps, quiet=quiet or not active)
        self.metrics = Table(self.folder / "metrics.jsonl")
        self.samples = Table(self.folder / "samples.jsonl", durable=False)
        self.mask_tokens = Table(self.folder / "mask_tokens.jsonl", durable=False)
        self.evaluations = Table(self.folder / "evaluations.jsonl")
        self._alerts = Alerts()
        self._trackers: list[Tracker] = []
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._beside = 0.0
        self._phases: list[str] = []
        self._mark = self._last_log = time.perf_counter()

    def start(self) -> None:
        """Begin a run from nothing: rows of an earlier attempt are removed."""
        self._open(-1)

    def resume(self, step: int) -> None:
        """Continue after ``step``: rows of later steps are removed from every table."""
        self._open(step)

    def _open(self, step: int) -> None:
        if not self.active:
            return
        make_folder(self.folder)
        (self.folder / "outcome.json").unlink(missing_ok=True)
        for table in (self.metrics, self.samples, self.mask_tokens, self.evaluations):
            table.truncate(step)
        write_text(self.folder / "config.yaml", yaml.safe_dump(self.config.model_dump(mode="json"), sort_keys=False, allow_unicode=True))
        write_text(self.folder / "about.json", line(_about()))
        for row in self.metrics.rows():
            self._alerts.watch({name: value for name, value in row.items() if value is not None})
        self._trackers = trackers(self.config, self.folder, step + 1)
        self.screen.step = max(step, 0)
        if step > 0:
            done = step >= self.config.run.steps
            self.screen.say(f"all {step} steps are done; --fresh starts over" if done else f"resuming after step {step}")
        self._beside = 0.0
        self._mark = self._last_log = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[Tick]:
        """Time a part of the run and show it; an inner phase's time is not the outer one's.

        Yields a function ``tick(done, total, note="")`` for progress inside the phase.
        """
        self._charge()
        self._phases.append(name)
        self.screen.begin(name)

        def tick(done: int, total: int, note: str = "") -> None:
            self.screen.tick(name, done, total, note)

        try:
            with span(name):
                yield tick
        finally:
            self._charge()
            self._phases.pop()

    def _charge(self) -> None:
        """Give the time since the last mark to the innermost open phase."""
        now = time.perf_counter()
        if self._phases:
            self._seconds[self._phases[-1]] += now - self._mark
            if self._phases[-1] in BESIDE_STEPS:
                self._beside += now - self._mark
        self._mark = now

    def _timings(self, tokens: float) -> dict[str, float]:
        """Seconds of every phase, step and wall; tokens per second; the share of the step that the learner waits for its batch."""
        self._charge()
        wall = self._mark - self._last_log
        self._last_log = self._mark
        step = wall - self._beside
        timings = {f"time/{name.replace(' ', '_')}": seconds for name, seconds in self._seconds.items()}
        rates = {"time/tokens_per_s": tokens / step, "time/idle_ratio": self._seconds["sampling"] / step} if step > 0 else {}
        self._seconds.clear()
        self._beside = 0.0
        return {**timings, **rates, "time/step": step, "time/wall": wall, "time/unix": time.time()}

    def log(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group] = (), decode: Decode | None = None) -> dict[str, float]:
        """Record one step and return its whole row: the groups' metrics, ``metrics`` and the timings.

        ``decode`` turns token ids into text; without it no samples and no mask tokens are written.
        """
        if not self.active:
            return dict(metrics)
        measured = group_metrics(groups)
        row = {**measured, **metrics, **self._timings(measured["len/tokens_n"])}
        if decode is not None:
            for group in chosen(groups, self.config.journal.samples_per_step):
                self.samples.append(sample_row(step, group, decode))
            self._log_mask_tokens(step, groups, decode)
        self.metrics.append({**row, "step": step})
        finite = scalars(plain(row))
        for tracker in self._trackers:
            tracker.log(step, finite)
        for warning in self._alerts.watch(finite):
            self.warn(warning)
        self.screen.advance(step, finite)
        return row

    def _log_mask_tokens(self, step: int, groups: Sequence[Group], decode: Callable[[Sequence[int]], str]) -> None:
        masked = [rollout for group in groups for rollout in group.rollouts if rollout.arm == "masked"]
        counts = mask_counts(masked, lambda token: decode([token]))
        if counts.positions:
            self.mask_tokens.append({"step": step, **counts.row()})

    def log_evaluation(self, step: int, result: Mapping[str, Any]) -> None:
        """Record an :class:`Evaluation`; one with the same step and name is replaced."""
        if not self.active:
            return
        name = result.get("name", "held_out")
        if self.evaluated(step, name):
            self.evaluations.keep(lambda row: (row["step"], row.get("name")) != (step, name))
        self.evaluations.append({**result, "step": step, "name": name})
        rates = scalars({f"evaluation/{key}": value for key, value in result.items() if key not in ("step", "questions")})
        for tracker in self._trackers:
            tracker.log(step, rates)
        shown = [f"{label} {result[key]:.3f}" for key, label in _EVALUATION_LABELS.items() if result.get(key) is not None]
        self.screen.say(f"evaluation ({name}, step {step}): {', '.join(shown)}")

    def evaluated(self, step: int, name: str) -> bool:
        """Whether that evaluation is already on record, for a run resumed after it."""
        return any(row["step"] == step and row.get("name") == name for row in self.evaluations.rows())

    def warn(self, text: str) -> None:
        """One warning line that stays on screen."""
        self.screen.say(f"warning: {text}")

    def say(self, text: str) -> None:
        """One line that stays on screen."""
        self.screen.say(text)

    def finish(self, outcome: Mapping[str, Any] | str = "finished") -> None:
        """Record how the run ended (a status, or a mapping with ``status`` and whatever else is known) and close everything."""
        if self.active:
            row = {"status": outcome} if isinstance(outcome, str) else dict(outcome)
            write_text(self.folder / "outcome.json", line({"step": self.screen.step, **row}))
        self.close()

    def close(self) -> None:
        """Release the screen and the trackers without recording an outcome."""
        for tracker in self._trackers:
            tracker.close()
        self._trackers = []
        self.screen.close()


_EVALUATION_LABELS = {
    "mean_accuracy": "accuracy",
    "greedy_accuracy": "greedy",
    "maj_accuracy": "majority",
    "format_rate": "format",
}


def _about() -> dict[str, Any]:
    """Versions and hardware behind the numbers."""
    import torch

    try:
        own = version("headrace")
    except PackageNotFoundError:
        own = "unknown"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    return {
        "headrace": own,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device,
        "system": platform.platform(),
    }
