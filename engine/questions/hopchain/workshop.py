"""What the stages of a video share: their records on disk, and who does the work."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from headrace.questions.hopchain.judging import Trial
from headrace.questions.hopchain.records import Candidate, Caption, Footage, Shot, Specification, Video
from headrace.questions.hopchain.roles import Models, Solver
from headrace.questions.hopchain.settings import CorpusConfig
from headrace.questions.hopchain.state import Stage, VideoStore
from headrace.records import Question


class Admitted(Stage):
    footage: Footage | None = None


class Segmented(Stage):
    shots: tuple[Shot, ...] = ()


class Captioned(Stage):
    captions: tuple[Caption, ...] = ()
    """Of all shots; empty text where the captioner saw nothing."""


class CaptionPiece(Stage):
    """One caption, kept as soon as it is paid for."""

    caption: Caption


class Written(Stage):
    trials: tuple[Trial, ...] = ()
    specifications: tuple[Specification, ...] = ()


class Judged(Stage):
    trials: tuple[Trial, ...] = ()
    complete: bool = False


class Solved(Stage):
    """Right answers of the base policy, per question id."""

    right: dict[str, int] = Field({})
    answered: dict[str, int] = Field({})
    kept: tuple[str, ...] = ()
    fates: dict[str, str] = Field({})


@dataclass(frozen=True)
class Workshop:
    """What the stages share."""

    config: CorpusConfig
    models: Models
    solver: Solver | None
    question_of: Callable[[Candidate, Path], Question]
    """The row of a candidate as the policy would see it."""
    threads: Executor
    proxies: Path
    report: Callable[[str, str], None]
    """``(stage, fate)``, told whenever a video leaves a stage."""
    make: Callable[[Video], None] | None = None
    """Makes a video that does not exist yet: the small world's are rendered when they are needed."""

    async def in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.threads, work, *arguments)


def proxy_of(shop: Workshop, store: VideoStore) -> Path:
    """The clip that the policy sees."""
    return shop.proxies / f"{store.folder.name}.mp4"


async def gather(*work: Coroutine[Any, Any, None]) -> None:
    """Run all; the first error cancels the others, which are waited for, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for item in work:
                group.create_task(item)
    except BaseExceptionGroup as errors:
        raise _first(errors) from None


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
