"""Checks by code of what the writer wrote: each failure drops the candidate at once."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.questions.hopchain.records import Candidate, Dropped, Hop, Specification
from headrace.questions.hopchain.specification import totals_distinct

_MAPPING = re.compile(r"\s*if\s+(?P<fact>.+?),?\s+then\s+(?P<yes>-?\d+)\s*[;,]?\s+(?:else|otherwise)\s+(?P<no>-?\d+)\s*\.?\s*", re.I | re.S)


def check(rows: Any, specification: Specification, prose: str = "") -> Candidate:
    """A candidate from the writer's hop rows.

    Raises:
        Dropped: with the reason: ``no_hops``, ``hop_count``, ``hop_type``, ``mapping``, ``value``, ``not_an_option``, ``collision``,
            ``numbers``, ``scenes``, ``one_sided``.
    """
    if not isinstance(rows, list):
        raise Dropped("no_hops", "the record has no list of hops")
    rows = [row for row in rows if not (isinstance(row, dict) and str(row.get("type", "")).lower() == "arithmetic")]
    if not rows:
        raise Dropped("no_hops")
    if len(rows) != specification.hops:
        raise Dropped("hop_count", f"{len(rows)} hops, the specification has {specification.hops}")
    hops = tuple(_hop(row, specification, number) for number, row in enumerate(rows))
    pairs = [(hop.yes, hop.no) for hop in hops]
    if not totals_distinct(pairs):
        raise Dropped("collision", f"numbers {pairs} have equal totals")
    for number, (pair, wanted) in enumerate(zip(pairs, specification.numbers, strict=True)):
        if pair != wanted:
            raise Dropped("numbers", f"hop {number + 1} yields {pair}, the specification has {wanted}")
    if one_sided(hops):
        raise Dropped("one_sided", "every value is the larger of its pair, or every one the smaller")
    return Candidate(specification=specification, hops=hops, prose=prose)


def one_sided(hops: Sequence[Hop]) -> bool:
    """All values are the larger of their pair, or all the smaller: always guessing so would be right."""
    return any(all(hop.value == end(hop.yes, hop.no) for hop in hops) for end in (max, min))


def mapping(text: Any) -> tuple[str, int, int]:
    """Fact and both numbers of ``if <fact> then A else B``.

    Raises:
        Dropped: it is not of that form.
    """
    match = _MAPPING.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise Dropped("mapping", f"expected `if <fact> then A else B`, got {text!r:.120}")
    return " ".join(match["fact"].split()), int(match["yes"]), int(match["no"])


def _hop(row: Any, specification: Specification, number: int) -> Hop:
    if not isinstance(row, Mapping):
        raise Dropped("mapping", f"hop {number + 1} is no object")
    kind, wanted = str(row.get("type", "")).lower(), specification.types[number]
    if kind != wanted:
        raise Dropped("hop_type", f"hop {number + 1} is {kind!r:.40}, the specification has {wanted!r}")
    fact, yes, no = mapping(row.get("mapping"))
    value = _integer(row.get("value"), number)
    if value not in (yes, no):
        raise Dropped("not_an_option", f"hop {number + 1} takes {value}, which is neither {yes} nor {no}")
    scenes, segments = _moments(row, number, (2 if wanted == "order" else 1) * (1 if specification.router_of(number) is None else 2))
    return Hop(
        type=wanted,
        scenes=scenes,
        segments=segments,
        fact=fact,
        yes=yes,
        no=no,
        value=value,
        quote=_text(row.get("quote")),
        description=_text(row.get("description")),
    )


def _integer(value: Any, number: int) -> int:
    if isinstance(value, str) and re.fullmatch(r"\s*-?\d{1,9}\s*", value):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise Dropped("value", f"hop {number + 1}: expected an integer, got {value!r:.80}")
    return value


def _moments(row: Mapping[str, Any], number: int, count: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Scene references and the shots they stand for, ``count`` of each."""
    scenes = row.get("scenes")
    scenes = [scenes] if isinstance(scenes, str) else scenes
    if not isinstance(scenes, list) or len(scenes) != count or not all(isinstance(scene, str) and scene.strip() for scene in scenes):
        raise Dropped("scenes", f"hop {number + 1}: expected {count} scene references, got {scenes!r:.120}")
    segments = row.get("segments")
    segments = [segments] if isinstance(segments, int) else segments
    if not isinstance(segments, list) or len(segments) != count or not all(isinstance(s, int) and s >= 0 for s in segments):
        raise Dropped("scenes", f"hop {number + 1}: expected {count} segment numbers, got {segments!r:.120}")
    return tuple(" ".join(scene.split()) for scene in scenes), tuple(segments)


def _text(value: Any) -> str:
    return " ".join(value.split()) if isinstance(value, str) else ""
