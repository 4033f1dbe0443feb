"""Files of a run folder that survive a kill at any moment: append-only JSON lines, and whole files replaced atomically.

A row counts once its newline is on disk. A process killed while it appends leaves at most one torn last line, which readers
ignore and :meth:`Table.truncate` removes.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.files import write_whole

Row = dict[str, Any]


class JournalError(ValueError):
    """A run folder cannot be written or read; the message names the file and the reason."""


def write_text(path: Path, text: str) -> None:
    """Replace a file as a whole; it outlives a loss of power.

    Raises:
        JournalError: the file cannot be written.
    """
    try:
        write_whole(path, text)
        _sync_folder(path.parent)
    except OSError as error:
        raise _unwritable(path, error) from None


def make_folder(path: Path) -> None:
    """Create a run folder and make sure that it takes files."""
    probe = path / ".writable"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> JournalError:
    return JournalError(f"{path}: cannot be written ({error.strerror or error}); free the disk or set another run.folder, then run again")


def _sync_folder(folder: Path) -> None:
    """Make a rename durable; some file systems cannot, and do not need it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def plain(value: Any) -> Any:
    """A value JSON can hold: arrays and scalars become Python's own, a number that is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def line(row: Mapping[str, Any]) -> str:
    """One row as its line: keys sorted, so that equal rows are equal bytes."""
    return json.dumps(plain(row), ensure_ascii=False, sort_keys=True, allow_nan=False, separators=(",", ":")) + "\n"


class Table:
    """An append-only file of JSON rows, each with an integer ``step``.

    An appended row outlives the process; with ``durable`` it also outlives a loss of power, for the price of a disk flush.
    """

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        self.path = path
        self.durable = durable

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row."""
        data = line(row).encode()
        try:
            with open(self.path, "ab", buffering=0) as file:
                written = file.write(data)
                if written != len(data):
                    raise OSError(28, os.strerror(28))  # a short write is how a full disk first shows
                if self.durable:
                    os.fsync(file.fileno())
        except OSError as error:
            raise _unwritable(self.path, error) from None

    def rows(self) -> Iterator[Row]:
        """Every complete row; a torn last line is left out.

        Raises:
            JournalError: the file cannot be read, or a line that is not the last is not a row.
        """
        try:
            lines = self.path.read_bytes().split(b"\n") if self.path.exists() else []
        except OSError as error:
            raise JournalError(f"{self.path}: cannot be read ({error.strerror or error})") from None
        for number, text in enumerate(lines[:-1], start=1):  # what follows the last newline is torn or empty
            row = _parsed(text)
            if row is not None:
                yield row
            elif number < len(lines) - 1:
                raise JournalError(f"{self.path}: line {number} is not a row of JSON with a step; repair or delete the file")

    def keep(self, wanted: Callable[[Row], bool]) -> None:
        """Keep only some rows, atomically; a torn last line goes too."""
        if self.path.exists():
            write_text(self.path, "".join(line(row) for row in self.rows() if wanted(row)))

    def truncate(self, step: int) -> None:
        """Drop the rows of later steps."""
        self.keep(lambda row: row["step"] <= step)


def _parsed(text: bytes) -> Row | None:
    try:
        row = json.loads(text)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
