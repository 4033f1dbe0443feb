"""A writer by rule: questions for the small world from captions and specifications, on request with a fault."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from headrace.questions.hopchain.records import LETTERS
from headrace.questions.hopchain.world import language
from headrace.questions.hopchain.world.language import ANYWHERE, Seen

Flaw = Literal[
    "VALUE_WRONG", "NOT_SETTLED", "AMBIGUOUS_ANSWER", "ROUTE_BROKEN", "CIRCULAR", "not_an_option", "mapping", "hop_count", "skip"
]
FLAWS: tuple[Flaw, ...] = get_args(Flaw)
"""The first five are for the judge to find, the next three for the checks; ``skip`` leaves the question out."""
_TRIES = 60
_FAR = 4  # segments that two moments lie apart where the video is long enough


class Impossible(Exception):  # noqa: N818
    """The captions cannot carry the specification."""


def write(request: Mapping[str, Any], rng: np.random.Generator, flaws: Mapping[int, Flaw] | None = None) -> str:
    """The reply to a request of ``served.write_request``.

    Args:
        flaws: fault to build into the question of a specification, by its index.
    """
    seen = language.read_timeline(request["timeline"])
    questions = []
    for specification in request["specifications"]:
        flaw = (flaws or {}).get(specification["index"])
        try:
            hops = _question(specification["hops"], seen, rng)
        except Impossible:
            continue
        if flaw != "skip":
            hops = _spoil(hops, specification["hops"], flaw, seen, rng) if flaw else hops
            sum_ = {"type": "arithmetic", "mapping": "", "expression": " + ".join(LETTERS[: len(hops)])}
            questions.append(
                {"specification": specification["index"], "prose": " ".join(hop["description"] for hop in hops), "hops": [*hops, sum_]}
            )
    return json.dumps({"questions": questions})


def _question(plan: Sequence[Mapping[str, Any]], seen: Sequence[Seen], rng: np.random.Generator) -> list[dict[str, Any]]:
    """Hops that are not one-sided.

    Raises:
        Impossible: none were found.
    """
    for _ in range(_TRIES):
        unused = list(seen)
        hops: list[dict[str, Any]] = []
        for number, hop in enumerate(plan):
            router = hop["routed_by"]
            taken = None if router is None else hops[router - 1]["value"] == plan[router - 1]["yes"]
            hops.append(_hop(hop, taken, seen, unused, rng) | {"router": plan[number]["routes"] is not None})
        sides = {hop["value"] == max(planned["yes"], planned["no"]) for hop, planned in zip(hops, plan, strict=True)}
        if len(sides) == 2:
            return hops
    raise Impossible


def _hop(plan: Mapping[str, Any], taken: bool | None, seen: Sequence[Seen], unused: list[Seen], rng: np.random.Generator) -> dict[str, Any]:
    """One hop; ``taken`` is the answer of its router, None without one."""
    order = plan["type"] == "order"
    if order:
        forward = bool(rng.random() < 0.5)
        moments = _apart(seen, unused, rng, forward)
        if taken is not None:
            moments += _apart(seen, unused, rng, not forward)
        shown = moments[:2] if taken in (None, True) else moments[2:]
        holds, settled = shown[0].segment < shown[1].segment, shown
        clause = "{} is shown before {}".format(*(language.reference(moment, seen) for moment in moments[:2]))
    else:
        moments, word = _described(plan["type"], taken is not None, seen, unused, rng)
        settled = [moments[0] if taken in (None, True) else moments[1]]
        holds = settled[0].property_of(plan["type"]) == word
        clause = language.fact(plan["type"], word)
    return {
        "type": plan["type"],
        "scenes": [language.reference(moment, seen) for moment in moments],
        "segments": [moment.segment for moment in moments],
        "description": f"Is it so that {clause}?",
        "mapping": f"if {clause} then {plan['yes']} else {plan['no']}",
        "value": plan["yes"] if holds else plan["no"],
        "quote": " … ".join(moment.caption for moment in settled),
    }


def _apart(seen: Sequence[Seen], unused: list[Seen], rng: np.random.Generator, forward: bool) -> list[Seen]:
    """Two moments, the earlier one first if ``forward``; far apart where the video is long, unused ones where there are any."""
    gap = _FAR if len(seen) >= 4 * _FAR else 1
    for pool in (unused, list(seen)):
        pairs = [(a, b) for a in pool for b in pool if b.segment - a.segment >= gap]
        if pairs:
            pair = list(pairs[int(rng.integers(len(pairs)))])
            _use(unused, pair)
            return pair if forward else pair[::-1]
    raise Impossible


def _described(kind: str, routed: bool, seen: Sequence[Seen], unused: list[Seen], rng: np.random.Generator) -> tuple[list[Seen], str]:
    """Moments and the word asked for: it holds half of the time; of two destinations it holds at exactly one."""
    for pool in (unused, list(seen)):
        if len(pool) < (2 if routed else 1):
            continue
        if not routed:
            moment = pool[int(rng.integers(len(pool)))]
            true = moment.property_of(kind)
            others = [word for word in language.WORDS[kind] if word != true]
            _use(unused, [moment])
            return [moment], true if rng.random() < 0.5 else others[int(rng.integers(len(others)))]
        pairs = [(a, b) for a in pool for b in pool if a.property_of(kind) != b.property_of(kind)]
        if pairs:
            pair = list(pairs[int(rng.integers(len(pairs)))])
            _use(unused, pair)
            return pair, pair[int(rng.integers(2))].property_of(kind)
    raise Impossible


def _use(unused: list[Seen], moments: Sequence[Seen]) -> None:
    for moment in moments:
        if moment in unused:
            unused.remove(moment)


def _spoil(
    hops: list[dict[str, Any]], plan: Sequence[Mapping[str, Any]], flaw: Flaw, seen: Sequence[Seen], rng: np.random.Generator
) -> list[dict[str, Any]]:
    """The same hops with one fault; where a kind has no place in this question, another one."""
    if flaw == "hop_count":
        return hops[:-1]
    routed = [number for number, hop in enumerate(plan) if hop["routed_by"] is not None]
    plain = [number for number, hop in enumerate(plan) if hop["routed_by"] is None and hop["type"] != "order"]
    if (flaw == "ROUTE_BROKEN" and not routed) or (flaw in ("AMBIGUOUS_ANSWER", "CIRCULAR") and not plain):
        flaw = "VALUE_WRONG"
    choices = {"ROUTE_BROKEN": routed, "AMBIGUOUS_ANSWER": plain, "CIRCULAR": plain}.get(flaw, range(len(hops)))
    number = choices[int(rng.integers(len(choices)))]
    hop, planned = dict(hops[number]), plan[number]
    match flaw:
        case "VALUE_WRONG":
            hop["value"] = planned["yes"] + planned["no"] - hop["value"]
        case "NOT_SETTLED":
            hop["scenes"] = ["the palace", *hop["scenes"][1:]]
        case "ROUTE_BROKEN":
            half = len(hop["scenes"]) // 2
            hop["scenes"], hop["segments"] = hop["scenes"][:half] * 2, hop["segments"][:half] * 2
        case "AMBIGUOUS_ANSWER" | "CIRCULAR":
            moment = next(moment for moment in seen if moment.segment == hop["segments"][0])
            asked = language.asked(hop["mapping"].removeprefix("if ").partition(" then ")[0])
            assert asked is not None
            true = moment.property_of(asked[0])
            hop["mapping"] = f"if {language.fact(asked[0], true)} then {planned['yes']} else {planned['no']}"
            circular = f"the {moment.place} with the {true} {moment.shape}"
            hop["value"], hop["scenes"] = planned["yes"], [circular if flaw == "CIRCULAR" else ANYWHERE]
        case "not_an_option":
            hop["value"] = planned["yes"] + planned["no"] + 1
        case "mapping":
            hop["mapping"] = "it depends"
    return [*hops[:number], hop, *hops[number + 1 :]]
