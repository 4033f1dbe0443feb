"""Makes sure that what lies in a run folder is this run's."""

import fcntl
import os
import shutil
from pathlib import Path
from typing import IO

import yaml

from headrace.config import Config, ConfigError
from headrace.journal.store import make_folder

MAY_CHANGE = (
    "run.steps",
    "run.folder",
    "run.cache",
    "run.evaluate_every",
    "run.checkpoint_every",
    "run.keep_checkpoints",
    "journal",
    "reward.workers",
)
"""Fields and sections that may differ when a run goes on: none of them changes a number of the steps already done."""
_LOCK = ".lock"
_DONE = ("checkpoints", "metrics.jsonl", "evaluations.jsonl")
"""What a run leaves once it has done anything; before that its configuration may still be mended."""


def claim_folder(config: Config, fresh: bool) -> IO[bytes]:
    """Make the run folder, or check that an earlier run in it was of the same configuration, and keep other processes out.

    Returns:
        The lock; the folder is this process's until it is closed or the process ends, however it ends.

    Raises:
        ConfigError: another process has the folder; another configuration made it, and the message names the first field that
            differs; or ``fresh`` would delete a folder that no run made.
        JournalError: the folder cannot be written.
    """
    folder = config.run_folder
    written = folder / "config.yaml"
    if fresh and not written.exists() and folder.is_dir() and any(path.name != _LOCK for path in folder.iterdir()):
        raise ConfigError(f"{folder}: is not a run folder (it has no config.yaml), so --fresh does not delete it")
    make_folder(folder)
    held = lock(folder / _LOCK, wait=False)
    if held is None:
        raise ConfigError(f"{folder}: another process is training there; wait for it, stop it, or give this run another run.name")
    try:
        if fresh:
            _empty(folder)
        _check_same(folder, written, config)
    except BaseException:
        held.close()
        raise
    return held


def lock(path: Path, *, wait: bool) -> IO[bytes] | None:
    """Take the lock that a file stands for; None where another holder has it and ``wait`` is False.

    The kernel lets go of it when the file is closed or its process ends. On a file system that knows no locks everyone gets it.
    """
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        file.close()
        return None
    except OSError:
        pass
    return file


def _empty(folder: Path) -> None:
    """Delete what an earlier run left; the lock stays."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != _LOCK:
            os.unlink(path)


def _check_same(folder: Path, written: Path, config: Config) -> None:
    """Raise ConfigError where an earlier run has done something under a configuration that differs from this one in what matters."""
    if not written.exists() or not any((folder / name).exists() for name in _DONE):
        return
    try:
        earlier = yaml.safe_load(written.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{written}: cannot be read ({' '.join(str(error).split())}); repair it, or start over with --fresh") from None
    if not isinstance(earlier, dict):
        raise ConfigError(f"{written}: is not the configuration of a run; repair it, or start over with --fresh")
    earlier, present = _fields(earlier), _fields(config.model_dump(mode="json"))
    for field in sorted(earlier.keys() | present.keys()):
        if earlier.get(field) != present.get(field) and not field.startswith(MAY_CHANGE):
            raise ConfigError(
                f"{folder}: the run there has {field} = {earlier.get(field)!r}, this configuration {present.get(field)!r}; "
                "give the new run another run.name, or start over with --fresh"
            )


def _fields(tree: object, prefix: str = "") -> dict[str, object]:
    """Leaves of a nested dictionary by dotted name."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {name: leaf for key, value in tree.items() for name, leaf in _fields(value, f"{prefix}.{key}" if prefix else str(key)).items()}
