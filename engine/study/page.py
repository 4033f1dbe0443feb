"""What a study found: one page of tables and curves with intervals, and the same numbers as JSON."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.journal import page
from headrace.journal.charts import COLOURS, Series, mean_series
from headrace.journal.intervals import mean_t, rate_difference
from headrace.journal.mask import MaskCounts
from headrace.journal.metrics import DENOMINATORS
from headrace.journal.panels import Chart, chart
from headrace.journal.run_data import RunData, read_run
from headrace.journal.significance import mcnemar
from headrace.journal.store import JournalError, write_text
from headrace.journal.tables import Cell, Line, Sheet, between, control, number, rate_cell, verdict
from headrace.study.run import Arm, Measure, Study, paired_seeds

Found = dict[tuple[str, int], RunData]
"""Runs by arm and seed."""


def write(study: Study) -> Path:
    """Write ``study.json`` and ``study.html`` from whatever has been trained; the page."""
    found: Found = {}
    for run in study.runs:
        try:
            found[run.arm.name, run.seed] = read_run(run.folder)
        except JournalError:
            continue  # not begun
    write_text(study.folder / "study.json", json.dumps(to_json(study, found), indent=1, ensure_ascii=False, default=str) + "\n")
    return page.write(_page(study, found), study.folder / "study.html")


def value(run: RunData, measure: Measure) -> float:
    """A measure of one run; rates are pooled over the steps, NaN where there is nothing."""
    kind, _, key = measure.metric.partition("/")
    if kind in ("evaluation", "gain"):
        scores = [float(row[key]) for row in run.evaluations if isinstance(row.get(key), int | float)]
        if not scores or (kind == "gain" and len(scores) < 2):
            return math.nan
        return scores[-1] - (scores[0] if kind == "gain" else 0.0)
    early, later, whole = run.halves
    part = {"early": early, "later": later, "all": whole}[measure.part]
    if measure.metric in DENOMINATORS and run.has(f"{measure.metric}_n"):
        return run.rate(measure.metric, part).value
    return run.mean(measure.metric, part)


def finished(study: Study, found: Found, arm: str) -> dict[int, RunData]:
    """Finished runs of an arm by seed; only whole runs enter tables."""
    done = {(run.arm.name, run.seed) for run in study.runs if run.finished}
    return {seed: found[arm, seed] for seed in study.config.seeds if (arm, seed) in done and (arm, seed) in found}


def to_json(study: Study, found: Found) -> dict[str, Any]:
    """Every measure of every finished run."""
    return {
        "study": study.config.model_dump(mode="json"),
        "measures": {
            _title(measure): {
                arm.name: {str(seed): _plain(value(run, measure)) for seed, run in finished(study, found, arm.name).items()}
                for arm in study.config.variants()
            }
            for measure in study.config.measures
        },
    }


def _plain(number_: float) -> float | None:
    return number_ if math.isfinite(number_) else None


def _title(measure: Measure) -> str:
    title = measure.label or measure.metric
    return title if measure.part == "all" else f"{title}, {measure.part} half"


# ------------------------------------------------------------------------------------------------------------ the page


def _page(study: Study, found: Found) -> page.Page:
    config, arms = study.config, study.config.variants()
    done = sum(run.finished for run in study.runs)
    missing = [run.name for run in study.runs if not run.finished]
    steps = sorted({run.config.run.steps for run in study.runs})
    facts = [
        ("question", config.question),
        ("arms", "; ".join(f"{_label(arm)}: {_overrides(arm)}" for arm in arms)),
        ("baseline", config.baseline),
        ("base", f"{config.base}" + (f", with {_pairs(config.common)}" if config.common else "")),
        ("seeds", ", ".join(map(str, config.seeds))),
        ("steps", " or ".join(map(str, steps))),
    ]
    sections = [page.Section("Result", sheets=[_values(study, found), _differences(study, found)])]
    charts = _curves(study, found)
    if charts:
        lead = "Lines are means over the seeds of a moving average, bands reach from the lowest to the highest seed."
        sections.append(page.Section("Course", lead=lead, charts=charts))
    sections += _controls(study, found) + _reclaims(study, found)
    warnings = []
    if missing:
        warnings.append(f"{len(missing)} of {len(study.runs)} runs are not finished and not in the tables: {', '.join(missing)}")
    tiles = [page.Tile("runs", f"{done} of {len(study.runs)}", f"{len(arms)} arms, {len(config.seeds)} seeds")]
    return page.Page(config.title, "study", tiles, facts, sections, warnings)


def _label(arm: Arm) -> str:
    return arm.label or arm.name


def _overrides(arm: Arm) -> str:
    return _pairs(arm.overrides) or "the base configuration"


def _pairs(overrides: dict[str, Any]) -> str:
    return ", ".join(f"{field} = {json.dumps(value)}" for field, value in overrides.items())


def _values(study: Study, found: Found) -> Sheet:
    arms = study.config.variants()
    lines = []
    for measure in study.config.measures:
        cells = []
        for arm in arms:
            known = [each for run in finished(study, found, arm.name).values() if math.isfinite(each := value(run, measure))]
            cells.append(_mean_cell(known))
        lines.append(Line(_title(measure), cells))
    note = "Means over seeds; small type is a 95 % interval of Student's t over seeds, which needs at least two."
    return Sheet("Every arm", [_label(arm) for arm in arms], lines, note)


def _mean_cell(known: Sequence[float], form: str = ".3f") -> Cell:
    if not known:
        return Cell(number(None))
    interval = mean_t(known)
    return Cell(number(float(np.mean(known)), form), "" if interval is None else between(interval, form))


def _differences(study: Study, found: Found) -> Sheet:
    others = [arm for arm in study.config.variants() if arm.name != study.config.baseline]
    baseline = finished(study, found, study.config.baseline)
    lines = []
    for measure in study.config.measures:
        cells = []
        for arm in others:
            runs = finished(study, found, arm.name)
            seeds = [seed for seed in paired_seeds(study, arm.name) if seed in runs and seed in baseline]
            gaps = [gap for seed in seeds if math.isfinite(gap := value(runs[seed], measure) - value(baseline[seed], measure))]
            cells.append(_mean_cell(gaps, "+.3f"))
        lines.append(Line(_title(measure), cells))
    note = f"Difference from {study.config.baseline}, paired by seed. An interval that holds 0 does not tell the arms apart."
    return Sheet("Against the baseline", [_label(arm) for arm in others], lines, note)


def _curves(study: Study, found: Found) -> list[Chart]:
    charts = []
    for metric in study.config.curves:
        series = []
        for colour, arm in enumerate(study.config.variants(), 1):
            runs = [found[arm.name, seed] for seed in study.config.seeds if (arm.name, seed) in found and found[arm.name, seed].has(metric)]
            if runs:
                series.append(_band(runs, metric, _label(arm), (colour - 1) % COLOURS + 1))
        if series:
            charts.append(chart(metric, "", "free", "", series))
    return charts


def _band(runs: Sequence[RunData], metric: str, label: str, colour: int) -> Series:
    """Mean and range over seeds of the smoothed metric, over the steps that all of them have."""
    each = [mean_series(run, metric, label, colour) for run in runs]
    length = min(len(series.x) for series in each)
    smooth = np.stack([series.smooth[:length] for series in each])
    mean = smooth.mean(axis=0)
    return Series(label, each[0].x[:length], mean, mean, smooth.min(axis=0), smooth.max(axis=0), colour)


# ------------------------------------------------------------------------------------- controls inside the runs


def pooled(runs: Sequence[RunData]) -> RunData:
    """Several runs as one whose steps follow each other, so that counts are pooled."""
    names = sorted({name for run in runs for name in run.columns})
    columns = {name: np.concatenate([run.column(name) for run in runs]) for name in names}
    steps = np.arange(1, sum(len(run.steps) for run in runs) + 1)
    return replace(runs[0], steps=steps, columns=columns, samples=[], evaluations=[], mask_counts=MaskCounts.none())


def _controls(study: Study, found: Found) -> list[page.Section]:
    """The randomised control arm of the second wave, pooled over seeds."""
    sections = []
    for arm in study.config.variants():
        runs = list(finished(study, found, arm.name).values())
        if not runs or not np.nansum(pooled(runs).column("control/groups_n")) or not np.nansum(pooled(runs).column("cge/groups_n")):
            continue
        together = pooled(runs)
        lead = f"Triggered groups of {_label(arm)}, pooled over {len(runs)} seeds and dealt to the arms at random."
        sections.append(page.Section(f"The mask against luck: {_label(arm)}", lead, [verdict(together)], sheets=[control(together)]))
    return sections


def _reclaims(study: Study, found: Found) -> list[page.Section]:
    """What the hint reclaimed beyond a second try, pooled over seeds."""
    sections = []
    for arm in study.config.variants():
        runs = list(finished(study, found, arm.name).values())
        together = pooled(runs) if runs else None
        if together is None or not np.nansum(together.column("paqm/control_n")):
            continue
        hint, plain = together.rate("paqm/paired_reclaimed"), together.rate("paqm/control_reclaimed")
        only_hint, only_control = (float(np.nansum(together.column(f"paqm/only_{name}_n"))) for name in ("hint", "control"))
        p_value = mcnemar(int(only_hint), int(only_control))
        gap = rate_difference(hint.count, hint.total, plain.count, plain.total)
        lines = [
            Line("drawn again under the hint: some right answer", [rate_cell(hint)]),
            Line("drawn again without it: some right answer", [rate_cell(plain)]),
            Line("difference", [Cell(number(hint.value - plain.value, "+.3f"), between(gap, "+.2f"))]),
            Line("reclaimed by the hint alone", [Cell(f"{only_hint:.0f}")]),
            Line("reclaimed by the second try alone", [Cell(f"{only_control:.0f}")]),
        ]
        told = "the hint does more than a second try" if p_value < 0.05 and only_hint > only_control else "not told apart from a second try"
        text = f"Of {hint.total:.0f} impossible questions drawn both ways, McNemar's exact test gives p = {number(p_value)}: {told}."
        lead = f"Impossible questions of {_label(arm)}, pooled over {len(runs)} seeds; each was drawn again with and without its hint."
        note = "The interval of the difference takes both draws as independent, which is wide."
        sheet = Sheet("Reclaimed", ["impossible questions"], lines, note)
        sections.append(page.Section(f"The hint against a second try: {_label(arm)}", lead, [text], sheets=[sheet]))
    return sections
