"""``headrace report RUN [RUN…]``: rebuild a run's report, or compare several."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, e.g. runs/demo; several are compared")],
    out: Annotated[Path | None, typer.Option(help="Page to write; by default report.html in the run, or comparison.html beside it")] = None,
) -> None:
    """Write one self-contained HTML page."""
    from headrace.journal.report import build

    if out is None:
        out = runs[0] / "report.html" if len(runs) == 1 else runs[0].resolve().parent / "comparison.html"
    print(f"report: {build(runs, out)}")
