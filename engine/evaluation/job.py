"""What ``headrace eval`` evaluates: the model, the questions and the settings that its arguments stand for."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace import checkpoint as checkpoints
from headrace.config import Config, ConfigError, build_model, read_tree
from headrace.journal.store import make_folder

DEFAULTS: dict[str, Any] = {"sampling": {"max_tokens": 2048}}
"""Configuration of a model directory on a file of rows, where no other is named."""


@dataclass(frozen=True)
class Job:
    """One checkpoint on one set of questions."""

    name: str
    """How the checkpoint is called on pages."""
    directory: Path
    """Its model directory."""
    dataset: str
    """Name of the questions."""
    config: Config
    folder: Path
    """Takes the results."""


def prepare(
    checkpoint: Path,
    dataset: Path,
    *,
    config: Path | None = None,
    overrides: Sequence[str] = (),
    limit: int | None = None,
    out: Path | None = None,
    credit: bool = False,
) -> Job:
    """Find the model, the questions and the settings.

    Args:
        checkpoint: a model directory, or a run folder, whose newest weights are taken.
        dataset: a file of rows, or a configuration or run folder whose held-out questions are meant.
        config: settings; None takes the run folder's, else those of ``dataset``, else ``DEFAULTS``.
        limit: questions at most; None takes all.
        out: folder of the results; None makes one under ``runs/evaluations``.
        credit: keep the settings of credit rules, which say who finds claims.

    Raises:
        ValueError: one of them is not what it should be.
    """
    checkpoint, dataset = Path(checkpoint), Path(dataset)
    run_config = checkpoint / "config.yaml"
    source = next((path for path in (config, run_config, _config_of(dataset)) if path is not None and path.is_file()), None)
    if config is not None and source != config:
        raise ConfigError(f"{config}: there is no such file")
    tree = dict(DEFAULTS) if source is None else read_tree(source)
    tree, name = _with_questions(tree, dataset), dataset.stem if dataset.is_file() else dataset.name
    folder = out or Path("runs/evaluations") / f"{checkpoint.resolve().name}--{name}"
    directory = _model_directory(checkpoint, folder)
    tree["model"] = {"dtype": "float32"} | {key: value for key, value in (tree.get("model") or {}).items() if key == "dtype"}
    tree["model"]["source"] = {"kind": "directory", "path": str(directory)}
    tree["run"] = {**(tree.get("run") or {}), "folder": str(folder.parent), "name": folder.name}
    for section in ("warm_start", "schedule", "paqm", "hsr", "dynamic_sampling", *(() if credit else ("credit",))):
        tree.pop(section, None)  # of training alone
    settings = build_model(Config, tree, overrides, str(source or "defaults"))
    return Job(checkpoint.resolve().name, directory, name, _bounded(settings, limit), folder)


def _config_of(dataset: Path) -> Path | None:
    if dataset.is_dir():
        return dataset / "config.yaml"
    return dataset if dataset.suffix in (".yaml", ".yml") else None


def _with_questions(tree: dict[str, Any], dataset: Path) -> dict[str, Any]:
    """The settings with the questions of ``dataset`` as held-out ones; generated questions keep the seed that they were configured with."""
    origin = _config_of(dataset)
    if origin is None:
        held_out: Any = {"kind": "rows", "path": str(dataset)}
        run = tree.get("run") or {}
    else:
        other = read_tree(origin)
        held_out, run = (other.get("questions") or {}).get("held_out"), {**(tree.get("run") or {}), **_seed(other)}
        if not held_out:
            raise ConfigError(f"{origin}: questions.held_out is empty; name a file of rows instead")
    questions = {key: value for key, value in (tree.get("questions") or {}).items() if key != "train"}
    return {**tree, "run": run, "questions": {**questions, "held_out": held_out}}


def _seed(tree: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in (tree.get("run") or {}).items() if key == "seed"}


def _bounded(config: Config, limit: int | None) -> Config:
    """All questions unless bounded, and the evaluation's own response length for servers, too."""
    sampling = config.sampling.model_copy(update={"max_tokens": config.evaluation.max_tokens or config.sampling.max_tokens, "cge": None})
    evaluation = config.evaluation.model_copy(update={"questions": limit or 10**9})
    return config.model_copy(update={"sampling": sampling, "evaluation": evaluation})


def _model_directory(checkpoint: Path, folder: Path) -> Path:
    """The model directory itself, the model of a finished run, or the newest checkpoint of an unfinished one, exported."""
    if (checkpoint / "config.json").is_file():
        return checkpoint
    if not (checkpoint / "config.yaml").is_file():
        raise ConfigError(f"{checkpoint}: is neither a model directory (config.json) nor a run folder (config.yaml)")
    newest = checkpoints.latest(checkpoint / "checkpoints")
    if (checkpoint / "model" / "config.json").is_file() and (newest is None or _finished(checkpoint)):
        return checkpoint / "model"
    if newest is None:
        raise ConfigError(f"{checkpoint}: has neither a model nor a checkpoint yet")
    exported = folder / f"model-{newest.name}"
    if not exported.exists():
        from headrace.assembly import export_newest

        make_folder(folder)
        export_newest(checkpoint, exported)
    return exported


def _finished(run: Path) -> bool:
    try:
        return json.loads((run / "outcome.json").read_text(encoding="utf-8")).get("status") == "finished"
    except (OSError, ValueError, AttributeError):
        return False
