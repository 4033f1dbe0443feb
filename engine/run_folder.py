"""Makes sure that what lies in a run folder is this run's."""

import shutil

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


def claim_folder(config: Config, fresh: bool) -> None:
    """Make the run folder, or check that an earlier run in it was of the same configuration.

    Raises:
        ConfigError: another configuration made it; the message names the first field that differs. Or ``fresh`` would delete
            a folder that no run made.
        JournalError: the folder cannot be written.
    """
    folder = config.run_folder
    written = folder / "config.yaml"
    if fresh and folder.exists():
        if not written.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder}: is not a run folder (it has no config.yaml), so --fresh does not delete it")
        shutil.rmtree(folder)
    make_folder(folder)
    if not written.exists():
        return
    earlier, present = _fields(yaml.safe_load(written.read_text(encoding="utf-8"))), _fields(config.model_dump(mode="json"))
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
