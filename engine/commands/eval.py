"""``headrace eval``: how good a checkpoint is, and whether it is better than another."""

from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="Model directory, or run folder")],
    dataset: Annotated[Path, typer.Argument(help="Rows (JSONL, Parquet), or a configuration or run folder for its held-out questions")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.field=value, e.g. evaluation.samples=16 engine.kind=vllm")] = None,
    against: Annotated[Path | None, typer.Option(help="Checkpoint to compare with, question by question")] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration with the settings; by default the run's, else the data set's")] = None,
    questions: Annotated[int | None, typer.Option(min=1, help="Only the first questions")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; by default one under runs/evaluations")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete earlier results there and start over")] = False,
) -> None:
    """Evaluate; what was stopped goes on where it was (docs/evaluation.md)."""
    from headrace.commands.bar import counting
    from headrace.evaluation import page as evaluation_page
    from headrace.evaluation.job import prepare
    from headrace.evaluation.run import run

    job = prepare(checkpoint, dataset, config=config, overrides=overrides or (), limit=questions, out=out)
    other = None
    if against is not None:
        beside = None if out is None else out.with_name(f"{out.name}--{against.resolve().name}")
        other = prepare(against, dataset, config=config, overrides=overrides or (), limit=questions, out=beside)
    with counting() as bar:
        results = []
        for each in filter(None, (other, job)):
            task = bar.add_task(each.name, total=None)
            results.append(run(each, fresh=fresh, progress=lambda done, total, task=task: bar.update(task, completed=done, total=total)))
    _, page = evaluation_page.write(results[-1], results[0] if other else None)
    for line in evaluation_page.lines(results[-1], results[0] if other else None):
        print(line)
    print(f"report: {page}")
