"""One question on one self-contained page: its text, the moments in video order, the hops, the frames (paper 000, Figure 2)."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from headrace.files import write_whole
from headrace.questions.hopchain import film
from headrace.questions.hopchain.records import LETTERS, Candidate, Caption, Dropped, Hop, Shot
from headrace.questions.hopchain.render import render
from headrace.questions.hopchain.state import folder_name

_FRAME_PIXELS = 96_000
_COLOURS = ("#c0392b", "#1f6fb2", "#2e7d4f", "#b7791f", "#7d3c98", "#0e7c86", "#8e4b10", "#5d6d7e")


@dataclass(frozen=True)
class Moment:
    """A shot that the question names."""

    shot: int
    time: str
    names: tuple[tuple[str, str], ...]
    """(letter, reference) of every hop that names it."""
    caption: str
    frame: str
    """JPEG as a data URL; empty where the video cannot be read."""
    taken: bool
    """Whether the true answers lead to it."""


@dataclass(frozen=True)
class Step:
    """A hop as the page shows it."""

    letter: str
    colour: str
    line: str
    kind: str
    route: str
    fact: str
    answer: bool
    yes: int
    no: int
    value: int
    quote: str
    verbatim: bool
    """Whether every part of the quote stands in a caption of the video."""


def write_page(corpus: Path, question_id: str | None = None, out: Path | None = None) -> Path:
    """Write the page of a question and return its path.

    Raises:
        ValueError: the folder is no corpus, or has no such question.
    """
    entry = _entry(corpus, question_id)
    candidate = Candidate.model_validate({name: entry[name] for name in Candidate.model_fields})
    captions = _captions(corpus, str(entry["video_id"]))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html").render(
        entry=entry,
        specification=candidate.specification,
        answer=candidate.answer,
        total=" + ".join(str(hop.value) for hop in candidate.hops),
        last=render(candidate.specification, candidate.hops).splitlines()[-1],
        prose=candidate.prose,
        steps=_steps(candidate, captions),
        moments=_moments(entry, candidate, captions),
        length=_clock(captions[-1].end if captions else 0.0),
        colours=dict(zip(LETTERS, _COLOURS, strict=True)),
        shots=len(captions),
    )
    out = out or corpus / "pages" / f"{folder_name(candidate.specification.question_id)}.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, page)
    return out


def _entry(corpus: Path, question_id: str | None) -> Mapping[str, Any]:
    """The hop record of a question, of the first one where none is named."""
    path = corpus / "hops.jsonl"
    entries = _lines(path)
    if not entries:
        raise ValueError(f"{path}: holds no questions")
    if question_id is None:
        return entries[0]
    for entry in entries:
        if entry["question_id"] == question_id:
            return entry
    raise ValueError(f"{path}: has no question {question_id!r}; its {len(entries)} ids look like {entries[0]['question_id']!r}")


def _captions(corpus: Path, video_id: str) -> list[Caption]:
    found: dict[str, Any] = next((entry for entry in _lines(corpus / "captions.jsonl") if entry["video_id"] == video_id), {"captions": []})
    return [Caption.model_validate(caption) for caption in found["captions"]]


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}); expected the folder of a corpus") from None


def _taken(candidate: Candidate, number: int) -> slice:
    """Which of a hop's moments the true answers lead to."""
    hop, router = candidate.hops[number], candidate.specification.router_of(number)
    if router is None:
        return slice(None)
    half = len(hop.scenes) // 2
    return slice(0, half) if candidate.hops[router].answer else slice(half, None)


def _steps(candidate: Candidate, captions: Sequence[Caption]) -> list[Step]:
    lines = render(candidate.specification, candidate.hops).splitlines()
    return [_step(candidate, number, hop, lines[number], captions) for number, hop in enumerate(candidate.hops)]


def _step(candidate: Candidate, number: int, hop: Hop, line: str, captions: Sequence[Caption]) -> Step:
    router = candidate.specification.router_of(number)
    moments = hop.scenes[_taken(candidate, number)]
    settled = " and ".join(moments)
    said = "" if router is None else f"{LETTERS[router]} said {'yes' if candidate.hops[router].answer else 'no'}, so look at {settled}"
    return Step(
        letter=LETTERS[number],
        colour=_COLOURS[number],
        line=line,
        kind=hop.type,
        route=said,
        fact=f"{moments[0]} is shown before {moments[1]}" if hop.type == "order" else f"in {settled}, {hop.fact}",
        answer=hop.answer,
        yes=hop.yes,
        no=hop.no,
        value=hop.value,
        quote=hop.quote,
        verbatim=all(any(part.strip() in caption.text for caption in captions) for part in hop.quote.split("…")),
    )


def _moments(entry: Mapping[str, Any], candidate: Candidate, captions: Sequence[Caption]) -> list[Moment]:
    """Every shot that a hop names, in video order."""
    names: dict[int, list[tuple[str, str]]] = {}
    taken: set[int] = set()
    for number, hop in enumerate(candidate.hops):
        for shot, scene in zip(hop.segments, hop.scenes, strict=True):
            names.setdefault(shot, []).append((LETTERS[number], scene))
        taken.update(hop.segments[_taken(candidate, number)])
    known = {caption.shot: caption for caption in captions}
    return [
        Moment(
            shot=shot,
            time=_clock(known[shot].start) if shot in known else "?",
            names=tuple(names[shot]),
            caption=known[shot].text if shot in known else "",
            frame=_frame(Path(entry["video"]), known.get(shot)),
            taken=shot in taken,
        )
        for shot in sorted(names)
    ]


def _frame(video: Path, caption: Caption | None) -> str:
    """The frame in the middle of a shot; none where the source video is gone."""
    if caption is None:
        return ""
    middle = (caption.start + caption.end) / 2
    try:
        frames = film.shot_frames(video, Shot(start=middle, end=middle), max_pixels=_FRAME_PIXELS)
    except Dropped:
        return ""
    return "data:image/jpeg;base64," + base64.b64encode(frames[0]).decode() if frames else ""


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
