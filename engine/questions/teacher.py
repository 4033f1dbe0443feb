"""Fills the hint cache: a teacher behind an OpenAI-compatible server, or the task generator that knows the truth.

The cache is a JSONL file to which one row is appended per question, so a run that was stopped goes on with the questions that
are missing. A hint that gives the answer away is asked for again and, if it still does, left out and counted.
"""

import asyncio
import base64
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from headrace.files import whole_lines
from headrace.questions.hints import PARTS, load_hints
from headrace.questions.hopchain.chat import Chat
from headrace.questions.hopchain.film import probe, shot_frames
from headrace.questions.hopchain.records import Cost, Dropped, Shot
from headrace.questions.hopchain.roles import Refused
from headrace.records import Hint, Media, Question

PROMPTS_VERSION = 1
"""Raised with every change of the texts below; a cache names the version that made it."""
PROMPTS = {
    "caption": "Describe what you are shown in words, completely and neutrally, so that somebody who cannot see it could answer "
    "questions about it: every object with its colour, shape, size and place, every text and number, and in a clip the order of "
    "events. Reply with the description alone.",
    "visual": "Somebody fails at this question because they misread what they are shown. Take it apart for them: name the parts "
    "that matter for the question with their places (coordinates from 0 to 1, left to right and top to bottom), shapes, colours "
    "and counts. State only what can be seen. Do not answer the question and draw no conclusion. Reply with the list alone.\n\n"
    "Question: {question}",
    "reasoning": "Somebody fails at this question because they do not find the way. Work it out for yourself, then tell them the "
    "one key step that opens the way, such as the first theorem or relation to use, in at most three sentences. Neither give the "
    "final answer nor all steps. Reply with the step alone.\n\nQuestion: {question}",
}
ATTEMPTS = 2
"""Times a hint is asked for until it does not give the answer away."""
CLIP_FRAMES = 8
MAX_PIXELS = 1_000_000
_PLACEHOLDER = re.compile(r"<(?:image|video)>\s*")


def gives_away(text: str, answer: str) -> bool:
    """Whether a hint holds the reference answer as words of its own.

    An answer of one character occurs in every text; it counts only where the text names it as the result.
    """
    text, answer = text.casefold(), answer.strip().casefold()
    if not answer:
        return False
    exact = rf"(?<![\w.]){re.escape(answer)}(?![\w]|\.\d)"
    named = rf"(?:answer|result|total|sum|option|choice|=)\W*(?:is\W+|are\W+|would be\W+)?{exact}"
    return re.search(named if len(answer) == 1 else exact, text) is not None


@dataclass(slots=True)
class Filled:
    """How filling a cache went."""

    path: Path
    done: int = 0
    """Rows written, by this run and earlier ones."""
    counts: Counter[str] = field(default_factory=Counter)
    """Parts obtained, and parts left out by reason."""
    cost: Cost = field(default_factory=Cost)


async def ask(
    questions: Sequence[Question],
    out: Path,
    chat: Chat,
    parts: Sequence[str] = PARTS,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Filled:
    """Ask the teacher about every question that the cache does not have yet.

    Args:
        questions: captions and visual hints are asked for where there are media.
        out: the cache, ``.jsonl``; made or continued.
        chat: the teacher; it bounds the requests on their way.
        parts: of ``PARTS``.
        progress: told rows done and rows wanted.

    Raises:
        ServerDown: the teacher does not answer any more; what was written stays.
        ValueError: ``out`` cannot be used.
    """
    filled = Filled(out)
    waiting = iter(_missing(questions, out, filled))
    with out.open("a", encoding="utf-8") as file:

        async def work() -> None:
            for question in waiting:
                texts, problems, cost = await _hint(question, chat, parts)
                row = {"id": question.id, **texts, "teacher": chat.config.model, "prompts": PROMPTS_VERSION}
                file.write(json.dumps(row | ({"left_out": problems} if problems else {}), ensure_ascii=False) + "\n")
                file.flush()
                filled.done += 1
                filled.counts.update(texts.keys())
                filled.counts.update(f"{reason} ({part})" for part, reason in problems.items())
                filled.cost += cost
                progress(filled.done, len(questions))

        workers = [asyncio.create_task(work()) for _ in range(chat.config.concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    return filled


def script(count: int, question: Callable[[int], Question], hint: Callable[[int], Hint], out: Path) -> Filled:
    """Write the generator's own hints of its first ``count`` questions to a fresh cache; it is there whole or not at all."""
    filled = Filled(out)
    partial = out.with_name(f".{out.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        for index in range(count):
            parts = {part: text for part, text in asdict(hint(index)).items() if text}
            file.write(json.dumps({"id": question(index).id, **parts, "teacher": "script"}, ensure_ascii=False) + "\n")
            filled.counts.update(parts.keys())
            filled.done += 1
    os.replace(partial, out)
    return filled


def _missing(questions: Sequence[Question], out: Path, filled: Filled) -> Iterator[Question]:
    """Questions without a row; a torn last line of an earlier run is cut off first."""
    if out.suffix != ".jsonl":
        raise ValueError(f"{out}: expected a .jsonl file to write hints to")
    known: Mapping[str, Hint] = {}
    if out.exists():
        whole_lines(out)
        known = load_hints(out)
    filled.done = sum(question.id in known for question in questions)
    return (question for question in questions if question.id not in known)


async def _hint(question: Question, chat: Chat, parts: Sequence[str]) -> tuple[dict[str, str], dict[str, str], Cost]:
    """Parts obtained, parts left out with the reason, and the cost."""
    texts: dict[str, str] = {}
    problems: dict[str, str] = {}
    cost = Cost()
    try:
        pictures = await asyncio.to_thread(_pictures, question.media)
    except (Dropped, ValueError, OSError):
        return {}, dict.fromkeys(parts, "unreadable media"), cost
    for part in parts:
        if part != "reasoning" and not pictures:
            continue
        for attempt in range(ATTEMPTS):
            try:
                reply = await chat.complete(_messages(part, question, pictures), temperature=0.7 if attempt else 0.0, seed=attempt)
            except Refused:
                problems[part] = "refused by the server"
                break
            cost += reply.cost
            text = reply.text.strip()
            reason = "empty" if not text else "gives the answer away" if part != "caption" and gives_away(text, question.answer) else ""
            if not reason:
                texts[part] = text
                problems.pop(part, None)
                break
            problems[part] = reason
    return texts, problems, cost


def _messages(part: str, question: Question, pictures: Sequence[str]) -> list[dict[str, Any]]:
    """One user message: the pictures, then the request. The question's own system prompt, which asks for a format, stays out."""
    asked = "\n".join(_PLACEHOLDER.sub("", message["content"]).strip() for message in question.messages if message["role"] == "user")
    request = PROMPTS[part].replace("{question}", asked)
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
    return [{"role": "user", "content": [*shown, {"type": "text", "text": request}] if shown else request}]


def _pictures(media: Sequence[Media]) -> list[str]:
    """JPEG data URLs of pictures, and of evenly spaced frames of clips."""
    return ["data:image/jpeg;base64," + base64.b64encode(data).decode() for item in media for data in _jpegs(item)]


def _jpegs(item: Media) -> list[bytes]:
    if item.kind == "video":
        footage = probe(Path(item.path))
        seconds = footage.frames / (footage.fps or 1.0)
        return shot_frames(Path(item.path), Shot(start=0.0, end=seconds), min(CLIP_FRAMES, footage.frames) / seconds, MAX_PIXELS)
    with Image.open(item.path) as picture:
        shown = ImageOps.exif_transpose(picture).convert("RGB")
    scale = min(1.0, (MAX_PIXELS / (shown.width * shown.height)) ** 0.5)
    target = io.BytesIO()
    shown.resize((max(1, int(shown.width * scale)), max(1, int(shown.height * scale)))).save(target, "JPEG", quality=90)
    return [target.getvalue()]
