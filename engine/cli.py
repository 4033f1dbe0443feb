"""The command line: one thin file per command in ``commands/``."""

import os
import sys

import typer

from headrace.commands.export import export
from headrace.commands.report import report
from headrace.commands.train import train

app = typer.Typer(help="Reinforcement learning with verifiable rewards.", no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(train)
app.command()(report)
app.command()(export)


def main() -> None:
    """Run a command; what the user can mend is one line on standard error and exit status 1."""
    # Read when torch loads, later. Threads that spin while they wait cost a shared machine several times the run's own work.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        app()
    except (ValueError, OSError) as error:
        print(f"headrace: {error}", file=sys.stderr)
        sys.exit(1)
