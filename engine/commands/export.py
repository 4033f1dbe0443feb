"""``headrace export``: a run's newest checkpoint as a model directory."""

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="Run folder, e.g. runs/demo")],
    out: Annotated[Path, typer.Argument(help="Directory to write; an older model in it is replaced")],
) -> None:
    """Write safetensors, configuration and tokenizer that transformers and vLLM load. Start it where the run was started."""
    from headrace.assembly import export_newest
    from headrace.config import ConfigError

    if out.exists() and not (out / "config.json").is_file() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: exists and is no model directory, expected a new, an empty or a model's directory")
    print(f"step {export_newest(run, out)} of {run} is in {out}")
