"""headrace report RUN [RUN…]: rebuild a run's report, or compare several."""

from collections.abc import Sequence
from pathlib import Path

from headrace.journal.report import build


def report(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page and return where it is.

    Without ``out`` a single run's report goes into its own folder, a comparison beside the first run.
    """
    folders = [Path(run) for run in runs]
    if out is None:
        out = folders[0] / "report.html" if len(folders) == 1 else folders[0].resolve().parent / "comparison.html"
    return build(folders, out)
