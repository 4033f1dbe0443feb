"""What a run of the kernel bench found, as data."""

import json
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

import headrace


@dataclass(frozen=True, slots=True)
class Measured:
    """One piece of work at one size."""

    operation: str
    tokens: int
    width: int
    vocabulary: int
    name: str
    kind: str
    """``floor``, ``ours`` or ``peer``."""
    best_s: float
    median_s: float
    calls: int
    ratio: float
    """Best time over the floor's best time."""
    ratio_median: float
    """Median over median; far from ``ratio`` on a disturbed machine."""
    goal: float | None = None
    """The greatest ratio that is meant to be reached; None where there is no goal."""
    note: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    """Against float64; nats, or relative for gradients."""
    speed: str = ""
    """Of a floor, told in its own unit."""

    @property
    def size(self) -> str:
        return f"{self.tokens}x{self.width}x{self.vocabulary}"

    @property
    def met(self) -> bool | None:
        return None if self.goal is None else self.ratio <= self.goal


@dataclass(frozen=True, slots=True)
class Memory:
    """Peak bytes beyond inputs and results."""

    operation: str
    tokens: int
    width: int
    vocabulary: int
    name: str
    kind: str
    extra_bytes: int


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that was not measured."""

    operation: str
    name: str
    size: str
    reason: str


@dataclass
class Record:
    """All of a run."""

    device: str
    threads: int
    measured: list[Measured] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)

    def cases(self) -> Iterator[tuple[str, list[Measured]]]:
        """Operations with their rows, in order."""
        for operation in dict.fromkeys(row.operation for row in self.measured):
            yield operation, [row for row in self.measured if row.operation == operation]

    def write(self, path: Path) -> None:
        """As JSON with a version, so that a reader can tell formats apart."""
        about = {
            "format": 1,
            "headrace": headrace.__version__,
            "torch": torch.__version__,
            "processor": platform.processor() or platform.machine(),
            "device": self.device,
            "threads": self.threads,
        }
        rows = {name: [asdict(row) for row in getattr(self, name)] for name in ("measured", "memory", "missing")}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**about, **rows}, indent=1) + "\n", encoding="utf-8")
