"""One self-contained HTML page about one run, or several side by side: no scripts, no network, no other files."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import yaml

from headrace.journal import panels, scores, tables
from headrace.journal.alerts import Alerts
from headrace.journal.charts import COLOURS, window_of
from headrace.journal.examples import examples
from headrace.journal.page import Tile, environment, now, stylesheet
from headrace.journal.run_data import RunData, read_run
from headrace.journal.store import JournalError, make_folder, write_text

CLOUD = 60
"""Tokens in each list of Figure 8."""
PAIRS = 24


def build(run_folders: Sequence[Path], out: Path) -> Path:
    """Write the report of one run, or the comparison of several, to ``out`` and return it.

    Works on a run in progress, after a kill, and without CGE, evaluations or steps.

    Raises:
        JournalError: a folder is not a run folder, a table is damaged, or ``out`` cannot be written.
    """
    if not run_folders:
        raise JournalError("a report needs at least one run folder")
    try:
        runs = _distinct([read_run(Path(folder)) for folder in run_folders])
        page = environment().get_template("report.html").render(_single(runs[0]) if len(runs) == 1 else _comparison(runs))
    except (TypeError, AttributeError, KeyError, IndexError, jinja2.UndefinedError) as error:  # rows are not checked one by one
        names = ", ".join(map(str, run_folders))
        raise JournalError(f"{names}: its tables or config.yaml hold what no run writes ({type(error).__name__}: {error})") from error
    out = Path(out)
    make_folder(out.parent)
    write_text(out, page)
    return out


def _distinct(runs: list[RunData]) -> list[RunData]:
    """Runs of one name are told apart by their folders."""
    repeated = Counter(run.name for run in runs)
    return [replace(run, name=str(run.folder)) if repeated[run.name] > 1 else run for run in runs]


def _shared(runs: Sequence[RunData]) -> dict[str, Any]:
    """What a page shows whether it is about one run or several."""
    sheets = {
        "evaluations": scores.evaluations(runs),
        "signal": tables.signal(runs),
        "positions": tables.positions([run for run in runs if np.nansum(run.column("mask/positions_n"))]),
        "update": tables.update(runs),
        "cost": tables.cost(runs),
    }
    return {
        "css": stylesheet(),
        "sheets": {name: None if sheet.empty else sheet for name, sheet in sheets.items()},
        "charts": {
            "evaluations": panels.draw_evaluations(runs),
            "learning": panels.draw(panels.LEARNING, runs),
            "second_wave": panels.draw(panels.SECOND_WAVE, runs),
            "selection": panels.draw(panels.SELECTION, runs),
            "credit": panels.draw(panels.CREDIT, [run for run in runs if run.has("pacg/intervention_valid") or run.has("vppo/dependency")]),
            "update": panels.draw(panels.UPDATE, runs),
            "cost": panels.draw(panels.COST, runs) + panels.draw(panels.AHEAD, [run for run in runs if run.has("schedule/rollout_idle")]),
        },
        "breakdowns": [(run.name, _breakdown(run), _beside(run)) for run in runs if tables.phases(run)],
        "controls": [
            (run.name, tables.control(run), tables.verdict(run)) for run in runs if run.has("control/groups_n") and _controlled(run)
        ],
        "clouds": [(run.name, _clouds(run)) for run in runs if run.mask_counts.removed],
        "silent": [run.name for run in runs if np.nansum(run.column("mask/responses_n")) and not np.nansum(run.column("mask/positions_n"))],
        "runs": [_described(run) for run in runs],
        "smoothing": _smoothing(runs),
        "written": now(),
        "number": tables.number,
    }


def _smoothing(runs: Sequence[RunData]) -> str:
    """How the curves were averaged."""
    windows = sorted({window_of(len(run.steps)) for run in runs})
    if windows == [1]:
        return "Every point is one step; bands are 95 % intervals."
    spans = " or ".join(map(str, windows))
    return f"Strong lines average a moving window of {spans} steps, bands are its 95 % interval; faint lines are single steps."


def _controlled(run: RunData) -> bool:
    return bool(np.nansum(run.column("control/groups_n")))


def _single(run: RunData) -> dict[str, Any]:
    return {**_shared([run]), "title": run.name, "tiles": _tiles(run), "examples": examples(run), "metrics": _every_metric(run)}


def _comparison(runs: Sequence[RunData]) -> dict[str, Any]:
    return {**_shared(runs), "title": " · ".join(run.name for run in runs), "tiles": [], "examples": [], "metrics": []}


def _status(run: RunData) -> tuple[str, str]:
    """A word for how the run stands, and the class that colours it."""
    total = run.configured("run.steps", 0)
    done = int(run.steps[-1]) if len(run.steps) else 0
    status = str(run.outcome.get("status", ""))
    if status:
        return f"{status} at step {done} of {total}", "good" if status in ("finished", "done", "complete", "completed") else "odd"
    return f"not finished: {done} of {total} steps are on record", "odd"


def _described(run: RunData) -> dict[str, Any]:
    """Header data of one run."""
    alerts = Alerts()
    warnings = []
    for row in range(len(run.steps)):
        values = {name: float(column[row]) for name, column in run.columns.items() if math.isfinite(column[row])}
        warnings += [f"step {run.steps[row]}: {text}" for text in alerts.watch(values)]
    status, kind = _status(run)
    return {
        "name": run.name,
        "status": status,
        "kind": kind,
        "note": str(run.outcome.get("message") or run.outcome.get("note") or ""),
        "facts": _facts(run),
        "warnings": warnings,
        "config": yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True) if run.config else "",
    }


def _facts(run: RunData) -> list[tuple[str, str]]:
    """The configuration in a few lines."""
    get = run.configured
    source, train, cge, loss = get("model.source", {}), get("questions.train", {}), get("sampling.cge"), get("loss", {})
    group = f"{get('sampling.group_size', '?')} rollouts of at most {get('sampling.max_tokens', '?')} tokens"
    facts = [
        ("policy", _sentence(source)),
        ("warm start", _sentence(get("warm_start")) if get("warm_start") else "none"),
        ("questions", _sentence(train)),
        ("group", group),
        ("exploration", _exploration(cge)),
        (
            "loss",
            f"{loss.get('kind', '?')}, clip {loss.get('clip_low', '?')} / {loss.get('clip_high', '?')}, {loss.get('normalisation', '?')}",
        ),
        ("optimiser", f"AdamW, peak rate {get('optimizer.learning_rate', '?')}, {get('optimizer.schedule', '?')}"),
        ("batch", f"{get('run.questions_per_step', '?')} questions, seed {get('run.seed', '?')}"),
        ("machine", ", ".join(str(run.about[key]) for key in ("device", "system") if key in run.about)),
        ("software", ", ".join(f"{key} {run.about[key]}" for key in ("headrace", "torch", "python") if key in run.about)),
    ]
    return [(name, value) for name, value in facts if value]


def _exploration(cge: dict[str, Any] | None) -> str:
    if not cge:
        return "none: every group is drawn freely in one wave"
    share = cge.get("control_share", 0)
    return (
        f"confidence-gated, τ = {cge.get('threshold', '?')}, token filter {cge.get('token_filter', '?')}, "
        f"first wave {cge.get('first_wave_fraction', 0.5):.0%} of the group, control share {share:.0%}"
    )


def _sentence(section: Any) -> str:
    """A section of the configuration as one line."""
    if not isinstance(section, dict):
        return ""
    values = [str(section["kind"]).replace("_", " ")] if "kind" in section else []
    for key, value in section.items():
        if key != "kind" and value is not None:
            values.append(f"{key.replace('_', ' ')} {', '.join(map(str, value)) if isinstance(value, list | tuple) else value}")
    return ", ".join(values)


def _tiles(run: RunData) -> list[Tile]:
    """The outcome at a glance."""
    before, after = scores.ends(run)
    tiles = []
    for key, label, _ in panels.EVALUATED:
        first, last = scores.score(before, key), scores.score(after, key)
        if math.isfinite(last.value):
            gap = scores.change(first, last)
            spread = f" ({gap.detail})" if gap.detail else ""
            tiles.append(Tile(f"held-out {label}", f"{first.value:.2f} → {last.value:.2f}", f"{gap.text}{spread}"))
        elif math.isfinite(first.value):
            tiles.append(Tile(f"held-out {label}", f"{first.value:.2f}", "before training"))
    restored = run.rate("cge/restored")
    if restored.total:
        plain = run.rate("control/restored")
        detail = f"unmasked control {plain.value:.0%} of {plain.total:.0f}" if plain.total else "no control arm"
        tiles.append(Tile("variance restored, masked second waves", f"{restored.value:.0%} of {restored.total:.0f}", detail))
    both, first_wave = run.rate("group/grad_both"), run.rate("group/grad_first_wave")
    if both.total:
        two_waves = run.has("cge/intervened")
        detail = f"first wave alone {first_wave.value:.0%}" if two_waves else f"of {both.total:.0f} groups"
        tiles.append(Tile("groups with a gradient", f"{both.value:.0%}", detail))
    if run.has("time/tokens_per_s"):
        rate = run.mean("time/tokens_per_s", weight="time/step")
        tiles.append(Tile("throughput", f"{rate:,.0f} tokens/s", f"{run.mean('time/step'):.2f} s per step"))
    return tiles


def _beside(run: RunData) -> str:
    """What ran between the steps, in one sentence; the time after the last step is not on record."""
    steps = float(np.nansum(run.column("time/step")))
    parts = [f"{name} {tables.number(seconds, '.3g')} s" for name, seconds in tables.phases(run, beside=True)]
    return f"Besides {steps:,.0f} s of steps, up to the last one: {', '.join(parts)}." if parts else ""


def _breakdown(run: RunData) -> list[dict[str, Any]]:
    """Phases of a step with seconds and share of the bar."""
    parts = tables.phases(run)
    total = sum(seconds for _, seconds in parts)
    return [
        {"name": name, "seconds": seconds, "share": seconds / total, "colour": (place - 1) % COLOURS + 1}
        for place, (name, seconds) in enumerate(parts, 1)
    ]


def _clouds(run: RunData) -> dict[str, Any]:
    """Figure 8: tokens by frequency, sized by the square root of their count; and the commonest exchanges (Table 8)."""
    counts = run.mask_counts
    return {
        "removed": _cloud(counts.removed),
        "drawn": _cloud(counts.drawn),
        "pairs": [(removed, drawn, count) for (removed, drawn), count in counts.pairs.most_common(PAIRS)],
    }


def _cloud(counts: Counter[str]) -> list[dict[str, Any]]:
    total, most = sum(counts.values()), max(counts.values(), default=1)
    return [
        {"text": text, "count": count, "share": count / total, "size": 0.8 + 1.4 * math.sqrt(count / most)}
        for text, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:CLOUD]
    ]


def _every_metric(run: RunData) -> list[tuple[str, list[str]]]:
    """Every logged metric: mean of the early and later half, last value."""
    early, later, _ = run.halves
    rows = []
    for name, column in run.columns.items():
        known = column[np.isfinite(column)]
        if len(known) and name != "time/unix":
            rows.append((name, [tables.number(value, ".4g") for value in (run.mean(name, early), run.mean(name, later), float(known[-1]))]))
    return rows
