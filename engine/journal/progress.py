"""What a run shows while it goes: one live line on a terminal, a quiet plain line now and then elsewhere."""

import contextlib
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any, TextIO, cast

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

SHOWN = (
    ("reward/mean", "reward", "{:.3f}"),
    ("reward/accuracy", "accuracy", "{:.3f}"),
    ("policy/entropy", "entropy", "{:.2f}"),
    ("time/tokens_per_s", "tokens/s", "{:,.0f}"),
)
WIDE = 110
"""Columns from which a terminal has room for all of them; a narrower one shows the first."""
PLAIN_LINES = 20
"""Lines a run prints when nobody watches."""
PLAIN_TICKS = 4
"""Lines of a long phase then."""


class _StandardError:
    """Standard error that may go away: a run does not end because nobody reads it any more."""

    @property
    def _stream(self) -> TextIO:
        return getattr(sys.stderr, "rich_proxied_file", sys.stderr)  # while a live line is up, rich puts itself in between

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Screen:
    """Shows the phase, the step, the main metrics and the time left.

    ``total_steps`` is the length of the run. Nothing is shown when ``quiet``.
    """

    def __init__(self, name: str, total_steps: int, *, quiet: bool = False, console: Console | None = None) -> None:
        self.name = name
        self.total_steps = total_steps
        self.quiet = quiet
        self.console = console or Console(file=cast(TextIO, _StandardError()))
        self.step = 0
        self._summary = ""
        self._seconds: deque[float] = deque(maxlen=20)
        self._every = max(1, total_steps // PLAIN_LINES)
        self._live: Progress | None = None
        self._task = TaskID(0)

    def _bar(self) -> Progress | None:
        """The live line, started when first needed; None when there is no terminal."""
        if self._live is None and not self.quiet and self.console.is_terminal:
            self._live = Progress(
                SpinnerColumn(),
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=16),
                TextColumn("{task.fields[count]}"),
                TextColumn("{task.fields[summary]}", style="dim"),
                console=self.console,
                transient=True,
            )
            self._task = self._live.add_task("", total=max(self.total_steps, 1), count="", summary="")
            self._live.start()
        return self._live

    def begin(self, phase: str) -> None:
        """A phase starts."""
        bar = self._bar()
        if bar is not None:
            count = f"step {self.step}/{self.total_steps}"
            bar.update(
                self._task,
                description=escape(phase),
                completed=self.step,
                total=max(self.total_steps, 1),
                count=count,
                summary=self._summary,
            )

    def tick(self, phase: str, done: int, total: int, note: str = "") -> None:
        """Progress inside a long phase, such as a warm start."""
        bar = self._bar()
        if bar is not None:
            count = f"{done}/{total}"
            bar.update(self._task, description=escape(phase), completed=done, total=max(total, 1), count=count, summary=escape(note))
        elif done == total or done % max(1, total // PLAIN_TICKS) == 0:
            self.say(f"{phase} {done}/{total}  {note}".rstrip())

    def advance(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done."""
        self.step = step
        self._seconds.append(metrics.get("time/wall", 0.0))
        left = (self.total_steps - step) * sum(self._seconds) / len(self._seconds)
        values = [f"{label} {form.format(metrics[key])}" for key, label, form in SHOWN if metrics.get(key) is not None]
        if self.console.is_terminal and self.console.width < WIDE:
            values = values[:1]
        self._summary = "  ".join([*values, f"{_clock(left)} left" if step < self.total_steps else ""]).strip()
        bar = self._bar()
        if bar is not None:
            bar.update(self._task, completed=step, count=f"step {step}/{self.total_steps}", summary=self._summary)
        elif step == 1 or step % self._every == 0 or step == self.total_steps:
            self.say(f"step {step}/{self.total_steps}  {self._summary}")

    def say(self, text: str) -> None:
        """One line that stays."""
        if self.quiet:
            return
        if self.console.is_terminal:
            self.console.print(escape(text), highlight=False)
        else:
            print(f"{self.name}: {text}", file=self.console.file, flush=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
