"""What a response earns: extraction, verification, shaping, the worker pool."""

from headrace.rewards.extraction import extract
from headrace.rewards.scoring import score

__all__ = ["extract", "score"]
