"""Held-out results: before and after, by hop count, with intervals bootstrapped over questions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.journal.intervals import bootstrap_mean, mean_interval
from headrace.journal.panels import EVALUATED
from headrace.journal.run_data import RunData
from headrace.journal.store import Row
from headrace.journal.tables import NOTHING, Cell, Line, Sheet, between, number

ALL = "all"


@dataclass(frozen=True)
class Score:
    """One rate on one set of questions; ``values`` are per question and may be missing."""

    value: float
    values: dict[str, float]

    def cell(self) -> Cell:
        detail = between(mean_interval(list(self.values.values()))) if self.values else ""
        return Cell(number(self.value), detail)


def change(before: Score, after: Score) -> Cell:
    """Their difference, paired by question where both name the same ones."""
    gap = after.value - before.value
    shared = [name for name in before.values if name in after.values]
    if not math.isfinite(gap):
        return Cell(NOTHING)
    if not shared or len(shared) < max(len(before.values), len(after.values)):
        return Cell(number(gap, "+.3f"))
    gaps = [after.values[name] - before.values[name] for name in shared]
    return Cell(number(gap, "+.3f"), between(bootstrap_mean(gaps), "+.2f") if len(set(gaps)) > 1 else "")


def hops_of(row: Row) -> list[str]:
    """Hop counts that an evaluation tells apart, in order."""
    named = {str(item["hops"]) for item in row.get("per_question", []) if item.get("hops") is not None}
    return sorted(named | set(row.get("by_hops") or {}), key=lambda hops: (len(hops), hops))


def score(row: Row | None, key: str, hops: str = ALL) -> Score:
    """A rate of an evaluation, over all questions or those of one hop count."""
    if row is None:
        return Score(math.nan, {})
    read = {name: per_question for name, _, per_question in EVALUATED}.get(key)
    items = [item for item in row.get("per_question", []) if hops == ALL or str(item.get("hops")) == hops]
    values = {str(item["id"]): value for item in items if read for value in read({"per_question": [item]})}
    if hops == ALL and isinstance(row.get(key), int | float):
        return Score(float(row[key]), values)
    if values:
        return Score(float(np.mean(list(values.values()))), values)
    summary = (row.get("by_hops") or {}).get(hops)
    told = summary.get(key) if isinstance(summary, dict) else summary if key == "mean_accuracy" else None
    return Score(float(told) if isinstance(told, int | float) else math.nan, {})


def ends(run: RunData) -> tuple[Row | None, Row | None]:
    """The first and the last evaluation of a run; the last is None while there is only one."""
    rows = run.evaluations
    return (rows[0] if rows else None, rows[-1] if len(rows) > 1 else None)


def evaluations(runs: Sequence[RunData]) -> Sheet:
    """Held-out results of every run."""
    pairs = [ends(run) for run in runs]
    newest = [after or before for before, after in pairs]
    hops = list(dict.fromkeys(hop for row in newest if row is not None for hop in hops_of(row)))
    lines = []
    for key, _, _ in EVALUATED:
        samples = max((len(item.get("samples", [])) for row in newest if row for item in row.get("per_question", [])), default=0)
        title = {"mean_accuracy": "Sampled responses, mean accuracy", "greedy_accuracy": "Greedy response"}.get(key)
        lines.append(Line(title or f"Majority vote of {samples or 'the'} samples"))
        for subset in [ALL, *hops]:
            name = "all questions" if subset == ALL else f"{subset} hop{'s' if subset != '1' else ''}"
            lines.append(Line(name, _cells([(score(before, key, subset), score(after, key, subset)) for before, after in pairs])))
    lines.append(Line("Form"))
    for key, label, form in (("format_rate", "responses in the required format", ".3f"), ("length_mean", "response length, tokens", ".1f")):
        cells = []
        for before, after in pairs:
            values = [score(row, key).value for row in (before, after)]
            cells += [Cell(number(value, form)) for value in values]
        if len(pairs) <= 2:
            first, last = (pairs[0][0], pairs[0][1]) if len(pairs) == 1 else (pairs[0][1], pairs[1][1])
            cells.append(Cell(number(score(last, key).value - score(first, key).value, "+" + form)))
        lines.append(Line(label, cells))
    questions = " or ".join(dict.fromkeys(str(row["questions"]) for row in newest if row is not None and row.get("questions")))
    note = f"On {questions or 'the'} held-out questions; small type is a 95 % interval over questions, paired where two are compared."
    return Sheet("Before and after training", _heads(pairs, runs), lines, note, [(run.name, 2) for run in runs] if len(runs) > 1 else [])


def _heads(pairs: Sequence[tuple[Row | None, Row | None]], runs: Sequence[RunData]) -> list[str]:
    if len(runs) == 1:
        steps = [f" (step\u00a0{row['step']})" if row is not None else "" for row in pairs[0]]
        return [f"before{steps[0]}", f"after{steps[1]}", "change"]
    return ["before", "after"] * len(runs) + ([f"{runs[1].name} minus {runs[0].name}, after"] if len(runs) == 2 else [])


def _cells(scores: Sequence[tuple[Score, Score]]) -> list[Cell]:
    """Before and after of every run; the change of a single run, the gap between two."""
    cells = [each.cell() for pair in scores for each in pair]
    if len(scores) <= 2:
        cells.append(change(*scores[0]) if len(scores) == 1 else change(scores[0][1], scores[1][1]))
    return cells
