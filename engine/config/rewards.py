"""What a response earns."""

from typing import Literal

from pydantic import Field

from headrace.config.base import Model


class OverlongConfig(Model):
    """Soft overlong punishment (DAPO)."""

    max_length: int = Field(20_480, ge=1)
    """Responses at this length lose 1."""
    buffer: int = Field(4_096, ge=1)
    """Length before that over which the loss grows linearly."""


class RewardConfig(Model):
    contract: Literal["answer_boxed", "boxed", "answer_tag"] = "answer_boxed"
    """Shape a response must have (docs/rewards.md)."""
    mode: Literal["strict", "code"] = "strict"
    """How the answer is found and the format graded (docs/rewards.md)."""
    format_term: bool = True
    """Total is 0.8 accuracy + 0.2 format; without it, accuracy alone."""
    verifier: Literal["exact", "math_verify", "task"] = "exact"
    """How answers compare: strings and numbers; with Math-Verify as a last resort; or the task generator's own scorer."""
    overlong: OverlongConfig | None = None
    """Length shaping added to the total."""
    workers: int = Field(1, ge=0)
    """Processes for Math-Verify, task scorers and functions given by name, threads for a function given as an object; 0 scores
    in the engine's own thread, without a clock. The exact verifier cannot hang and always runs there."""
    timeout: float = Field(30.0, gt=0, le=86_400)
    """Seconds one response may take before its worker is killed and the rollout counted as failed."""
    on_failure: Literal["skip", "stop"] = "skip"
    """A rollout that cannot be scored leaves its group, or stops the run."""
