"""What the question generator passes from stage to stage and keeps on disk: plain, immutable, JSON in and out."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

HopType = Literal["order", "spatial", "action", "attribute"]
HOP_TYPES: tuple[HopType, ...] = ("order", "spatial", "action", "attribute")
Link = Literal["flat", "selector", "chain"]
LETTERS = "ABCDEFGH"
"""Names of the hops; a question has at most eight."""


class Record(BaseModel):
    """Base: unknown fields are refused, nothing changes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Video(Record):
    """A source video."""

    id: str
    path: Path
    source: str
    """Collection it comes from; the held-out split is stratified by it."""


class Footage(Record):
    """What a container says about its pictures."""

    frames: int
    fps: float
    width: int
    height: int

    @property
    def duration(self) -> float:
        """Seconds, ``frames / fps``; 0 where either is unknown."""
        return self.frames / self.fps if self.fps > 0 else 0.0


class Shot(Record):
    """A stretch of the video, seconds."""

    start: float
    end: float


class Caption(Record):
    """What is seen in one shot."""

    shot: int
    start: float
    end: float
    text: str

    @property
    def digest(self) -> str:
        """The first dozen words: enough to tell the shots of a video apart."""
        return " ".join(self.text.split()[:12])


class Specification(Record):
    """What a question has to be, drawn before it is written."""

    video_id: str
    index: int
    """Which of the video's questions."""
    types: tuple[HopType, ...]
    link: Link
    routes: tuple[tuple[int, int], ...]
    """(router, routed) hops, counted from 0; the router's answer decides where the routed hop looks."""
    numbers: tuple[tuple[int, int], ...]
    """(yes, no) of every hop."""

    @property
    def question_id(self) -> str:
        return f"{self.video_id}/{self.index}"

    @property
    def hops(self) -> int:
        return len(self.types)

    def router_of(self, hop: int) -> int | None:
        """The hop whose answer routes ``hop``."""
        return next((router for router, routed in self.routes if routed == hop), None)


class Hop(Record):
    """One yes/no check of a written question."""

    type: HopType
    scenes: tuple[str, ...]
    """The moments it names: one; two of an order hop; one, or two of an order hop, per destination of a routed hop."""
    segments: tuple[int, ...]
    """Shots that the writer meant by them, in the same order."""
    fact: str
    """What holds if the answer is yes; for a routed order hop which of its two moments is shown first."""
    yes: int
    no: int
    value: int
    """The number that the video yields."""
    quote: str = ""
    """Words of the captions that settle it."""
    description: str = ""

    @property
    def answer(self) -> bool:
        """Whether the number taken is the one of yes."""
        return self.value == self.yes


class Candidate(Record):
    """A written question that passed the code checks."""

    specification: Specification
    hops: tuple[Hop, ...]
    prose: str = ""
    """The writer's own wording, kept for auditing; the question is rendered from the hops."""

    @property
    def answer(self) -> int:
        """Sum of the values."""
        return sum(hop.value for hop in self.hops)


class Cost(Record):
    """What a stage spent on servers."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            calls=self.calls + other.calls,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
        )


class Dropped(Exception):  # noqa: N818 - an outcome, not a fault of the program
    """A video or question leaves the pipeline; the reason is counted, the detail kept."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = " ".join(detail.split())[:400]
