"""Who describes, writes, judges and solves: code in a scripted world, servers elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.questions.hopchain.judging import Fault
from headrace.questions.hopchain.records import Candidate, Caption, Cost, Shot, Specification, Video
from headrace.records import Question


class ServerDown(ValueError):  # noqa: N818
    """A server did not answer for as long as it was waited for; the run stops and can be gone on with."""


class Refused(ValueError):  # noqa: N818
    """A server answered that it cannot serve this one request."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model replied."""

    text: str
    cost: Cost


class Models(Protocol):
    """The three roles. Every method may raise ``ServerDown`` or ``Refused``."""

    async def caption(self, video: Video, shot: Shot, frames: Sequence[bytes]) -> Reply:
        """Describe one shot, shown as JPEG files in order; the text alone."""
        ...

    async def write(self, captions: Sequence[Caption], specifications: Sequence[Specification]) -> Reply:
        """Write a question per specification: a JSON object with ``questions``."""
        ...

    async def judge(self, captions: Sequence[Caption], candidate: Candidate, attempt: int) -> Reply:
        """Examine every hop: a JSON object with ``hops``."""
        ...

    async def rewrite(self, captions: Sequence[Caption], specification: Specification, attempt: int, faults: Sequence[Fault]) -> Reply:
        """Write one question again; ``faults`` are empty unless the writer may know them."""
        ...


class Solver(Protocol):
    """The base policy of the difficulty filter."""

    async def solve(self, question: Question, candidate: Candidate, rollouts: int) -> list[int | None]:
        """Integers that the answers give, None for one that cannot be read; may be fewer than asked for.

        Raises:
            ValueError: the question cannot be put to the policy, e.g. because its prompt is too long.
        """
        ...
