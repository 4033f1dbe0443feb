"""``headrace study FILE``: train a grid of configurations and seeds, and compare them on one page."""

from pathlib import Path
from typing import Annotated

import typer


def study(
    file: Annotated[Path, typer.Argument(help="YAML file, e.g. configs/studies/cge.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.field=value for every arm, e.g. run.steps=10")] = None,
    page_only: Annotated[bool, typer.Option("--page", help="Train nothing, write the page from what is there")] = False,
) -> None:
    """Run every arm with every seed, one after another; what is finished stays, what was stopped goes on (docs/studies.md)."""
    import sys

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from headrace.study import page as study_page
    from headrace.study.run import StudyRun, execute, load_study

    planned = load_study(file, overrides or ())
    failures: list[str] = []
    if not page_only:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        console, begun = Console(stderr=True), set[str]()
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            runs = bar.add_task(f"{planned.config.name}: runs", total=len(planned.runs))
            steps = bar.add_task("", total=None)

            def watch(run: StudyRun, done: int) -> None:
                finished = sum(each.finished for each in planned.runs)
                bar.update(runs, completed=finished)
                bar.update(steps, description=run.name, completed=done, total=run.config.run.steps)
                if not console.is_terminal and run.name not in begun:
                    begun.add(run.name)
                    print(f"{planned.config.name}: {run.name}, {finished} of {len(planned.runs)} runs are done", file=sys.stderr)

            failures = execute(planned, watch)
    print(f"page: {study_page.write(planned)}")
    if failures:
        raise ValueError(f"{len(failures)} of {len(planned.runs)} runs failed; " + "; ".join(failures))
