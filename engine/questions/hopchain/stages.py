"""The stages of one video, from file to judged and filtered questions; each is done once and kept on disk."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import Field

from headrace.questions.hopchain import film
from headrace.questions.hopchain.checks import check
from headrace.questions.hopchain.judging import Fault, Trial, read_judgement, settle
from headrace.questions.hopchain.records import Candidate, Caption, Cost, Dropped, Footage, Shot, Specification, Video
from headrace.questions.hopchain.replies import Unparsable, json_object
from headrace.questions.hopchain.roles import Models, Refused, Reply, ServerDown, Solver
from headrace.questions.hopchain.segments import segment_shots
from headrace.questions.hopchain.settings import CorpusConfig
from headrace.questions.hopchain.specification import draw_specification
from headrace.questions.hopchain.state import Stage, VideoStore
from headrace.records import Question

STAGES = ("admit", "segment", "caption", "write", "judge", "difficulty")
S = TypeVar("S", bound=Stage)


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


async def process(shop: Workshop, store: VideoStore) -> None:
    """Take one video through every stage that is not done yet.

    Raises:
        ServerDown: a server is gone; everything done so far is kept.
    """
    admitted = await _once(shop, store, "admit", Admitted, lambda: _admit(shop, store))
    if admitted.footage is None:
        return
    segmented = await _once(shop, store, "segment", Segmented, lambda: _segment(shop, store, admitted.footage))
    if segmented.dropped:
        return
    captioned = await _once(shop, store, "caption", Captioned, lambda: _caption(shop, store, segmented.shots))
    if captioned.dropped:
        return
    captions = readable(captioned.captions, shop.config.captions.max_shots)
    written = await _once(shop, store, "write", Written, lambda: _write(shop, store.video, captions))
    if written.dropped:
        return
    judged = await _judge(shop, store, captions, written.trials)
    await _once(shop, store, "difficulty", Solved, lambda: _solve(shop, store, judged.trials))


async def _once(shop: Workshop, store: VideoStore, stage: str, kind: type[S], work: Callable[[], Awaitable[S]]) -> S:
    """The record of a stage: from disk, or done now and put there; ``Dropped`` becomes a record too."""
    record = store.load(stage, kind)
    if record is None:
        try:
            record = await work()
        except Dropped as drop:
            record = kind(dropped=drop.reason, detail=drop.detail)
        store.save(stage, record)
    shop.report(stage, record.dropped or "kept")
    return record


async def _admit(shop: Workshop, store: VideoStore) -> Admitted:
    """Long enough, readable, and with a proxy of all its frames."""
    config, video = shop.config, store.video
    if shop.make is not None:
        await shop.in_thread(shop.make, video)
    footage = await shop.in_thread(film.probe, video.path)
    if footage.duration < config.min_duration:
        raise Dropped("too_short", f"{video.path}: {footage.duration:.1f} s, expected at least {config.min_duration:g} s")
    proxy = proxy_of(shop, store)
    written = await shop.in_thread(film.write_proxy, video.path, footage, proxy, config.frames, config.max_pixels)
    if written != config.frames:
        proxy.unlink(missing_ok=True)
        raise Dropped("frames_lost", f"{video.path}: {written} of {config.frames} proxy frames could be decoded")
    return Admitted(footage=footage)


def proxy_of(shop: Workshop, store: VideoStore) -> Path:
    """The clip that the policy sees."""
    return shop.proxies / f"{store.folder.name}.mp4"


async def _segment(shop: Workshop, store: VideoStore, footage: Footage | None) -> Segmented:
    assert footage is not None
    rules = shop.config.shots
    scenes = await shop.in_thread(film.find_scenes, store.video.path, rules.threshold, rules.min_scene_frames)
    spans = segment_shots(scenes, footage.duration, rules.min_seconds, rules.max_seconds, strict_max=rules.strict_max)
    return Segmented(shots=tuple(Shot(start=start, end=end) for start, end in spans))


async def _caption(shop: Workshop, store: VideoStore, shots: Sequence[Shot]) -> Captioned:
    """Caption every shot that has no caption yet; enough of them must have text."""
    pieces = {piece.caption.shot: piece for piece in store.lines("captions", CaptionPiece)}

    async def one(number: int, shot: Shot) -> None:
        text, cost, detail = "", Cost(), ""
        try:
            frames = await shop.in_thread(
                film.shot_frames, store.video.path, shot, shop.config.captions.fps, shop.config.captions.max_pixels
            )
            if frames:
                reply = await shop.models.caption(store.video, shot, frames)
                text, cost = " ".join(reply.text.split()), reply.cost
        except (Dropped, Refused) as error:
            detail = str(error)
        piece = CaptionPiece(caption=Caption(shot=number, start=shot.start, end=shot.end, text=text), cost=cost, detail=detail)
        store.append("captions", piece)
        pieces[number] = piece

    await gather(*(one(number, shot) for number, shot in enumerate(shots) if number not in pieces))
    captions = tuple(pieces[number].caption for number in range(len(shots)))
    cost = sum((piece.cost for piece in pieces.values()), Cost())
    found = sum(bool(caption.text) for caption in captions)
    if found < shop.config.captions.min_share * len(shots) or not found:
        details = [piece.detail for piece in pieces.values() if piece.detail]
        detail = f"{found} of {len(shots)} shots have a caption" + (f"; {details[0]}" if details else "")
        return Captioned(dropped="too_few_captions", detail=detail[:400], cost=cost)
    return Captioned(captions=captions, cost=cost)


def readable(captions: Sequence[Caption], most: int) -> list[Caption]:
    """What writer and judge read: captions with text, evenly thinned to ``most``."""
    found = [caption for caption in captions if caption.text]
    if len(found) <= most:
        return found
    return [found[index] for index in np.linspace(0, len(found) - 1, most).round().astype(int)]


async def _write(shop: Workshop, video: Video, captions: Sequence[Caption]) -> Written:
    """Draw specifications and have a question written for each."""
    draw = shop.config.draw
    specifications: list[Specification] = []
    trials: dict[int, Trial] = {}
    for index in range(draw.per_video):
        try:
            specifications.append(draw_specification(video.id, index, draw.drawn()))
        except ValueError as error:
            trials[index] = Trial(candidate=None, fate="specification", detail=str(error))
    cost = Cost()
    if specifications:
        try:
            reply = await shop.models.write(captions, specifications)
            cost = reply.cost
            trials |= {specification.index: _opened(reply, specification) for specification in specifications}
        except Refused as error:
            trials |= {
                specification.index: Trial(candidate=None, fate="refused", detail=str(error)[:400]) for specification in specifications
            }
    return Written(trials=tuple(trials[index] for index in sorted(trials)), specifications=tuple(specifications), cost=cost)


def _opened(reply: Reply, specification: Specification) -> Trial:
    """The trial of one question of a reply; dropped at once where it fails the checks."""
    try:
        return Trial(candidate=written_question(reply.text, specification))
    except Dropped as drop:
        return Trial(candidate=None, fate=drop.reason, detail=drop.detail)


def written_question(text: str, specification: Specification) -> Candidate:
    """The checked question that a writer's reply holds for a specification.

    Raises:
        Dropped: ``not_json``, ``skipped``, or a check failed.
    """
    try:
        questions = json_object(text).get("questions")
    except Unparsable as error:
        raise Dropped("not_json", str(error)) from None
    if not isinstance(questions, list):
        raise Dropped("not_json", "the reply has no list of questions")
    for question in questions:
        if isinstance(question, dict) and question.get("specification") == specification.index and not question.get("skip"):
            prose = question.get("prose")
            return check(question.get("hops"), specification, prose if isinstance(prose, str) else "")
    raise Dropped("skipped", "the writer left the specification out")


async def _judge(shop: Workshop, store: VideoStore, captions: Sequence[Caption], written: Sequence[Trial]) -> Judged:
    """Take every question through the loop of judging and rewriting, kept after each step."""
    state = store.load("judge", Judged) or Judged(trials=tuple(written))
    trials, spent = list(state.trials), [state.cost]

    def save(complete: bool = False) -> Judged:
        record = Judged(trials=tuple(trials), cost=spent[0], complete=complete)
        store.save("judge", record)
        return record

    async def one(position: int) -> None:
        async def judge(candidate: Candidate, attempt: int) -> tuple[Fault, ...]:
            try:
                reply = await shop.models.judge(captions, candidate, attempt)
            except Refused as error:
                return (Fault(hop=0, kind="UNPARSABLE", why=str(error)[:300]),)
            spent[0] = spent[0] + reply.cost
            return read_judgement(reply.text, len(candidate.hops))

        async def rewrite(candidate: Candidate, attempt: int, faults: tuple[Fault, ...]) -> Candidate:
            specification = candidate.specification
            try:
                reply = await shop.models.rewrite(captions, specification, attempt, faults if shop.config.draw.feedback else ())
            except Refused as error:
                raise Dropped("refused", str(error)) from None
            spent[0] = spent[0] + reply.cost
            return written_question(reply.text, specification)

        def keep(trial: Trial) -> None:
            trials[position] = trial
            save()

        await settle(trials[position], judge, rewrite, keep)

    if not state.complete:
        await gather(*(one(position) for position, trial in enumerate(trials) if trial.fate == "open"))
        state = save(complete=True)
    shop.report("judge", "kept" if any(trial.fate == "kept" for trial in state.trials) else "dropped")
    return state


async def _solve(shop: Workshop, store: VideoStore, trials: Sequence[Trial]) -> Solved:
    """Drop what the base policy solves too often."""
    candidates = [trial.candidate for trial in trials if trial.fate == "kept" and trial.candidate is not None]
    rules, details = shop.config.difficulty, list[str]()
    right: dict[str, int] = {}
    answered: dict[str, int] = {}
    fates: dict[str, str] = {}
    for candidate in candidates:
        identity = candidate.specification.question_id
        if rules is None or shop.solver is None:
            fates[identity] = "kept"
        else:
            try:
                answers = await shop.solver.solve(shop.question_of(candidate, proxy_of(shop, store)), candidate, rules.rollouts)
            except ServerDown:
                raise
            except ValueError as error:
                fates[identity], details = "unusable", [*details, str(error)]
                continue
            right[identity], answered[identity] = sum(answer == candidate.answer for answer in answers), len(answers)
            fates[identity] = "too_easy" if too_easy(right[identity], len(answers), rules.drop_from) else "kept"
    kept = tuple(identity for identity, fate in fates.items() if fate == "kept")
    return Solved(right=right, answered=answered, kept=kept, fates=fates, detail="; ".join(details)[:400])


def too_easy(right: int, answered: int, drop_from: float = 0.75) -> bool:
    """Whether the share of right answers is at least ``drop_from``; without an answer a question stays."""
    return answered > 0 and right / answered >= drop_from


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
