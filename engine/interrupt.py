"""Ctrl-C and SIGTERM as a request: the step in hand is finished and saved."""

import signal
import sys
from types import FrameType, TracebackType


class Interrupt:
    """While entered, the first SIGINT or SIGTERM sets ``requested``; a second SIGINT stops at once.

    Outside the main thread, where Python delivers no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "Interrupt":
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._previous[number] = signal.signal(number, self._on_signal)
            except ValueError:
                break
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        print("headrace: finishing the step, then saving; Ctrl-C again stops at once", file=sys.stderr)
