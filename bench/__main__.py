"""``python -m headrace.bench COMMAND``: every claim of speed is one of these."""

import sys

import typer

from headrace.bench.kernels import kernels
from headrace.bench.rollout import rollout
from headrace.bench.step import step
from headrace.bench.sync import sync

app = typer.Typer(help="Measure Headrace against named baselines in one process.", no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(kernels)
app.command()(rollout)
app.command()(step)
app.command()(sync)


def main() -> None:
    """Run a command; a wrong result or a wrong option is one line on standard error and exit status 1."""
    try:
        app()
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
