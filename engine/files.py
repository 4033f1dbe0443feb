"""Files that survive a kill at any moment: replaced as a whole, or grown line by line."""

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file as a whole: after a kill it holds the old content or the new, never a mixture. Text is written as UTF-8."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def whole_lines(path: Path) -> list[bytes]:
    """Lines of a file that grows line by line, without their breaks; none where there is no file.

    A last line without a break is what a kill left: it is cut off the file, too, so that the next one can be appended.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        write_whole(path, whole)
    return whole.splitlines()
