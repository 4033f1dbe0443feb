"""``headrace diagnose``: how far checkpoints look at pictures, and whether they take back what a picture does not show."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup


class _ScoresByDefault(TyperGroup):
    """``diagnose BANK …`` is ``diagnose score BANK …``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["score", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_ScoresByDefault,
    help="diagnose BANK CHECKPOINT…: sensitivity to pictures and persistence of claims on fixed responses; build-bank makes a bank.",
    no_args_is_help=True,
)


class Degradation(StrEnum):
    PATCHES = "patches"
    BLUR = "blur"
    NOISE = "noise"
    GREY = "grey"


class Precision(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@app.command()
def score(
    bank: Annotated[Path, typer.Argument(help="Bank (JSONL, Parquet) of headrace diagnose build-bank")],
    checkpoints: Annotated[
        list[Path], typer.Argument(help="Run folders, with all their checkpoints, or model directories; the first is the base")
    ],
    intervention: Annotated[Degradation, typer.Option(help="How pictures are degraded")] = Degradation.PATCHES,
    questions: Annotated[int | None, typer.Option(min=1, help="Only the first questions of the bank")] = None,
    text_control: Annotated[bool, typer.Option(help="Also hide words of the question, for the difference in differences")] = True,
    dtype: Annotated[Precision | None, typer.Option(help="Of model directories, float32 by default; runs have their own")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of one forward pass")] = 16_384,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; by default one under runs/diagnosis")] = None,
) -> None:
    """Score a bank under checkpoints and write one page; what was stopped goes on where it was (docs/diagnosis.md)."""
    import sys

    from headrace.commands.bar import counting
    from headrace.diagnosis.run import diagnose
    from headrace.diagnosis.scoring import Settings

    settings = Settings(intervention.value, text_control, tokens)
    folder = out or Path("runs/diagnosis") / bank.stem
    with counting() as bar:
        tasks: dict[str, Any] = {}

        def progress(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done)

        found = diagnose(bank, checkpoints, settings, folder, questions=questions, dtype=dtype and dtype.value, progress=progress)
    for problem in found.problems:
        print(f"warning: {problem}; left out", file=sys.stderr)
    for line in found.lines:
        print(line)
    print(f"report: {found.page}")


@app.command("build-bank")
def build_bank(
    checkpoint: Annotated[Path, typer.Argument(help="Policy that draws: model directory, or run folder")],
    dataset: Annotated[Path, typer.Argument(help="Rows (JSONL, Parquet), or a configuration or run folder for its held-out questions")],
    out: Annotated[Path, typer.Argument(help="Bank to write, .jsonl or .parquet")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.field=value, e.g. sampling.temperature=1")] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration with the settings; by default the run's, else the data set's")] = None,
    questions: Annotated[int, typer.Option(min=1, help="Questions, drawn by the seed")] = 2000,
    responses: Annotated[int, typer.Option(min=1, help="Responses to each")] = 4,
    start: Annotated[bool, typer.Option("--start", help="Draw with the model that the run started from")] = False,
    labels: Annotated[str | None, typer.Option(help="Who says what is supported: scene, router, or a file of labels")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete an earlier bank there and start over")] = False,
) -> None:
    """Draw fixed responses, mark their claims with credit.pacg.router and label them, blind to who is right."""
    from headrace.commands.bar import counting
    from headrace.diagnosis.build import Plan, build, labels_from
    from headrace.evaluation.job import prepare

    if start:
        from headrace.assembly import start_of

        config, (_, checkpoint) = config or checkpoint / "config.yaml", start_of(checkpoint)

    job = prepare(checkpoint, dataset, config=config, overrides=overrides or (), out=out.with_name(f"{out.name}.work"), credit=True)
    with counting() as bar:
        task = bar.add_task("questions", total=None)
        plan = Plan(job, out, questions, responses, labels_from(labels))
        built = build(plan, fresh=fresh, progress=lambda done, total: bar.update(task, completed=done, total=total))
    for name, count in built.counts.items():
        print(f"{count:8,} {name}")
    print(f"bank: {out}")
