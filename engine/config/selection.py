"""Which rollouts train."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from headrace.config.base import Model


class DynamicSamplingConfig(Model):
    """DAPO: only groups with some right and some wrong answers train; more are drawn until the batch is full."""

    max_rounds: int = Field(10, ge=1)
    """Drawing rounds per step before training goes on with what there is."""


class PAQMConfig(Model):
    """Query mining: down-sample what is mastered, hint at what never succeeds (docs/selection.md)."""

    hints: Literal["script"] | Path | None = None
    """Hint cache, JSONL or Parquet (``headrace questions hints`` writes one); ``script`` takes the task generator's own hints; None
    hints at nothing."""
    keep_trivial: float = Field(0.1, ge=0, le=1)
    """Share of the questions answered right by every pilot rollout that train all the same; 0 drops them, 1 keeps all."""
    probe_share: float = Field(0.0, ge=0, le=1)
    """The text-only probe succeeds when at least one rollout and at least this share of them are right."""
    probe_share_choice: float = Field(0.5, ge=0, le=1)
    """The same for multiple-choice questions (one-letter answers), where one right answer is likely luck."""
    hint_template: str = "\n\n[Hint]\n{hint}\n[/Hint]"
    """What is added after the question, around the hint."""
    control_share: float = Field(0.0, ge=0, le=1)
    """Share of the hinted questions that are also drawn a second time without the hint: what a new try alone reclaims. These
    rollouts are measured and never train."""
    max_rounds: int = Field(10, ge=1)
    """Drawing rounds per step that fill the places of dropped trivial questions."""

    @field_validator("hint_template")
    @classmethod
    def _holds_the_hint(cls, template: str) -> str:
        if template.count("{hint}") != 1:
            raise ValueError("expected text with {hint} in it once")
        return template


class HSRConfig(Model):
    """Groups reassembled by outcome and path entropy (docs/selection.md)."""

    scope: Literal["per_query", "global_batch"] = "per_query"
    """Where structured places draw from: the question's own rollouts, or, after those, the whole batch's."""
    low: float = Field(0.10, gt=0, lt=1)
    """Quantile of the batch's path entropies below which a rollout is confident."""
    high: float = Field(0.90, gt=0, lt=1)
    """Quantile above which it is surprising."""
    short_buffers: Literal["natural", "repeat"] = "natural"
    """A class with fewer rollouts than its quota leaves the rest to natural sampling, or repeats what it has."""
    ensure_contrast: bool = True
    """A group that had both outcomes keeps both: one natural place goes to the missing one. Off as in the paper."""
    baseline: Literal["assembled", "original"] = "assembled"
    """Group whose mean and deviation the advantages are taken against."""

    @model_validator(mode="after")
    def _ordered(self) -> "HSRConfig":
        if self.low >= self.high:
            raise ValueError(f"low = {self.low} and high = {self.high}: expected low below high")
        return self
