"""``headrace doctor [CONFIG]``: check the machine, and a run's needs, and say what to fix."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer


def doctor(
    config: Annotated[Path | None, typer.Argument(help="YAML file of a run, whose model and needs are checked too")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.field=value")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Check GPUs, versions, kernels, vLLM, memory, disk and ports. Exits with 1 when something is wrong."""
    from rich.console import Console
    from rich.markup import escape

    from headrace.config import load_config
    from headrace.doctor.check import Check
    from headrace.doctor.examine import examine

    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    console = Console(highlight=False, soft_wrap=True)
    checks: list[Check] = []
    for check in examine(None if config is None else load_config(config, overrides or ())):
        checks.append(check)
        if not as_json:
            advice = f"\n      {'':22}-> {escape(check.advice)}" if check.advice else ""
            console.print(f"[{colours[check.state]}]{check.state:4}[/]  {check.name:22}{escape(check.found)}{advice}")
    failed = sum(check.state == "fail" for check in checks)
    if as_json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        warned = sum(check.state == "warn" for check in checks)
        console.print(f"{len(checks)} checks, {failed} failed, {warned} warned")
    if failed:
        raise typer.Exit(1)
