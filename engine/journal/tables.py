"""The report's tables: Tables 7, 9, 10 and 11 of paper 000 for these runs, the control arm."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.journal.intervals import rate_difference, wilson
from headrace.journal.journal import BESIDE_STEPS
from headrace.journal.run_data import Rate, RunData

NOTHING = "–"


@dataclass(frozen=True)
class Cell:
    """A value with what qualifies it: an interval, a count."""

    text: str
    detail: str = ""


@dataclass(frozen=True)
class Line:
    """A row; one without cells heads the rows below it."""

    label: str
    cells: list[Cell] = field(default_factory=list)


@dataclass(frozen=True)
class Sheet:
    """A table. ``heads`` are columns; ``spans`` name groups of columns above them, with their widths."""

    title: str
    heads: list[str]
    lines: list[Line]
    note: str = ""
    spans: list[tuple[str, int]] = field(default_factory=list)

    @property
    def roomy(self) -> bool:
        """Few enough columns for intervals to stand beside their values."""
        return len(self.heads) <= 3

    @property
    def extra(self) -> int:
        """Columns right of the spans."""
        return len(self.heads) - sum(width for _, width in self.spans)

    @property
    def detailed(self) -> bool:
        return any(cell.detail for line in self.lines for cell in line.cells)

    @property
    def empty(self) -> bool:
        return not any(cell.text != NOTHING for line in self.lines for cell in line.cells)


def number(value: float | None, form: str = ".3f") -> str:
    """A value as the page prints it, with a true minus sign; a dash where there is none."""
    return NOTHING if value is None or not math.isfinite(value) else format(value, form).replace("-", "−")


def between(interval: tuple[float, float], form: str = ".2f") -> str:
    """An interval as the page prints it."""
    return f"{number(interval[0], form)}\u00a0to\u00a0{number(interval[1], form)}"


def rate_cell(rate: Rate) -> Cell:
    """A pooled share with its count and its interval."""
    if not rate.total:
        return Cell(NOTHING)
    return Cell(number(rate.value), f"{rate.count:.0f}/{rate.total:.0f}, {between(wilson(rate.count, rate.total))}")


_HALVES = ["early", "later"]
_SIGNAL = (
    ("What the first wave produces, over all groups", None, None),
    ("all rollouts wrong", "cge/all_incorrect", None),
    ("all rollouts right", "cge/all_correct", None),
    ("already some of both", "cge/mixed", None),
    ("What the masked second wave adds, over the groups it intervenes on", None, None),
    ("variance restored", "cge/restored", None),
    ("all right before, some wrong after", "cge/broke_all_correct", None),
    ("all wrong before, some right after", "cge/cracked_all_incorrect", None),
    ("solved by the second wave, never by the first", "cge/solves_new", None),
    ("accuracy of the second wave minus the first", "cge/acc_delta", "cge/groups_n"),
    ("variance added", "cge/var_gain_intervened", "cge/groups_n"),
    ("What the groups contribute to the update", None, None),
    ("groups with a gradient, first wave alone", "group/grad_first_wave", None),
    ("groups with a gradient, both waves", "group/grad_both", None),
    ("solved by the first wave", "group/pass_first_wave", None),
    ("solved by either wave", "group/pass_all", None),
    ("variance added to groups left alone", "cge/var_gain_left_alone", "cge/left_alone_groups_n"),
)


def signal(runs: Sequence[RunData]) -> Sheet:
    """Table 7: early half and later half of every run."""
    lines = []
    for label, metric, weight in _SIGNAL:
        if metric is None:
            lines.append(Line(label))
        elif weight is None:
            lines.append(Line(label, [rate_cell(run.rate(metric, part)) for run in runs for part in run.halves[:2]]))
        else:
            lines.append(Line(label, [Cell(number(run.mean(metric, part, weight), "+.3f")) for run in runs for part in run.halves[:2]]))
    note = (
        "Early and later are the first and second half of the steps, pooled over groups; "
        "small type gives counts and 95 % Wilson intervals, which take groups as independent."
    )
    return Sheet("The signal the second wave recovers", _HALVES * len(runs), lines, note, _spans(runs, 2))


def _spans(runs: Sequence[RunData], width: int) -> list[tuple[str, int]]:
    return [(run.name, width) for run in runs] if len(runs) > 1 else []


_ARMS = (
    ("variance restored", "restored"),
    ("all right before, some wrong after", "broke_all_correct"),
    ("all wrong before, some right after", "cracked_all_incorrect"),
    ("solved by the second wave, never by the first", "solves_new"),
)


def control(run: RunData) -> Sheet:
    """The randomised control: the same rates for triggered groups with and without the mask, and their difference."""
    lines = []
    for label, name in _ARMS:
        masked, plain = run.rate(f"cge/{name}"), run.rate(f"control/{name}")
        gap = Cell(NOTHING)
        if masked.total and plain.total:
            interval = rate_difference(masked.count, masked.total, plain.count, plain.total)
            gap = Cell(number(masked.value - plain.value, "+.3f"), between(interval, "+.2f"))
        lines.append(Line(label, [rate_cell(masked), rate_cell(plain), gap]))
    for label, name in (("accuracy of the second wave minus the first", "acc_delta"), ("variance added", "var_gain_intervened")):
        masked_mean, plain_mean = (run.mean(f"{arm}/{name}", weight=f"{arm}/groups_n") for arm in ("cge", "control"))
        cells = [Cell(number(value, "+.3f")) for value in (masked_mean, plain_mean, masked_mean - plain_mean)]
        lines.append(Line(label, cells))
    note = (
        "Triggered groups are dealt to the arms at random. The control says how often more rollouts change a group by luck; "
        "the difference is the mask's own."
    )
    return Sheet("The mask against luck", ["masked", "control, unmasked", "difference"], lines, note)


def verdict(run: RunData) -> str:
    """The control experiment in one sentence; empty without both arms."""
    masked, plain = run.rate("cge/restored"), run.rate("control/restored")
    if not masked.total or not plain.total:
        return ""
    low, high = rate_difference(masked.count, masked.total, plain.count, plain.total)
    gap = masked.value - plain.value
    ending = "this run cannot tell the mask from luck" if low <= 0 <= high else f"the mask's own share is {number(gap, '+.2f')}"
    return (
        f"The masked second wave restored variance in {masked.value:.0%} of {masked.total:.0f} triggered groups, an unmasked one in "
        f"{plain.value:.0%} of {plain.total:.0f}: {ending} (95 % interval {between((low, high), '+.2f')})."
    )


_POSITIONS = (
    ("Where the mask acts", None),
    ("median position of a masked token", "median"),
    ("share within the first 100 tokens", "mask/first_100"),
    ("share beyond token 400", "mask/beyond_400"),
    ("masked positions per response", "mask/per_response"),
    ("How certain the policy is at a masked position", None),
    ("mean top probability", "mask/top_prob"),
    ("share whose top probability exceeds 0.99", "mask/top_prob_over_99"),
    ("share where the runner-up holds more than half of the rest", "mask/runner_up_majority"),
    ("mean entropy before the mask, nats", "mask/entropy"),
    ("mean entropy after the mask, nats", "mask/entropy_after"),
    ("Which token is drawn instead", None),
    ("share where the second most likely token is drawn", "mask/drawn_second"),
    ("share where the second or third is drawn", "mask/drawn_second_or_third"),
    ("share where a token outside the top 8 is drawn", "mask/drawn_outside_8"),
)
_WEIGHTS = {
    "mask/per_response": "mask/responses_n",
    "mask/top_prob": "mask/traced_n",
    "mask/entropy": "mask/traced_n",
    "mask/entropy_after": "mask/entropy_after_n",
}


def positions(runs: Sequence[RunData]) -> Sheet:
    """Table 9: the masked positions of every run."""
    lines = []
    for label, metric in _POSITIONS:
        lines.append(Line(label) if metric is None else Line(label, [_position_cell(run, metric) for run in runs]))
    totals = ", ".join(f"{np.nansum(run.column('mask/positions_n')):,.0f}" for run in runs)
    heads = [run.name for run in runs] if len(runs) > 1 else ["value"]
    return Sheet("The masked positions", heads, lines, f"Over {totals} masked positions of the whole run.")


def _position_cell(run: RunData, metric: str) -> Cell:
    if metric == "median":
        return Cell(number(run.mask_counts.median_position(), ".0f"))
    if metric in _WEIGHTS:
        return Cell(number(run.mean(metric, weight=_WEIGHTS[metric])))
    return Cell(number(run.rate(metric).value))


_UPDATE = (
    ("share of positions the clip range removes", "ppo/clip_share", ".4f"),
    ("mean magnitude of the advantage", "adv/abs_mean", ".3f"),
    ("gradient norm", "grad_norm", ".3f"),
    ("mean training reward", "reward/mean", ".3f"),
)


def update(runs: Sequence[RunData]) -> Sheet:
    """Table 10: what the update sees, early and later."""
    lines = [
        Line(label, [Cell(number(run.mean(metric, part), form)) for run in runs for part in run.halves[:2]])
        for label, metric, form in _UPDATE
    ]
    return Sheet("What the update sees", _HALVES * len(runs), lines, "Means over the steps of each half.", _spans(runs, 2))


_NOT_PHASES = {"step", "wall", "unix", "tokens_per_s", "idle_ratio"}
_BESIDE_STEPS = {name.replace(" ", "_") for name in BESIDE_STEPS}
_INSIDE = {"forward_backward": "update", "optimizer": "update"}
"""Timings that are part of another phase."""


def phases(run: RunData, *, beside: bool = False) -> list[tuple[str, float]]:
    """Mean seconds of a step's phases, longest first; with ``beside``, total seconds of what runs between steps.

    What takes less than a thousandth of all of them is left out: a push that had nowhere to go.
    """
    seconds = {}
    for name in (column.removeprefix("time/") for column in run.columns if column.startswith("time/")):
        if name not in _NOT_PHASES and name not in _INSIDE and not name.endswith("per_s") and (name in _BESIDE_STEPS) is beside:
            values = np.nan_to_num(run.column(f"time/{name}"))
            seconds[name.replace("_", " ")] = float(values.sum() if beside else values.mean())
    least = 1e-3 * sum(seconds.values())
    return sorted(((name, value) for name, value in seconds.items() if value > least), key=lambda item: -item[1])


def cost(runs: Sequence[RunData]) -> Sheet:
    """Table 11: where the time goes; two runs also get their difference."""
    timings = [dict(phases(run)) for run in runs]
    names = list(dict.fromkeys(name for timing in timings for name in timing))
    lines = [
        _cost_line("step time (s)", [run.mean("time/step") for run in runs]),
        _cost_line("wall-clock between steps (s)", [run.mean("time/wall") for run in runs]),
        *(_cost_line(f"{name} (s)", [timing.get(name, math.nan) for timing in timings]) for name in names),
        *(
            _cost_line(f"of {phase}: {name.replace('_', ' ')} (s)", [run.mean(f"time/{name}") for run in runs])
            for name, phase in _INSIDE.items()
        ),
        _cost_line("response tokens per second", [run.mean("time/tokens_per_s", weight="time/step") for run in runs]),
        _cost_line("trainer idle ratio", [run.mean("time/idle_ratio", weight="time/step") for run in runs]),
        _cost_line("response length (tokens)", [run.mean("len/mean") for run in runs]),
        _cost_line("share of responses at the length limit", [run.rate("len/clipped_share").value for run in runs]),
    ]
    heads = [run.name for run in runs] if len(runs) > 1 else ["mean per step"]
    shown = [line for line in lines if any(cell.text != NOTHING for cell in line.cells)]
    return Sheet(
        "The cost of a step",
        heads + (["difference"] if len(runs) == 2 else []),
        shown,
        "Means over all steps; rates by the time of the steps.",
    )


def _cost_line(label: str, values: list[float]) -> Line:
    cells = [Cell(number(value, ",.0f" if abs(value) >= 1000 else ".3g")) for value in values]
    if len(values) == 2:
        known = all(map(math.isfinite, values)) and values[0] != 0
        cells.append(Cell(number(values[1] / values[0] - 1, "+.1%") if known else NOTHING))
    return Line(label, cells)
