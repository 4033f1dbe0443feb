"""The folder that holds checkpoints: which are whole, which is newest, which bytes belong to them."""

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

SUMS = "SHA256SUMS"
"""Digests of all other files, as ``sha256sum`` writes and checks them; written last, so a folder that has it is whole."""
SAVING = ".saving-"
"""Prefix of folders that are being written or deleted."""
_FOLDER = re.compile(r"step_(\d+)(?:-(\d+))?")


def free_name(folder: Path, step: int) -> str:
    """``step_000025``, or with a suffix where a finished checkpoint has that name."""
    name, again = f"step_{step:06d}", 0
    while (folder / name).exists():
        again += 1
        name = f"step_{step:06d}-{again}"
    return name


def finished(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest step first."""
    found = []
    for path in folder.glob("step_*"):
        match = _FOLDER.fullmatch(path.name)
        if match and all((path / name).is_file() for name in ("state.json", ".metadata", SUMS)):
            found.append((int(match[1]), int(match[2] or 0), path))
    return [path for _, _, path in sorted(found)]


def candidates(folder: Path) -> list[Path]:
    """Checkpoints to resume from, best first: the one ``latest`` names, or else the newest complete one, and those before it."""
    whole = finished(folder)
    try:
        named = folder / (folder / "latest").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        named = None
    newest = whole.index(named) if named in whole else len(whole) - 1
    return whole[: newest + 1][::-1]


def clear_unfinished(folder: Path) -> None:
    """Delete what an interrupted save or deletion left."""
    for stale in folder.glob(f"{SAVING}*"):
        shutil.rmtree(stale, ignore_errors=True)


def prune(folder: Path, keep: int) -> None:
    """Delete all but the ``keep`` checkpoints that a resume would try first."""
    for old in candidates(folder)[keep:]:
        aside = folder / f"{SAVING}{old.name}"  # renamed first, so that a kill half-way leaves no half checkpoint
        old.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def write(path: Path, content: bytes) -> None:
    """Write a file through to the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def flush(folder: Path) -> None:
    """Make renames and new entries of a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------------------------ checksums


def digests(paths: Iterable[Path]) -> dict[str, str]:
    """SHA-256 of files by their names."""
    found = {}
    for path in paths:
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def write_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """Write the digests of a checkpoint's files."""
    write(folder / SUMS, "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())).encode())


def check_sums(folder: Path, part: int = 0, parts: int = 1) -> None:
    """Compare files with their digests; of several readers each takes its ``part`` of ``parts``.

    Raises:
        ValueError: a file is missing, unknown to the digests, or does not have the bytes that were written.
    """
    lines = [line.partition("  ") for line in (folder / SUMS).read_text(encoding="utf-8").splitlines()]
    expected = {name: digest for digest, _, name in lines}
    present = {path.name for path in folder.iterdir()} - {SUMS}
    stray = sorted(present ^ expected.keys())
    if stray:
        raise ValueError(f"{stray[0]} is {'not in' if stray[0] in present else 'missing, but in'} {SUMS}")
    for name in sorted(expected)[part::parts]:
        if digests([folder / name])[name] != expected[name]:
            raise ValueError(f"{name} does not have the bytes that were written: its SHA-256 is not the one in {SUMS}")
