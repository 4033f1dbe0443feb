"""A Video-HopChain corpus as a task: its hop records tell how a question is reasoned out, so a tiny policy can be warm-started on it.

A tiny policy reads keywords: of the question those that are not its template's, each with its hop (lower case behind an "otherwise"),
and in the clip's place, if so configured, those of the captions, each with its shot::

    sea@0 black@0 cross@0 left@0 grows@0 forest@1 … | forest@A shape@A green@A 4@A ; 7@a . A@B shape@B green@B sea@B ; sky@b . … =

A hop is reasoned out by naming where it looks and which shot that is, its caption, what is asked, and a running sum::

    <think> A forest@A forest 1 forest@1 green@1 ring@1 left@1 falls@1 : shape@A green@A yes 4@A 4 sum 4 ; B A yes sea@B … </think>

No two tokens of the evidence are alike, so restating it is match and copy. Whole sentences without these tags three layers had not learned
to restate after 800 steps.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config import HopchainSource
from headrace.questions.hopchain.records import LETTERS, Candidate, Caption
from headrace.questions.hopchain.render import render
from headrace.questions.sets import Split
from headrace.records import Media, Question

_TOKEN = re.compile(r"[^\s.,:;?!()+]+|[;.]")
_TEMPLATE = """The the a an In in on at of is are if If let be otherwise Use check to choose where which two moments moment look
Compare compare There that this shows shown before first-named second its and frame"""
_FILLER = frozenset(_TEMPLATE.split())
"""Words of the template and of grammar."""


class HopchainTask:
    """The questions of one split of a corpus (see ``sets.TaskSet``)."""

    def __init__(self, source: HopchainSource, split: Split) -> None:
        self._source, self._split = source, split
        folder = source.folder
        about, hops = _read(folder / "corpus.json"), _read(folder / "hops.jsonl")
        if not isinstance(about, dict) or "config" not in about:
            raise ValueError(f"{folder / 'corpus.json'}: is not a corpus' metadata; build it with `headrace questions hopchain`")
        self._config: Mapping[str, Any] = about["config"]
        self._captions = {
            entry["video_id"]: [Caption(**caption) for caption in entry["captions"]] for entry in _read(folder / "captions.jsonl")
        }
        self._all = [_record(entry) for entry in hops]
        self._entries = [(entry, candidate) for entry, candidate in zip(hops, self._all, strict=True) if entry["split"] == split]
        if not self._entries:
            raise ValueError(f"questions.{split}: the corpus {folder} has no {split} questions")

    def __len__(self) -> int:
        return len(self._entries)

    def question(self, index: int) -> Question:
        entry, candidate = self._entry(index)
        lines = render(candidate.specification, candidate.hops).splitlines()[:-1]
        text = " ".join([*(keywords(line, letter) for line, letter in zip(lines, LETTERS, strict=False)), "="])
        media: tuple[Media, ...] = ()
        if self._source.evidence == "captions":
            text = f"{' '.join(_line(caption) for caption in self._captions_of(candidate) if caption.text)} | {text}"
        else:
            text = f"<video>\n{text}"
            media = (Media("video", entry["proxy"], self._config["frames"], self._config["max_pixels"]),)
        return Question(
            id=candidate.specification.question_id,
            messages=({"role": "user", "content": text},),
            answer=str(candidate.answer),
            media=media,
            source=str(self._config["name"]),
            extra={
                "hops": len(candidate.hops),
                "hop_types": list(candidate.specification.types),
                "link": candidate.specification.link,
                "video_id": candidate.specification.video_id,
            },
        )

    def trace(self, index: int, rng: np.random.Generator, noise: float = 0.0) -> str:
        _, candidate = self._entry(index)
        specification, total = candidate.specification, 0
        verdicts: list[bool] = []
        steps = []
        for number, hop in enumerate(candidate.hops):
            router = specification.router_of(number)
            astray = router is not None and verdicts[router] != candidate.hops[router].answer  # the other destination answers otherwise
            verdicts.append(hop.answer ^ astray ^ bool(rng.random() < noise))
            value = hop.yes if verdicts[-1] else hop.no
            total += value
            word, tag = ("yes", LETTERS[number]) if verdicts[-1] else ("no", LETTERS[number].lower())
            steps.append(f"{self._reasoned(candidate, number, verdicts)} {word} {value}@{tag} {value} sum {total}")
        return f"<think> {' ; '.join(steps)} </think> <answer> {total} </answer>"

    def vocabulary(self) -> list[str]:
        words = {"yes", "no", "sum", ":", ";", ".", "|", "=", *LETTERS}
        largest = 0
        for candidate in self._all:
            lines = render(candidate.specification, candidate.hops).splitlines()[:-1]
            plain = {word for line in lines for word in _content(line)}
            tags = LETTERS[: len(lines)]
            words |= plain | {f"{word}@{tag}" for word in plain for tag in tags + tags.lower()}
            largest = max(largest, sum(max(hop.yes, hop.no) for hop in candidate.hops))
        seen = {word for captions in self._captions.values() for caption in captions for word in _content(caption.text)}
        shots = max(map(len, self._captions.values()))
        words |= {f"{word}@{shot}" for word in seen for shot in range(shots)}
        return sorted(words | {str(number) for number in range(max(largest, shots) + 1)})

    def _entry(self, index: int) -> tuple[Mapping[str, Any], Candidate]:
        if not 0 <= index < len(self):
            raise IndexError(f"question {index} of {len(self)}")
        return self._entries[index]

    def _reasoned(self, candidate: Candidate, number: int, verdicts: Sequence[bool]) -> str:
        """Where a hop looks, the caption that settles it, and what it asks."""
        hop, router = candidate.hops[number], candidate.specification.router_of(number)
        moments, letter, start = list(zip(hop.scenes, hop.segments, strict=True)), LETTERS[number], LETTERS[number]
        tag = letter
        if router is not None:
            half = len(moments) // 2
            moments = moments[:half] if verdicts[router] else moments[half:]
            start = f"{letter} {LETTERS[router]} {'yes' if verdicts[router] else 'no'}"
            tag = letter if verdicts[router] else letter.lower()
        named = " ".join(f"{_named(scene, tag)} {shot}" for scene, shot in moments)
        if hop.type == "order":
            return f"{start} {named}"
        captions, shot = self._captions_of(candidate), moments[0][1]
        line = _line(captions[shot]) if shot < len(captions) else ""
        return " ".join(f"{start} {named} {line} : {keywords(hop.fact, letter)}".split())

    def _captions_of(self, candidate: Candidate) -> list[Caption]:
        return self._captions[candidate.specification.video_id]


def keywords(text: str, letter: str) -> str:
    """Content words with the hop they belong to, in lower case from an ``otherwise`` to the end of its sentence; ``;`` and ``.`` stay."""
    words, tag = [], letter
    for word in _TOKEN.findall(text):
        tag = letter.lower() if word == "otherwise" else letter if word == "." else tag
        if word in (";", "."):
            words.append(word)
        elif word not in _FILLER and word != letter:
            words.append(f"{word}@{tag}")
    return " ".join(words)


def _content(text: str) -> list[str]:
    """Words that are neither punctuation nor filler."""
    return [word for word in _TOKEN.findall(text) if word not in _FILLER and word not in ";."]


def _named(scene: str, tag: str) -> str:
    """A scene reference as the question has it and plain."""
    words = _content(scene)
    return " ".join([*(f"{word}@{tag}" for word in words), *words])


def _line(caption: Caption) -> str:
    """The content words of a caption, each with its shot."""
    return " ".join(f"{word}@{caption.shot}" for word in _content(caption.text))


def _record(entry: Mapping[str, Any]) -> Candidate:
    return Candidate.model_validate({name: entry[name] for name in Candidate.model_fields})


def _read(path: Path) -> Any:
    """A JSON file, or the list of a JSONL file's lines.

    Raises:
        ValueError: it does not exist or is damaged.
    """
    try:
        text = path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}); build the corpus with `headrace questions hopchain`"
        ) from None
