"""A diagnosis from a bank and checkpoints to a page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.config import ConfigError
from headrace.diagnosis import page
from headrace.diagnosis.bank import read_bank
from headrace.diagnosis.points import Precision, find
from headrace.diagnosis.results import Measured, measured
from headrace.diagnosis.scoring import Settings, score
from headrace.journal.store import make_folder
from headrace.run_folder import lock


@dataclass(frozen=True)
class Diagnosis:
    page: Path
    lines: list[str]
    """The main numbers."""
    points: list[Measured]
    problems: tuple[str, ...]
    """Rows of the bank that cannot be used."""


def diagnose(
    bank: Path,
    checkpoints: Sequence[Path],
    settings: Settings,
    folder: Path,
    *,
    questions: int | None = None,
    dtype: Precision | None = None,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> Diagnosis:
    """Score every checkpoint on the bank, and write ``diagnosis.json`` and ``diagnosis.html`` into ``folder``.

    Args:
        questions: only the first of the bank; None takes all.
        dtype: of model directories (``points.find``).

    Raises:
        ValueError: the bank or a checkpoint cannot be used, or another process writes to the folder.
    """
    read = read_bank(bank)
    points = find(checkpoints, dtype)
    make_folder(folder)
    held = lock(folder / ".lock", wait=False)
    if held is None:
        raise ConfigError(f"{folder}: another process is diagnosing there; wait for it, or give --out")
    with held:
        asked = read.first(questions)
        found = [
            measured(point, asked, score(point, asked, settings, folder, lambda done, total, name=point.name: progress(name, done, total)))
            for point in points
        ]
        written, lines = page.write(asked, found, settings, folder)
    return Diagnosis(written, lines, found, read.problems)
