"""What a question costs: prompt, pictures, response lengths. Stated in a YAML file or assumed."""

import math
from pathlib import Path

import numpy as np
from pydantic import Field

from headrace.config import Config, ConfigError, Model, load_model
from headrace.records import Array


class Workload(Model):
    """Mean costs of the questions of a run and the spread of its responses."""

    prompt_tokens: float = Field(gt=0)
    """Prompt tokens of a question, visual ones included."""
    visual_tokens: float = Field(0.0, ge=0)
    """Of those, tokens that stand for pictures."""
    response_tokens: float = Field(gt=0)
    """Mean response, of the first wave where there are two."""
    second_wave: float = Field(1.0, gt=0)
    """Mean response of the second wave over that of the first."""
    spread: float = Field(0.6, ge=0)
    """Standard deviation of the logarithm of the length."""
    at_limit: float = Field(0.0, ge=0, lt=1)
    """Share of responses that run into ``sampling.max_tokens``."""
    filtered: float = Field(0.0, ge=0, lt=1)
    """Share of groups that are drawn and then left out."""
    media_seconds: float = Field(0.0, ge=0)
    """Seconds a server's host takes to read and prepare one question's media, one question at a time."""
    media_per_rollout: bool = False
    """Prepare them again for every rollout; here they are prepared once per group."""
    reward_seconds: float = Field(0.05, ge=0)
    """Seconds until a wave is scored."""

    @classmethod
    def assumed(cls, config: Config) -> "Workload":
        """Half of the longest prompt and an eighth of the longest response: a guess that the plan names as such."""
        return cls(prompt_tokens=max(1.0, config.questions.max_prompt_tokens / 2), response_tokens=max(1.0, config.sampling.max_tokens / 8))

    @classmethod
    def read(cls, path: Path) -> "Workload":
        """Raises ConfigError: no such file, not YAML, or fields that do not fit."""
        return load_model(cls, path)

    def mean_response(self, first_wave: int, group: int) -> float:
        """Mean response tokens over both waves."""
        return self.response_tokens * (first_wave + (group - first_wave) * self.second_wave) / group

    def lengths(self, count: int, wave: int, max_tokens: int, rng: np.random.Generator) -> Array:
        """``count`` response lengths [count] of a wave: log-normal, capped, with the stated share at the limit.

        Raises:
            ConfigError: the share at the limit alone makes responses longer than the mean.
        """
        mean = self.response_tokens * (self.second_wave if wave == 2 else 1.0)
        body = (mean - self.at_limit * max_tokens) / (1 - self.at_limit)
        if body < 1:
            raise ConfigError(f"workload: at_limit = {self.at_limit} of {max_tokens} tokens alone exceeds the mean response of {mean:g}")
        drawn = np.exp(rng.normal(math.log(body) - self.spread**2 / 2, self.spread, count))
        drawn[rng.random(count) < self.at_limit] = max_tokens
        return np.clip(np.rint(drawn), 1, max_tokens)
