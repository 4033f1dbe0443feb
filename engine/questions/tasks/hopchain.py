"""A Video-HopChain corpus as a task: its hop records tell how a question is reasoned out, so a tiny policy can be warm-started on it.

The evidence is the clip, or in its place the captions of its shots. A hop is reasoned out by naming where it looks and in which shot
that is, what it asks, the caption that settles it, and a running sum::

    <think> A the forest 3 , the shape is green : The@3 forest@3 shows@3 a@3 green@3 ring@3 : yes 4 sum 4 ;
    B A yes so the sea 5 , the lava 1 : no 9 sum 13 </think> <answer> 13 </answer>

Punctuation stands apart, so that every word is one token of a scratch model, and every word of a caption carries its shot: no two tokens
of the evidence are alike, which turns restating a caption into match and copy. As plain words three layers had not learned it after
a thousand steps.
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

_WORD = re.compile(r"[^\s.,:;?!()+]+")
_PUNCTUATION = re.compile(r"([.,:;?!()+])")


def spaced(text: str) -> str:
    """Text whose punctuation stands apart, white space as single blanks."""
    return " ".join(_PUNCTUATION.sub(r" \1 ", text).split())


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
        text, media = spaced(render(candidate.specification, candidate.hops)), ()
        if self._source.evidence == "captions":
            text = f"{' '.join(self._line(candidate, caption.shot) for caption in self._captions_of(candidate) if caption.text)} | {text}"
        else:
            text = f"<video>\n{text}"
            media = (Media("video", entry["proxy"], self._config["frames"], self._config["max_pixels"]),)  # type: ignore[assignment]
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
            word = "yes" if verdicts[-1] else "no"
            steps.append(f"{self._reasoned(candidate, number, verdicts)} : {word} {value} sum {total}")
        return f"<think> {' ; '.join(steps)} </think> <answer> {total} </answer>"

    def vocabulary(self) -> list[str]:
        words = {"yes", "no", "so", "sum", ";", "|", *LETTERS}
        largest = 0
        for candidate in self._all:
            words.update(spaced(render(candidate.specification, candidate.hops)).split())
            words.update(word for hop in candidate.hops for word in spaced(" ".join([*hop.scenes, hop.fact])).split())
            largest = max(largest, sum(max(hop.yes, hop.no) for hop in candidate.hops))
        for captions in self._captions.values():
            largest = max(largest, len(captions))
        seen = {word for captions in self._captions.values() for caption in captions for word in _WORD.findall(caption.text)}
        tagged = {f"{word}@{shot}" for word in seen for shot in range(max(map(len, self._captions.values())))}
        return sorted(words | tagged | {str(number) for number in range(largest + 1)})

    def _entry(self, index: int) -> tuple[Mapping[str, Any], Candidate]:
        if not 0 <= index < len(self):
            raise IndexError(f"question {index} of {len(self)}")
        return self._entries[index]

    def _reasoned(self, candidate: Candidate, number: int, verdicts: Sequence[bool]) -> str:
        """Where a hop looks, what it asks, and the captions that settle it."""
        hop, router = candidate.hops[number], candidate.specification.router_of(number)
        moments = [(f"{spaced(scene)} {shot}", shot) for scene, shot in zip(hop.scenes, hop.segments, strict=True)]
        start = LETTERS[number]
        if router is not None:
            half = len(moments) // 2
            moments = moments[:half] if verdicts[router] else moments[half:]
            start += f" {LETTERS[router]} {'yes' if verdicts[router] else 'no'} so"
        named = " , ".join(scene for scene, _ in moments)
        if hop.type == "order":
            return f"{start} {named}"
        return f"{start} {named} , {spaced(hop.fact)} : {self._line(candidate, moments[0][1])}"

    def _captions_of(self, candidate: Candidate) -> list[Caption]:
        return self._captions[candidate.specification.video_id]

    def _line(self, candidate: Candidate, shot: int) -> str:
        """The words of a shot's caption, each with its shot."""
        captions = self._captions_of(candidate)
        return " ".join(f"{word}@{shot}" for word in _WORD.findall(captions[shot].text)) if shot < len(captions) else ""


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
        raise ValueError(f"{path}: cannot be read ({error}); build the corpus with `headrace questions hopchain`") from None
