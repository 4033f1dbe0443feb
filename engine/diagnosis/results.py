"""From scores of claims to means with intervals: per checkpoint, as changes, and against the text control."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import fsum, nan
from typing import Any, Literal

from headrace.diagnosis.bank import Bank
from headrace.diagnosis.points import Point
from headrace.diagnosis.scoring import Row
from headrace.journal.intervals import Interval, clustered_mean
from headrace.questions.support import Label

Group = Literal["overall", "supported", "unsupported"]
GROUPS: tuple[Group, ...] = ("overall", "supported", "unsupported")
Key = tuple[str, int, int]
"""A claim: question, number of the response, number of the claim."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A claim under one checkpoint."""

    label: Label | None
    efs: float
    """Mean KL(original ‖ degraded) over its tokens, nats."""
    delta: float
    """Corrected persistence, nats; below 0 it retracts when the picture goes."""
    text: float | None
    """The same when words of the question go."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over claims with its 95 % interval, bootstrapped over questions."""

    value: float
    interval: Interval
    claims: int
    questions: int


Values = Mapping[Key, tuple[Label | None, float]]
"""A value per claim, and its label."""


@dataclass(frozen=True)
class Measured:
    """A checkpoint on the bank."""

    point: Point
    claims: Mapping[Key, Seen]
    left_out: Mapping[str, int]
    """Claims without a value, by reason."""
    retokenized: int = 0
    """Responses whose tokens had to be made anew."""

    def values(self, name: Literal["efs", "delta", "text"]) -> Values:
        return {key: (seen.label, getattr(seen, name)) for key, seen in self.claims.items() if getattr(seen, name) is not None}


def measured(point: Point, bank: Bank, rows: Sequence[Row]) -> Measured:
    """Join scores with the labels of the bank."""
    claims: dict[Key, Seen] = {}
    unaligned = unchanged = invalid = 0
    responses = [(entry.question.id, number, response) for entry in bank.entries for number, response in enumerate(entry.responses)]
    for (question, number, response), row in zip(responses, rows, strict=True):
        assert (question, number) == (row["question"], row["response"])
        labels = [claim.label for claim in response.claims or ()]
        unaligned += len(labels) - len(row["claims"])
        for score in row["claims"]:
            if score["delta"] is None:
                unchanged += row["unchanged"]
                invalid += not row["unchanged"]
                continue
            key = (question, number, score["claim"])
            claims[key] = Seen(labels[score["claim"]], score["efs"], score["delta"], score["text"])
    left_out = {
        "nowhere in the response, or in its answer": unaligned,
        "picture not changed": unchanged,
        "nothing to calibrate by": invalid,
    }
    return Measured(point, claims, {reason: count for reason, count in left_out.items() if count}, sum(row["retokenized"] for row in rows))


def estimate(values: Values, group: Group) -> Estimate:
    """The mean over the claims of a group."""
    chosen = [(key[0], value) for key, (label, value) in values.items() if group in ("overall", label)]
    return _estimate([value for _, value in chosen], [question for question, _ in chosen])


def gap(values: Values) -> Estimate:
    """Mean over unsupported claims minus mean over supported ones."""
    chosen = [(key[0], label, value) for key, (label, value) in values.items() if label is not None]
    parts = [[value for _, label, value in chosen if label == name] for name in ("unsupported", "supported")]
    questions = [question for question, _, _ in chosen]
    if not all(parts):
        return Estimate(nan, (nan, nan), len(chosen), len(set(questions)))
    interval = clustered_mean([value for *_, value in chosen], questions, [label == "supported" for _, label, _ in chosen])
    first, second = (fsum(part) / len(part) for part in parts)
    return Estimate(first - second, interval, len(chosen), len(set(questions)))


def change(before: Values, after: Values) -> Values:
    """After minus before, of the claims that have both."""
    return {key: (label, value - before[key][1]) for key, (label, value) in after.items() if key in before}


def beyond(picture: Values, words: Values) -> Values:
    """Difference in differences: what changed on the degraded picture beyond what changed on the degraded question."""
    return change(words, picture)


def _estimate(values: Sequence[float], questions: Sequence[str]) -> Estimate:
    if not values:
        return Estimate(nan, (nan, nan), 0, 0)
    return Estimate(fsum(values) / len(values), clustered_mean(values, questions), len(values), len(set(questions)))


# ------------------------------------------------------------------------------------------------------ all of it


@dataclass(frozen=True)
class Finding:
    """A checkpoint in numbers; per group where it says so."""

    measured: Measured
    efs: Mapping[Group, Estimate]
    delta: Mapping[Group, Estimate]
    text: Mapping[Group, Estimate]
    gap: Estimate
    """Persistence of unsupported claims beyond that of supported ones."""


@dataclass(frozen=True)
class Change:
    """From one checkpoint to another, paired by claim."""

    before: Point
    after: Point
    efs: Mapping[Group, Estimate]
    delta: Mapping[Group, Estimate]
    beyond: Mapping[Group, Estimate]
    """Of persistence, beyond the change under the text control."""


def finding(found: Measured) -> Finding:
    efs, delta, text = (found.values(name) for name in ("efs", "delta", "text"))
    return Finding(found, _by_group(efs), _by_group(delta), _by_group(text), gap(delta))


def compared(before: Measured, after: Measured) -> Change:
    efs, delta, text = (change(before.values(name), after.values(name)) for name in ("efs", "delta", "text"))
    return Change(before.point, after.point, _by_group(efs), _by_group(delta), _by_group(beyond(delta, text)))


def _by_group(values: Values) -> dict[Group, Estimate]:
    return {group: estimate(values, group) for group in GROUPS}


def changes(points: Sequence[Measured]) -> list[Change]:
    """Every checkpoint against the first."""
    return [compared(points[0], other) for other in points[1:]]


def last_of_series(points: Sequence[Measured]) -> list[Measured]:
    """The last checkpoint of every run, in the order of the runs."""
    return list({found.point.series: found for found in points}.values())


def between_series(points: Sequence[Measured]) -> list[Change]:
    """The last checkpoint of every further run against the last of the one before it; nothing where these are all the checkpoints."""
    ends = last_of_series(points)
    return [compared(one, other) for one, other in pairwise(ends)] if len(ends) > 1 and len(points) > 2 else []


def to_json(bank: Bank, found: Sequence[Finding], since: Sequence[Change], between: Sequence[Change], settings: Any) -> dict[str, Any]:
    """Everything as JSON; an interval that is not known is null."""
    return _clean(
        {
            "bank": {
                "path": str(bank.path),
                "questions": len(bank.entries),
                "responses": sum(len(entry.responses) for entry in bank.entries),
                "left_out": bank.left_out,
                "problems": list(bank.problems),
            },
            "settings": asdict(settings),
            "checkpoints": [
                {
                    "name": each.measured.point.name,
                    "series": each.measured.point.series,
                    "step": each.measured.point.step,
                    **{name: _estimates(getattr(each, name)) for name in ("efs", "delta", "text")},
                    "unsupported_minus_supported": asdict(each.gap),
                    "left_out": dict(each.measured.left_out),
                    "retokenized": each.measured.retokenized,
                }
                for each in found
            ],
            "since_the_first": [_change(each) for each in since],
            "between_series": [_change(each) for each in between],
        }
    )


def _change(each: Change) -> dict[str, Any]:
    names = {"efs": "efs", "delta": "delta", "beyond": "difference_in_differences"}
    return {
        "from": each.before.name,
        "to": each.after.name,
        **{title: _estimates(getattr(each, name)) for name, title in names.items()},
    }


def _estimates(parts: Mapping[Group, Estimate]) -> dict[str, Any]:
    return {group: asdict(part) for group, part in parts.items()}


def _clean(value: Any) -> Any:
    """NaN as null."""
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return None if isinstance(value, float) and value != value else value
