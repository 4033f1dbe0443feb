"""What the small world's sentences mean: captions, scene references and facts, read back by rule."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.questions.hopchain.world.script import ACTIONS, COLOURS, SIDES, sentence, where

_CAPTION = re.compile(r"The (\w+) shows a (\w+) (\w+) (?:on|in) the (\w+) that (\w+)\.")
_REFERENCE = re.compile(r"the (?P<place>\w+)(?: with the (?P<extra>.+))?")
ANYWHERE = "a scene with a shape"
"""A reference that fits every segment."""
SUBJECT = "the shape"


@dataclass(frozen=True, slots=True)
class Seen:
    """A caption of the small world, read back."""

    segment: int
    place: str
    colour: str
    shape: str
    side: str
    action: str

    @property
    def caption(self) -> str:
        return sentence(self.place, self.colour, self.shape, self.side, self.action)

    def property_of(self, kind: str) -> str:
        """What a hop of that type asks about."""
        return {"attribute": self.colour, "spatial": self.side, "action": self.action}[kind]


def read_timeline(timeline: Sequence[Mapping[str, Any]]) -> list[Seen]:
    """The captions that can be read."""
    found = [(entry["segment"], _CAPTION.fullmatch(entry["text"])) for entry in timeline]
    return [Seen(segment, *match.groups()) for segment, match in found if match]


def reference(seen: Seen, timeline: Sequence[Seen]) -> str:
    """The shortest noun phrase that fits this segment alone."""
    if sum(other.place == seen.place for other in timeline) == 1:
        return f"the {seen.place}"
    return f"the {seen.place} with the {seen.shape}"


def fitting(text: str, timeline: Sequence[Seen]) -> list[Seen]:
    """Segments that a reference fits."""
    if text == ANYWHERE:
        return list(timeline)
    match = _REFERENCE.fullmatch(text)
    if match is None:
        return []
    wanted = (match["extra"] or "").split()
    return [seen for seen in timeline if seen.place == match["place"] and all(word in (seen.colour, seen.shape) for word in wanted)]


def fact(kind: str, word: str) -> str:
    """The clause that asks for a property."""
    return {"attribute": f"{SUBJECT} is {word}", "spatial": f"{SUBJECT} is {where(word)} of the frame", "action": f"{SUBJECT} {word}"}[kind]


def asked(text: str) -> tuple[str, str] | None:
    """Type and word of a clause; None for one that is not of this world."""
    words = set(text.split())
    for kind, known in WORDS.items():
        for word in known:
            if word in words and fact(kind, word) == text:
                return kind, word
    return None


WORDS = {"attribute": tuple(COLOURS), "spatial": tuple(SIDES), "action": ACTIONS}
