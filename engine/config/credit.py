"""What each token of a response is worth."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from headrace.config.base import Model


class AdvantageConfig(Model):
    ddof: Literal[0, 1] = 0
    """Degrees of freedom of the group's standard deviation."""
    normalise: bool = True
    """Divide by the standard deviation; False is Dr. GRPO."""


class RulesRouterConfig(Model):
    kind: Literal["rules"] = "rules"
    """Find claims by regular expressions: for synthetic vocabularies, and offline."""
    patterns: tuple[str, ...] = Field(min_length=1)
    """Each match is a claim; of a pattern with groups each group is one. The text starts with the think tag."""

    @field_validator("patterns")
    @classmethod
    def _compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression ({error})") from None
        return patterns


class ServerRouterConfig(Model):
    kind: Literal["server"]
    """Ask a vision-language model behind an OpenAI-compatible server, which sees picture, question and response, and neither the
    right answer nor the score."""
    url: str = Field(pattern=r"^https?://[^/]")
    """Base of the API, such as ``http://127.0.0.1:8000/v1``."""
    model: str
    """Name the server knows the model by."""
    key_variable: str | None = None
    """Environment variable that holds the API key; None sends none."""
    concurrency: int = Field(64, ge=1)
    """Requests under way at once."""
    timeout: float = Field(60.0, gt=0)
    """Seconds one request may take."""
    deadline: float = Field(180.0, gt=0)
    """Seconds from a rollout's score until its claims must be there, waiting in line included; later its gates stay 1."""
    max_tokens: int = Field(2048, ge=1)
    """Tokens of one reply."""


RouterConfig = Annotated[RulesRouterConfig | ServerRouterConfig, Field(discriminator="kind")]


class VPPOConfig(Model):
    """Credit for the tokens that depend on the picture (docs/credit.md)."""

    fraction: float = Field(0.4, gt=0, le=1)
    """Share of each response's tokens that enter the numerator."""
    scale_floor: float = Field(0.9, gt=0, le=1)
    """Factor on the advantages of the response that depends least; the mean factor is 1."""


class PACGConfig(Model):
    """Less positive credit for claims about the picture that persist without it (docs/credit.md)."""

    margin: float = Field(0.05, ge=0)
    """Claims whose log-prob falls by more than this beyond the rest of the response, in nats, keep all their credit."""
    alpha: float = Field(10.0, ge=0)
    """How fast a gate closes above that, per nat."""
    floor: float = Field(0.30, ge=0, le=1)
    """Smallest gate."""
    form: Literal["A", "B", "C"] = "A"
    """A max(floor, exp(-α u)), B floor + (1 - floor) exp(-α u), C max(floor, 1 - α u), u the nats above the margin."""
    claims: Literal["routed", "every_token"] = "routed"
    """``every_token`` makes each token its own claim, uncalibrated: the ablation without routing."""
    calibrate: bool = True
    """Take off what the rest of the response falls by; off is an ablation."""
    positive_only: bool = True
    """Gate positive advantages alone; off is an ablation."""
    router: RouterConfig | None = None
    """Who finds the claims."""

    @model_validator(mode="after")
    def _has_claims(self) -> "PACGConfig":
        if (self.router is None) == (self.claims == "routed"):
            raise ValueError("router finds the claims of claims = routed, which needs one; claims = every_token takes none")
        return self


class CreditConfig(Model):
    """Credit by what a response owes to its picture; VPPO comes before PACG."""

    intervention: Literal["patches", "blur", "noise", "grey"] = "patches"
    """How the picture beside the original is degraded: patches of 14 pixels blackened with probability 0.5, Gaussian blur, Gaussian
    noise, or all grey; fixed by the question's id."""
    vppo: VPPOConfig | None = None
    pacg: PACGConfig | None = None
