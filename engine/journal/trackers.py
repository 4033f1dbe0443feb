"""Where metrics go besides the run folder: TensorBoard event files and Weights & Biases."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Protocol

from headrace.config import Config
from headrace.journal.store import JournalError, plain


class Tracker(Protocol):
    """Receives the finite scalars of every step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in ``folder/tensorboard``; after a resume the viewer drops events of later steps."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        self.folder = folder / "tensorboard"
        try:
            self.writer = SummaryWriter(str(self.folder), purge_step=first_step)
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> JournalError:
        return JournalError(f"{self.folder}: cannot be written ({error.strerror or error})")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        try:
            for name, value in metrics.items():
                self.writer.add_scalar(name, value, step)
            self.writer.flush()  # a killed run keeps its curves
        except OSError as error:
            raise self._unwritable(error) from None

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of a Weights & Biases project; resuming continues the same run."""

    def __init__(self, config: Config, folder: Path) -> None:
        try:
            wandb = import_module("wandb")
        except ImportError:
            raise JournalError(
                "journal.wandb is set, but wandb is not installed: pip install 'headrace[wandb]', or remove journal.wandb"
            ) from None
        self.run = wandb.init(
            project=config.journal.wandb,
            name=config.run.name,
            id=f"{config.run.name}-{config.run.seed}",
            resume="allow",
            dir=str(folder),
            config=config.model_dump(mode="json"),
        )
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log({"step": step, **metrics})

    def close(self) -> None:
        self.run.finish()


def trackers(config: Config, folder: Path, first_step: int) -> list[Tracker]:
    """The trackers a configuration asks for."""
    chosen: list[Tracker] = []
    if config.journal.wandb is not None:
        chosen.append(WeightsAndBiases(config, folder))
    if config.journal.tensorboard:
        chosen.append(TensorBoard(folder, first_step))
    return chosen


def scalars(metrics: Mapping[str, float]) -> dict[str, float]:
    """The values a tracker can draw: finite numbers only."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float) and plain(float(value)) is not None}
