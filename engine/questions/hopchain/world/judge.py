"""A judge by rule: works every hop out from the captions of the small world and names its fault."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.questions.hopchain.world import language
from headrace.questions.hopchain.world.language import Seen

_Finding = tuple[list[tuple[int, bool]], str | None, bool | None]
"""Fitting segments with the branch each settles, the fault, and the hop's answer where there is one."""


def judge(request: Mapping[str, Any]) -> str:
    """The reply to a request of ``served.judge_request``."""
    seen = language.read_timeline(request["timeline"])
    answers: dict[int, bool | None] = {}
    entries = []
    for hop in request["question"]["hops"]:
        fits, fault, answer = _examine(hop, answers, seen)
        answers[hop["hop"]] = answer
        if fault is None and answer is not None and hop["value"] != (hop["yes"] if answer else hop["no"]):
            fault = "VALUE_WRONG"
        listed = [{"segment": segment, "branch": "yes" if branch else "no"} for segment, branch in fits]
        entries.append({"hop": hop["hop"], "fits": listed, "fault": fault, "why": f"worked out: {answer}"})
    return json.dumps({"hops": entries})


def _examine(hop: Mapping[str, Any], answers: Mapping[int, bool | None], seen: Sequence[Seen]) -> _Finding:
    """A hop's destination, worked out; the destinations compared first."""
    scenes, router = hop["scenes"], hop["routed_by"]
    if router is None:
        return _settle(hop, scenes, seen)
    half = len(scenes) // 2
    both = [_settle(hop, part, seen) for part in (scenes[:half], scenes[half:])]
    if scenes[:half] == scenes[half:]:
        return both[0][0], "ROUTE_BROKEN", both[0][2]
    faults = [fault for _, fault, _ in both if fault]
    if faults:
        return both[0][0], faults[0], None
    if both[0][2] == both[1][2] or answers.get(router) is None:
        return both[0][0], "ROUTE_BROKEN" if both[0][2] == both[1][2] else "NOT_SETTLED", None
    return both[0 if answers[router] else 1]


def _settle(hop: Mapping[str, Any], scenes: Sequence[str], seen: Sequence[Seen]) -> _Finding:
    fits = [language.fitting(scene, seen) for scene in scenes]
    if not all(fits):
        return [], "NOT_SETTLED", None
    if hop["type"] == "order":
        earlier = {first.segment < second.segment for first in fits[0] for second in fits[1] if first != second}
        listed = [(fit[0].segment, fits[0][0].segment < fits[1][0].segment) for fit in fits]
        if len(earlier) != 1:
            return listed, "AMBIGUOUS_ANSWER" if earlier else "NOT_SETTLED", None
        return listed, None, earlier.pop()
    asked = language.asked(hop["fact"])
    if asked is None or asked[0] != hop["type"]:
        return [], "NOT_SETTLED", None
    kind, word = asked
    branches = [(fit.segment, fit.property_of(kind) == word) for fit in fits[0]]
    if word in scenes[0].split():
        return branches, "CIRCULAR", branches[0][1]
    if len({branch for _, branch in branches}) > 1:
        return branches, "AMBIGUOUS_ANSWER", None
    return branches, None, branches[0][1]
