"""A run folder read back for the report: whatever is there, nothing assumed complete."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from headrace.journal.mask import MaskCounts
from headrace.journal.metrics import DENOMINATORS
from headrace.journal.store import JournalError, Row, Table
from headrace.records import Array


@dataclass(frozen=True)
class Rate:
    """A count out of a total, pooled over steps."""

    count: float
    total: float

    @property
    def value(self) -> float:
        return self.count / self.total if self.total else float("nan")


@dataclass(frozen=True)
class RunData:
    """Tables of one run; metric columns are aligned with ``steps`` and hold NaN where a step has no value."""

    folder: Path
    name: str
    config: dict[str, Any]
    about: dict[str, Any]
    outcome: dict[str, Any]
    steps: Array  # [S] int64
    columns: dict[str, Array]  # name -> [S] float64
    samples: list[Row]
    mask_counts: MaskCounts
    evaluations: list[Row]

    @property
    def halves(self) -> tuple[slice, slice, slice]:
        """Early half, later half and whole of the logged steps."""
        middle = len(self.steps) // 2
        return slice(0, middle), slice(middle, None), slice(None)

    def column(self, name: str) -> Array:
        return self.columns.get(name, np.full(len(self.steps), np.nan))

    def has(self, name: str) -> bool:
        """Whether any step has a value."""
        return name in self.columns and bool(np.isfinite(self.columns[name]).any())

    def mean(self, name: str, part: slice = slice(None), weight: str | None = None) -> float:
        """Mean over steps, weighted by a count column where one is named; NaN without values."""
        values = self.column(name)[part]
        weights = np.ones_like(values) if weight is None else np.nan_to_num(self.column(weight)[part])
        known = np.isfinite(values)
        total = weights[known].sum()
        return float((values[known] * weights[known]).sum() / total) if total else float("nan")

    def rate(self, name: str, part: slice = slice(None)) -> Rate:
        """A share pooled over steps from its numerators and denominators."""
        return Rate(float(np.nansum(self.column(f"{name}_n")[part])), float(np.nansum(self.column(DENOMINATORS[name])[part])))

    def configured(self, dotted: str, default: Any = None) -> Any:
        """A value of the configuration by its dotted name."""
        node: Any = self.config
        for key in dotted.split("."):
            if not isinstance(node, dict) or key not in node:
                return default
            node = node[key]
        return default if node is None else node


def read_run(folder: Path) -> RunData:
    """Read a run folder, also one whose run still goes or was killed.

    Raises:
        JournalError: the folder is not a run folder, or a table is damaged.
    """
    folder = Path(folder)
    if not (folder / "config.yaml").exists() and not (folder / "metrics.jsonl").exists():
        raise JournalError(f"{folder}: is not a run folder (it has neither config.yaml nor metrics.jsonl)")
    config = _read_yaml(folder / "config.yaml")
    rows = sorted({row["step"]: row for row in Table(folder / "metrics.jsonl").rows()}.values(), key=lambda row: row["step"])
    counts = MaskCounts.none()
    for row in Table(folder / "mask_tokens.jsonl").rows():
        counts.add(MaskCounts.of_row(row))
    evaluations = {(row["step"], row.get("name", "")): row for row in Table(folder / "evaluations.jsonl").rows()}
    return RunData(
        folder=folder,
        name=str(config.get("run", {}).get("name") or folder.resolve().name),
        config=config,
        about=_read_json(folder / "about.json"),
        outcome=_read_json(folder / "outcome.json"),
        steps=np.array([row["step"] for row in rows], dtype=np.int64),
        columns=_columns(rows),
        samples=list(Table(folder / "samples.jsonl").rows()),
        mask_counts=counts,
        evaluations=sorted(evaluations.values(), key=lambda row: row["step"]),
    )


def _columns(rows: list[Row]) -> dict[str, Array]:
    names = sorted({name for row in rows for name, value in row.items() if isinstance(value, int | float) and name != "step"})
    return {name: np.array([_number(row.get(name)) for row in rows], dtype=np.float64) for name in names}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise JournalError(f"{path}: cannot be read ({' '.join(str(error).split())})") from None
    return tree if isinstance(tree, dict) else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise JournalError(f"{path}: cannot be read ({' '.join(str(error).split())})") from None
    return tree if isinstance(tree, dict) else {}
