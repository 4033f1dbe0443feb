"""Ctrl-C, SIGTERM and a closed terminal as a request: the step in hand is finished and saved."""

import contextlib
import os
import signal
import sys
import time
from types import FrameType, TracebackType

_ECHO_SECONDS = 2.0
"""Under a launcher one Ctrl-C arrives twice: from the terminal and from the launcher, which passes it on."""


class Interrupt:
    """While entered, a first SIGINT, SIGTERM or SIGHUP sets ``requested``; a second SIGINT stops at once.

    Until ``guard`` is called there is nothing to save, and the first one stops at once as well. SIGHUP stays ignored where it is
    (nohup). Outside the main thread, where Python delivers no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._guarding = False
        self._first = 0.0
        self._previous: dict[int, object] = {}

    def guard(self) -> None:
        """From here on there is something to save."""
        self._guarding = True

    def __enter__(self) -> "Interrupt":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            try:
                self._previous[number] = signal.signal(number, self._on_signal)
            except ValueError:
                break
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        if not self._guarding:
            raise KeyboardInterrupt
        if self.requested:
            echo = "TORCHELASTIC_RUN_ID" in os.environ and time.monotonic() - self._first < _ECHO_SECONDS
            if number == signal.SIGINT and not echo:
                raise KeyboardInterrupt
            return
        self.requested, self._first = True, time.monotonic()
        if int(os.environ.get("RANK", "0")) == 0:
            with contextlib.suppress(OSError, RuntimeError):  # nobody reads it any more, or the signal fell into another print
                print("headrace: finishing the step, then saving; Ctrl-C again stops at once", file=sys.stderr)


def _leave_terminal() -> None:
    """Let what is still printed go nowhere: writing to a terminal that is gone is an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if os.isatty(stream.fileno()):  # type: ignore[union-attr]
                os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]
    os.close(nowhere)
