"""``headrace questions decontaminate``: take evaluation questions out of training rows."""

from pathlib import Path
from typing import Annotated

import typer


def decontaminate(
    train: Annotated[Path, typer.Argument(help="Training rows, JSONL or Parquet")],
    evaluations: Annotated[list[Path], typer.Argument(help="Rows that are evaluated on")],
    out: Annotated[Path, typer.Option(help="Clean rows to write; the report lands beside them")],
    threshold: Annotated[float, typer.Option(help="Jaccard similarity above which a text is a duplicate")] = 0.8,
    distance: Annotated[int, typer.Option(help="Bits of 64 within which a picture is a duplicate")] = 4,
) -> None:
    """Remove training questions whose text or picture an evaluation has, too (docs/data.md)."""
    from rich.console import Console
    from rich.progress import Progress

    from headrace.decontamination import clean

    with Progress(console=Console(stderr=True), transient=True) as bar:
        tasks = {name: bar.add_task(name, total=None) for name in ("texts", "pictures")}
        findings = clean(
            train,
            evaluations,
            out,
            threshold=threshold,
            distance=distance,
            progress=lambda name, done, total: bar.update(tasks[name], completed=done, total=total),
        )
    counts = ", ".join(f"{kind} {count:,}" for kind, count in findings.counts().items()) or "none"
    print(f"questions removed: {len(findings.removed):,} ({counts}); clean rows: {out}")
    print(f"report: {out.with_name(f'{out.stem}.decontamination.html')}")
