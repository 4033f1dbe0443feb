"""The command line: one thin file per command in ``commands/``."""

import contextlib
import os
import sys

import typer

from headrace.commands.diagnose import app as diagnose
from headrace.commands.doctor import doctor
from headrace.commands.eval import evaluate
from headrace.commands.export import export
from headrace.commands.plan import plan
from headrace.commands.questions import app as questions
from headrace.commands.report import report
from headrace.commands.study import study
from headrace.commands.train import train
from headrace.records import EngineDown
from headrace.sync.servers import SyncError

app = typer.Typer(help="Reinforcement learning with verifiable rewards.", no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(train)
app.command()(report)
app.command()(export)
app.command("eval")(evaluate)
app.command()(study)
app.command()(plan)
app.command()(doctor)
app.add_typer(diagnose, name="diagnose")
app.add_typer(questions, name="questions")

_STOPPED = 130  # what typer makes of a KeyboardInterrupt


def main() -> None:
    """Run a command; what the user can mend is one line on standard error and exit status 1."""
    status: object = 1
    try:
        app()
    except BrokenPipeError:  # nobody reads standard output any more; nothing else is piped
        pass
    except (ValueError, OSError, EngineDown, SyncError) as error:
        if _speaks(error):
            with contextlib.suppress(OSError):
                print(f"headrace: {error}", file=sys.stderr)
    except SystemExit as end:
        status = end.code
    if status == _STOPPED:
        with contextlib.suppress(OSError):
            print("headrace: stopped at once; the same command goes on from the last checkpoint", file=sys.stderr)
    _flush()
    sys.exit(status)  # type: ignore[arg-type]


def _speaks(error: Exception) -> bool:
    """Whether this process tells the user: what every rank of ``torchrun`` raises alike comes from rank 0 alone."""
    return os.environ.get("RANK", "0") == "0" or not getattr(error, "on_every_rank", False)


def _flush() -> None:
    """Empty the buffers here, where a reader that is gone is no error; the interpreter's own flush at its end would complain."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, AttributeError):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
