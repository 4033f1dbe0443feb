"""Where questions come from."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from headrace.config.base import Model


class RowsSource(Model):
    kind: Literal["rows"]
    path: Path
    """JSONL or Parquet file of rows."""
    bad_rows: Literal["skip", "stop"] = "skip"
    """A row that cannot be used is counted and skipped, or stops the run."""


class MultiHopSource(Model):
    kind: Literal["multi_hop"]
    hops: tuple[int, ...] = (2, 3, 4)
    """Hop counts, drawn uniformly."""
    objects: int = Field(4, ge=2)
    """Objects with a value in the context."""
    max_value: int = Field(9, ge=2)
    """Values and yes/no numbers are drawn from 1..max_value."""
    count: int = Field(4096, ge=1, le=10**8)
    """Questions generated; one epoch."""


class EasyVQASource(Model):
    kind: Literal["easy_vqa"]
    hops: tuple[int, ...] = (1, 2, 3)
    """Hop counts, drawn uniformly; each hop is a yes/no question of the data set about the one picture."""
    split: Literal["train", "test"] = "train"
    """Pictures to use."""
    count: int = Field(4096, ge=1, le=10**8)
    """Questions composed; one epoch."""


class ReasoningGymSource(Model):
    kind: Literal["reasoning_gym"]
    datasets: tuple[str, ...]
    """Generator names, e.g. ``chain_sum``; questions take turns."""
    count: int = Field(1024, ge=1, le=10**8)
    """Questions generated; one epoch."""


class HopchainSource(Model):
    """A corpus of ``headrace questions hopchain`` for models made from scratch; others read its Parquet files as ``rows``."""

    kind: Literal["hopchain"]
    folder: Path
    """Folder of the corpus."""
    evidence: Literal["captions", "video"] = "captions"
    """Show the clip, or the captions of its shots in its place, to a text policy."""


QuestionSource = Annotated[RowsSource | MultiHopSource | EasyVQASource | ReasoningGymSource | HopchainSource, Field(discriminator="kind")]


class QuestionsConfig(Model):
    train: QuestionSource | None = None
    """Questions to train on; may be left out where they are given to the trainer."""
    held_out: QuestionSource | None = None
    """Questions to evaluate on; None evaluates nothing."""
    system_prompt: str | None = None
    """System message for questions that bring none."""
    max_prompt_tokens: int = Field(5376, ge=1)
    """Longer prompts are counted as bad rows."""
