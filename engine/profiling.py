"""Captures a window of steps, by torch's profiler or for NVIDIA Nsight Systems (docs/profiling.md)."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TOOLS = ("torch", "nsys")
SLOWEST = 40
"""Operators listed in the table beside a trace."""


@dataclass(frozen=True, slots=True)
class Window:
    """Which steps to capture, and for which tool."""

    tool: str
    first: int
    last: int
    """Included."""

    @classmethod
    def parse(cls, tool: str, steps: str) -> "Window":
        """From the command line's ``--profile TOOL --profile-steps A:B``.

        Raises:
            ValueError: an unknown tool, no such range of steps, or nsys without a GPU.
        """
        if tool not in TOOLS:
            raise ValueError(f"--profile: expected {' or '.join(TOOLS)}, got {tool!r}")
        match = re.fullmatch(r"(\d+):(\d+)", steps)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ValueError(f"--profile-steps: expected A:B with 1 <= A <= B, got {steps!r}")
        if tool == "nsys" and not torch.cuda.is_available():
            raise ValueError("--profile nsys: needs a CUDA device; --profile torch works everywhere")
        return cls(tool, int(match[1]), int(match[2]))

    def check(self, done: int, steps: int) -> None:
        """Raise ValueError unless a run that goes on after step ``done`` to ``steps`` meets the window."""
        if self.last <= done or self.first > steps:
            raise ValueError(f"--profile-steps {self.first}:{self.last}: the run goes from step {done + 1} to {steps}")


class Profiler:
    """Starts with the first step of a window and stops after its last; does nothing without a window."""

    def __init__(self, window: Window | None, folder: Path, rank: int) -> None:
        self.window = window
        self.folder = folder
        self.rank = rank
        self._running: Any = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Run one step, under capture when it lies in the window."""
        window = self.window
        if window is None or not window.first <= number <= window.last:
            yield
            return
        if self._running is None:
            self._start(window)
        yield
        if number == window.last:
            self.stop()

    def _start(self, window: Window) -> None:
        if window.tool == "nsys":
            torch.cuda.profiler.start()
            self._running = window
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._running = torch.profiler.profile(activities=activities)
        self._running.start()

    def stop(self) -> None:
        """End the capture, if one is on, and write what it saw."""
        running, self._running, window = self._running, None, self.window
        if running is None or window is None:
            return
        if window.tool == "nsys":
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            return
        running.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"steps_{window.first}-{window.last}_rank{self.rank}"
        trace = self.folder / f"{name}.json.gz"
        running.export_chrome_trace(str(trace))
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = running.key_averages().table(sort_by=order, row_limit=SLOWEST, max_name_column_width=60)
        (self.folder / f"{name}.txt").write_text(table, encoding="utf-8")
        print(f"profile: {trace}", file=sys.stderr)


@contextmanager
def capturing(window: Window | None, folder: Path, rank: int = 0) -> Iterator[Profiler]:
    """A profiler that also writes its trace when the run ends inside the window."""
    profiler = Profiler(window, folder, rank)
    try:
        yield profiler
    finally:
        profiler.stop()
