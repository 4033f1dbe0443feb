"""``headrace train``: run a configuration, or go on where it stopped."""

from pathlib import Path
from typing import Annotated

import typer


def train(
    config: Annotated[Path, typer.Argument(help="YAML file, e.g. configs/demo.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.field=value, e.g. run.steps=10")] = None,
    profile: Annotated[str | None, typer.Option(metavar="torch|nsys", help="Capture some steps; docs/profiling.md")] = None,
    profile_steps: Annotated[str, typer.Option(metavar="A:B", help="Which steps --profile captures, both included")] = "2:3",
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete what an earlier run of this name left and start over")] = False,
) -> None:
    """Train; a run that was stopped or killed goes on from its last checkpoint."""
    from headrace.config import load_config
    from headrace.profiling import Window
    from headrace.trainer import Trainer

    window = None if profile is None else Window.parse(profile, profile_steps)
    Trainer(load_config(config, overrides or ()), fresh=fresh, profile=window).train()
