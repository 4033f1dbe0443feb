"""What a build of questions shows while it goes: bars on a terminal, a line now and then elsewhere."""

import sys
from collections import Counter
from time import monotonic
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_PAUSE = 30.0
"""Seconds between two lines where nobody watches."""


class BuildProgress:
    """Counts the videos that leave each stage."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {}
        self._bars: dict[str, TaskID] = {}
        self._console = Console(file=sys.stderr)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._spoke = monotonic()
        self._total = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def total(self, videos: int) -> None:
        """Say how many videos there are."""
        self._total = videos

    def report(self, stage: str, fate: str) -> None:
        """A video left ``stage``: ``kept``, or dropped for a reason."""
        counts = self._counts.setdefault(stage, Counter())
        counts[fate] += 1
        if stage not in self._bars:
            self._bars[stage] = self._progress.add_task(stage, total=None, note="")
        dropped = counts.total() - counts["kept"]
        note = f"{dropped} dropped" if dropped else ""
        self._progress.update(self._bars[stage], completed=counts.total(), total=self._total, note=note)
        if not self._console.is_terminal and monotonic() - self._spoke > _PAUSE:
            self._spoke = monotonic()
            self._console.print(", ".join(f"{name} {count.total()}" for name, count in self._counts.items()))
