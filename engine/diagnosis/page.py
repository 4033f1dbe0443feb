"""What a diagnosis found, as a page, as JSON and in a few lines."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from headrace.diagnosis.bank import Bank
from headrace.diagnosis.results import (
    GROUPS,
    Change,
    Estimate,
    Finding,
    Group,
    Measured,
    between_series,
    changes,
    finding,
    to_json,
)
from headrace.diagnosis.scoring import Settings
from headrace.journal import page
from headrace.journal.charts import COLOURS, Series, Track, phase_chart
from headrace.journal.panels import Chart, chart
from headrace.journal.store import make_folder, write_text
from headrace.journal.tables import NOTHING, Cell, Line, Sheet, between, number

NOTE = "Small type is a 95 % interval: questions are drawn with replacement and all their claims pooled."


def write(bank: Bank, points: Sequence[Measured], settings: Settings, folder: Path) -> tuple[Path, list[str]]:
    """Write ``diagnosis.json`` and ``diagnosis.html``; the page, and the main numbers for a terminal."""
    found, since, across = [finding(each) for each in points], changes(points), between_series(points)
    make_folder(folder)
    content = json.dumps(to_json(bank, found, since, across, settings), indent=1, ensure_ascii=False, allow_nan=False)
    write_text(folder / "diagnosis.json", content + "\n")
    return page.write(_page(bank, found, since, across, settings), folder / "diagnosis.html"), _lines(found)


def _page(bank: Bank, found: Sequence[Finding], since: Sequence[Change], across: Sequence[Change], settings: Settings) -> page.Page:
    last = found[-1]
    tiles = [
        page.Tile(title, number(part.value, "+.4f" if signed else ".4f"), between(part.interval, "+.3f" if signed else ".3f"))
        for title, part, signed in (
            ("EFS, nats", last.efs["overall"], False),
            ("persistence, all claims", last.delta["overall"], True),
            ("of supported claims", last.delta["supported"], True),
            ("of unsupported claims", last.delta["unsupported"], True),
        )
    ]
    responses = [response for entry in bank.entries for response in entry.responses]
    claims = [claim for response in responses for claim in response.claims or ()]
    labelled = ", ".join(f"{sum(claim.label == name for claim in claims):,} {name}" for name in GROUPS[1:])
    facts = [
        ("bank", f"{bank.path}: {len(bank.entries):,} questions, {len(responses):,} responses"),
        ("claims", f"{len(claims):,}, of them {labelled}"),
        ("without a claim", f"{sum(not response.claims for response in responses):,} responses"),
        ("pictures", f"degraded by {settings.intervention}, fixed by the question"),
        ("shown above", last.measured.point.name),
    ]
    sections = [
        page.Section(
            "Sensitivity and persistence",
            "EFS is how far a degraded picture changes what the policy would say in a claim, whichever way. Persistence is how much the "
            "log-prob of the claim as it stands changes beyond that of the rest of the response: below 0 the claim is taken back.",
            _verdicts(since),
            _charts(found),
            _levels(found, settings.text_control),
        )
    ]
    if since:
        sheets = _changed(since, [each.after.name for each in since], settings.text_control)
        sections.append(page.Section(f"Changes since {since[0].before.name}", "Of the same claims, paired.", sheets=sheets))
    if across:
        names = [f"{each.after.name} against {each.before.name}" for each in across]
        sheets = _changed(across, names, settings.text_control)
        sections.append(page.Section("Last checkpoints against each other", "Of the same claims, paired.", sheets=sheets))
    return page.Page(bank.path.stem, "diagnosis", tiles, facts, sections, _warnings(bank, found))


def _warnings(bank: Bank, found: Sequence[Finding]) -> list[str]:
    warnings = [f"{bank.left_out} rows of the bank cannot be used, such as {text}" for text in bank.problems[:1]]
    for each in found:
        if each.measured.left_out:
            counts = ", ".join(f"{count:,} {reason}" for reason, count in each.measured.left_out.items())
            warnings.append(f"{each.measured.point.name}: claims left out: {counts}")
        if each.measured.retokenized:
            warnings.append(f"{each.measured.point.name}: {each.measured.retokenized:,} responses were cut into tokens anew")
    return list(dict.fromkeys(warnings))


def _verdicts(since: Sequence[Change]) -> list[str]:
    """What became of sensitivity and of unsupported claims, for the last checkpoint of every run."""
    return [_verdict(each) for each in {each.after.series: each for each in since}.values()]


def _verdict(each: Change) -> str:
    efs, kept = each.efs["overall"], each.delta["unsupported"]
    told = (
        f"{each.after.name}: EFS changes by {number(efs.value, '+.4f')} ({between(efs.interval, '+.4f')}), persistence of unsupported "
        f"claims by {number(kept.value, '+.4f')} ({between(kept.interval, '+.4f')})"
    )
    if kept.interval[0] > 0:
        return f"{told}: they are held on to more" + (", though the policy looks more." if efs.interval[0] > 0 else ".")
    if kept.interval[1] < 0:
        return f"{told}: they are taken back more readily."
    return f"{told}: not told apart from no change." if kept.claims else f"{told}."


def _cell(part: Estimate, form: str) -> Cell:
    if not part.claims or part.value != part.value:
        return Cell(NOTHING)
    known = part.interval[0] == part.interval[0]
    return Cell(number(part.value, form), between(part.interval, form) if known else "one question")


def _levels(found: Sequence[Finding], text_control: bool) -> list[Sheet]:
    """Every checkpoint by itself."""
    names = [each.measured.point.name for each in found]
    counts = ", ".join(f"{found[-1].delta[group].claims:,} {group}" for group in GROUPS)
    sheets = [
        _sheet("EFS, nats", names, [each.efs for each in found], ".4f", f"{NOTE} Claims of the last: {counts}."),
        _sheet("Corrected persistence δ, nats", names, [each.delta for each in found], "+.4f", NOTE),
    ]
    sheets[1].heads.append("unsupported − supported")
    for line, each in zip(sheets[1].lines, found, strict=True):
        line.cells.append(_cell(each.gap, "+.4f"))
    if text_control:
        note = "The same claims with the whole picture, when words of the question are hidden."
        sheets.append(_sheet("Text control: persistence δ, nats", names, [each.text for each in found], "+.4f", note))
    return sheets


def _changed(each: Sequence[Change], names: Sequence[str], text_control: bool) -> list[Sheet]:
    """Differences of the same claims."""
    sheets = [
        _sheet("Change of EFS, nats", names, [item.efs for item in each], "+.4f", NOTE),
        _sheet("Change of corrected persistence δ, nats", names, [item.delta for item in each], "+.4f", NOTE),
    ]
    if text_control:
        note = "Difference in differences: what δ changed by without the picture, less what it changed by without words of the question."
        sheets.append(_sheet("Change of δ beyond the text control, nats", names, [item.beyond for item in each], "+.4f", note))
    return sheets


def _sheet(title: str, names: Sequence[str], parts: Sequence[Mapping[Group, Estimate]], form: str, note: str) -> Sheet:
    lines = [Line(name, [_cell(part[group], form) for group in GROUPS]) for name, part in zip(names, parts, strict=True)]
    return Sheet(title, list(GROUPS), lines, note)


# ------------------------------------------------------------------------------------------------------ charts


def _charts(found: Sequence[Finding]) -> list[Chart]:
    series: dict[str, list[Finding]] = {}
    for each in found:
        series.setdefault(each.measured.point.series, []).append(each)
    charts = []
    curves = {name: some for name, some in series.items() if len(some) > 1}
    if curves:
        charts.append(_curve(curves, "EFS", "nats", {"overall": "efs"}))
        charts.append(_curve(curves, "Persistence", "nats, corrected", {"supported": "delta", "unsupported": "delta"}))
    phase = _phase(series)
    return [*charts, phase] if phase else charts


def _curve(series: Mapping[str, Sequence[Finding]], title: str, unit: str, shown: Mapping[Group, str]) -> Chart:
    lines = []
    for colour, (name, some) in enumerate(series.items()):
        for dash, (group, measure) in enumerate(shown.items()):
            parts = [getattr(each, measure)[group] for each in some]
            steps = np.array([each.measured.point.step for each in some], dtype=np.float64)
            label = f"{name}, {group}" if len(series) > 1 else group
            lines.append(_line(label, steps, parts, colour if len(series) > 1 else dash, dash))
    return chart(title, unit, "free", "Bars are 95 % intervals over questions; all checkpoints see the same responses.", lines)


def _line(label: str, steps: np.ndarray, parts: Sequence[Estimate], colour: int, dash: int) -> Series:
    y = np.array([part.value for part in parts])
    low, high = _bounds(parts).T
    return Series(label, steps, y, y, low, high, colour % COLOURS + 1, dash, marker=True)


def _bounds(parts: Sequence[Estimate]) -> np.ndarray:
    """[P, 2]; the value itself where there is no interval."""
    return np.array([part.interval if part.interval[0] == part.interval[0] else (part.value, part.value) for part in parts])


def _phase(series: Mapping[str, Sequence[Finding]]) -> Chart | None:
    """Sensitivity against the persistence of unsupported claims."""
    tracks, told = [], []
    for colour, (name, every) in enumerate(series.items()):
        some = [each for each in every if each.delta["unsupported"].claims]
        if not some:
            continue
        across, up = [each.efs["overall"] for each in some], [each.delta["unsupported"] for each in some]
        x, y = (np.array([part.value for part in parts]) for parts in (across, up))
        marks = ["" if each.measured.point.step is None else str(each.measured.point.step) for each in some]
        tracks.append(Track(name, x, y, _bounds(across), _bounds(up), marks, colour % COLOURS + 1, colour // COLOURS))
        told.append(f"{name}: from EFS {x[0]:.3g}, persistence {y[0]:.3g} to EFS {x[-1]:.3g}, persistence {y[-1]:.3g}")
    if not tracks:
        return None
    svg = phase_chart(tracks, "Phase", "persistence of unsupported claims, nats", "EFS of all claims, nats")
    note = "Right: the policy looks more. Up: it holds on more to what the picture does not show. Numbers are training steps."
    legend = [(track.label, track.colour, track.dash) for track in tracks] if len(tracks) > 1 else []
    return Chart("Looking and taking back", note, svg, legend, "; ".join(told))


def _lines(found: Sequence[Finding]) -> list[str]:
    told = []
    for each in found:
        parts = [f"EFS {_told(each.efs['overall'], '.4f')}"]
        parts += [f"δ {group} {_told(each.delta[group], '+.4f')}" for group in GROUPS]
        told.append(f"{each.measured.point.name}: {'  '.join(parts)}")
    return told


def _told(part: Estimate, form: str) -> str:
    low, high = part.interval
    return f"{part.value:{form}} [{low:{form}}, {high:{form}}]" if part.claims else "-"
