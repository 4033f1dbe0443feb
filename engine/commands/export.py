"""``headrace export``: a run's newest checkpoint as a model directory."""

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="Run folder, e.g. runs/demo")],
    out: Annotated[Path, typer.Argument(help="Directory to write")],
) -> None:
    """Write safetensors, configuration and tokenizer that transformers and vLLM load."""
    from headrace.config import load_config
    from headrace.trainer import Trainer

    step = Trainer(load_config(run / "config.yaml", [f"run.folder={run.parent}", f"run.name={run.name}"])).export(out)
    print(f"step {step} of {run} is in {out}")
