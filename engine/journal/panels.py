"""Which curves a report shows: Figures 5 and 7 of paper 000 for these runs, the update, the cost."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.journal.charts import COLOURS, Scale, Series, line_chart, mean_series, rate_series
from headrace.journal.intervals import mean_interval
from headrace.journal.metrics import DENOMINATORS
from headrace.journal.run_data import RunData
from headrace.journal.store import Row


@dataclass(frozen=True)
class Curve:
    """One metric of a panel. Metrics that have counts get an interval."""

    metric: str
    label: str
    colour: int
    dash: int = 0
    unless: str = ""
    """Left out for runs that have this metric."""
    overlaid: bool = True
    """Also drawn where several runs share the panel."""


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    scale: Scale
    note: str
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class Chart:
    """A panel drawn for the page."""

    title: str
    note: str
    svg: str
    legend: list[tuple[str, int, int]]  # label, colour, dash
    summary: str
    """The panel in words, for those who cannot see it."""


LEARNING = (
    Panel(
        "Reward and accuracy",
        "mean over the rollouts of a step",
        "share",
        "Training rollouts, both waves. Reward counts accuracy and format.",
        (
            Curve("reward/accuracy", "accuracy", 1),
            Curve("reward/mean", "reward", 2, 1),
            Curve("reward/format", "format rate", 6, 2, overlaid=False),
        ),
    ),
    Panel(
        "Variance restored",
        "share of triggered groups",
        "share",
        "Groups whose first wave was all right or all wrong and whose second added variance. The control draws it without the mask.",
        (Curve("cge/restored", "masked second wave", 1), Curve("control/restored", "control, unmasked", 6, 1)),
    ),
    Panel(
        "Policy entropy",
        "nats per token",
        "free",
        "Mean over all response tokens of the policy's own rollouts.",
        (Curve("policy/entropy", "entropy", 1),),
    ),
    Panel(
        "Response length",
        "tokens",
        "zero",
        "Mean response, end token included.",
        (
            Curve("len/wave1", "first wave", 1),
            Curve("len/wave2", "second wave", 2, 1),
            Curve("len/wave2_intervened", "masked second wave", 3, 2, overlaid=False),
            Curve("len/mean", "all rollouts", 1, unless="len/wave1"),
        ),
    ),
    Panel(
        "Groups with a gradient",
        "share of groups",
        "share",
        "Groups whose accuracies vary: in the first wave alone, and in both waves together.",
        (Curve("group/grad_both", "both waves", 1), Curve("group/grad_first_wave", "first wave", 2, 1)),
    ),
)
SECOND_WAVE = (
    Panel(
        "Positions above the threshold",
        "share of examined positions",
        "share",
        "Positions inside the reasoning span of masked rollouts whose top probability exceeds τ.",
        (Curve("cge/threshold_share", "above τ", 1),),
    ),
    Panel(
        "Variance the second wave adds",
        "accuracy variance per group",
        "free",
        "Beyond what an unperturbed second wave leaves on average, p(1 − p)(G − 1)/G.",
        (
            Curve("cge/var_gain_intervened", "masked groups", 1),
            Curve("cge/var_gain_left_alone", "groups left alone", 2, 1),
            Curve("control/var_gain_intervened", "control groups", 6, 2),
        ),
    ),
    Panel(
        "Accuracy of each wave",
        "mean accuracy",
        "share",
        "Over all groups.",
        (Curve("cge/wave1_acc", "first wave", 1), Curve("cge/wave2_acc", "second wave", 2, 1)),
    ),
)
SELECTION = (
    Panel(
        "Path entropy",
        "nats per token",
        "zero",
        "Mean surprisal of a response's own tokens, over all rollouts. A sustained fall is the policy collapsing.",
        (Curve("policy/path_entropy", "path entropy", 1),),
    ),
    Panel(
        "Groups without contrast",
        "share of groups",
        "share",
        "Groups whose answers are all right or all wrong, as drawn and after selection.",
        (
            Curve("degen/natural", "as drawn", 1),
            Curve("degen/assembled", "reassembled", 2, 1),
            Curve("degen/pilot", "pilot rollouts", 3),
            Curve("degen/after_paqm", "after query mining", 4, 1),
        ),
    ),
    Panel(
        "Reassembled groups",
        "share",
        "share",
        "Groups whose structured places were all filled; places that repeat a rollout; surprising wrong rollouts, which leave the pool.",
        (
            Curve("hsr/quota_full", "quotas filled", 1),
            Curve("hsr/dup_share", "repeats", 2, 1),
            Curve("hsr/noise_share", "noise", 6, 2),
        ),
    ),
    Panel(
        "Zones of the questions",
        "share of questions",
        "share",
        "By their pilot rollouts: all right is trivial, none right is impossible.",
        (Curve("paqm/trivial", "trivial", 4), Curve("paqm/distillation", "in between", 1), Curve("paqm/impossible", "impossible", 2, 1)),
    ),
    Panel(
        "Impossible questions reclaimed",
        "share with a right answer",
        "share",
        "Drawn again under the hint, and, for those that were also drawn again without it, what a new try alone does.",
        (
            Curve("paqm/reclaimed_of_hinted", "with the hint", 1),
            Curve("paqm/control_reclaimed", "control, without", 6, 1),
        ),
    ),
)
CREDIT = (
    Panel(
        "Gates of claims",
        "mean gate",
        "share",
        "Over the direct visual claims of responses with a positive advantage; over their tokens; and weighted by what the tokens gain.",
        (
            Curve("pacg/span_gate", "claims", 1),
            Curve("pacg/token_multiplier", "tokens", 2, 1),
            Curve("pacg/retention", "retention", 3, 2, overlaid=False),
        ),
    ),
    Panel(
        "Claim tokens with less credit",
        "share of positive claim tokens",
        "share",
        "Tokens whose gate is below 1, and those on the floor.",
        (Curve("pacg/attenuated_share", "below 1", 1), Curve("pacg/floor_share", "on the floor", 2, 1)),
    ),
    Panel(
        "Corrected persistence",
        "nats per token",
        "free",
        "Change of a claim's log-prob with the degraded picture, less that of the rest of the response: below 0 the claim retracts.",
        (Curve("pacg/delta_mean", "mean", 1), Curve("pacg/delta_p90", "90th percentile", 2, 1)),
    ),
    Panel(
        "Sensitivity",
        "nats per token",
        "zero",
        "Divergence of a claim's token distributions with the picture from those with the degraded one.",
        (Curve("pacg/efs", "claims", 1),),
    ),
    Panel(
        "What the gate reaches",
        "share",
        "share",
        "Responses the router answered and whose claims could be judged, among those with a positive advantage; claim tokens among theirs.",
        (
            Curve("pacg/routed_rollouts", "routed", 1),
            Curve("pacg/intervention_valid", "judged", 2, 1),
            Curve("pacg/direct_tokens", "claim tokens", 6, 2),
        ),
    ),
    Panel(
        "Dependency on the picture",
        "nats per token",
        "zero",
        "Of the tokens that VPPO selected and of the others.",
        (Curve("vppo/dependency_selected", "selected", 1), Curve("vppo/dependency_unselected", "others", 6, 1)),
    ),
    Panel(
        "Wait for claims",
        "seconds per step",
        "zero",
        "Time in which the step had nothing to do but wait for the router.",
        (Curve("time/router_wait", "wait", 1),),
    ),
)
UPDATE = (
    Panel(
        "Clipped positions",
        "share of unmasked positions",
        "share",
        "Positions the clip range removes.",
        (Curve("ppo/clip_share", "clipped", 1),),
    ),
    Panel("Gradient norm", "L2 norm before clipping", "zero", "", (Curve("grad_norm", "norm", 1),)),
    Panel("Advantage", "mean magnitude", "zero", "Over all scored rollouts.", (Curve("adv/abs_mean", "|A|", 1),)),
    Panel(
        "Gap between learner and sampler",
        "nats",
        "zero",
        "Difference of the log-probs that learner and sampler give the same tokens; with staleness it holds the policy's drift too.",
        (Curve("gap/mean", "mean", 1), Curve("gap/p99", "99th percentile", 2, 1)),
    ),
)
COST = (
    Panel(
        "Time per step",
        "seconds",
        "zero",
        "Wall-clock gap between steps includes evaluations and checkpoints.",
        (Curve("time/step", "step", 1), Curve("time/wall", "between steps", 6, 1)),
    ),
    Panel("Throughput", "response tokens per second", "zero", "", (Curve("time/tokens_per_s", "tokens/s", 1),)),
)
AHEAD = (
    Panel(
        "Idle sides",
        "share of the time",
        "share",
        "The learner waits for a batch; nothing is being drawn because every slot is taken.",
        (Curve("time/idle_ratio", "learner", 1), Curve("schedule/rollout_idle", "sampling", 2, 1)),
    ),
    Panel(
        "Lag of trained tokens",
        "parameter versions",
        "zero",
        "By which the weights that drew a token were older than the learner's.",
        (Curve("staleness/max", "largest", 2, 1), Curve("staleness/mean", "mean", 1)),
    ),
    Panel(
        "Push of weights",
        "seconds",
        "zero",
        "From pause to the last canary, and the time in which the servers stood still.",
        (Curve("sync/seconds", "push", 1), Curve("sync/paused", "standstill", 2, 1)),
    ),
)
"""Of runs whose sampling may run ahead."""


def draw(panels: Iterable[Panel], runs: Sequence[RunData]) -> list[Chart]:
    """The panels that at least one run has data for. Several runs overlay: colour tells the run, the dash tells the curve."""
    charts = []
    for panel in panels:
        series = [
            _series(run, curve, label, colour, dash)
            for number, run in enumerate(runs, start=1)
            for position, curve in enumerate(panel.curves)
            if run.has(curve.metric) and not run.has(curve.unless) and (curve.overlaid or len(runs) == 1)
            for label, colour, dash in [_style(run, curve, number, position, len(runs))]
        ]
        if series:
            charts.append(chart(panel.title, panel.unit, panel.scale, panel.note, series))
    return charts


def _style(run: RunData, curve: Curve, number: int, position: int, runs: int) -> tuple[str, int, int]:
    return (curve.label, curve.colour, curve.dash) if runs == 1 else (f"{run.name}: {curve.label}", number, position)


def _series(run: RunData, curve: Curve, label: str, colour: int, dash: int) -> Series:
    if curve.metric in DENOMINATORS and run.has(f"{curve.metric}_n"):
        return rate_series(run, curve.metric, DENOMINATORS[curve.metric], label, colour, dash)
    return mean_series(run, curve.metric, label, colour, dash)


def chart(title: str, unit: str, scale: Scale, note: str, series: list[Series]) -> Chart:
    """A drawn panel with its legend and its content in words."""
    legend = [(item.label, (item.colour - 1) % COLOURS + 1, item.dash) for item in series] if len(series) > 1 else []
    return Chart(title, note, line_chart(series, title, unit, scale), legend, "; ".join(map(_in_words, series)))


def _in_words(item: Series) -> str:
    known = np.flatnonzero(np.isfinite(item.smooth))
    if not len(known):
        return f"{item.label}: no values"
    first, last = known[0], known[-1]
    return f"{item.label}: {item.smooth[first]:.3g} at step {item.x[first]:.0f}, {item.smooth[last]:.3g} at step {item.x[last]:.0f}"


EVALUATED: tuple[tuple[str, str, Callable[[Row], list[float]]], ...] = (
    (
        "mean_accuracy",
        "mean accuracy",
        lambda row: [float(np.mean(item["samples"])) for item in row.get("per_question", []) if item.get("samples")],
    ),
    (
        "greedy_accuracy",
        "greedy",
        lambda row: [float(item["greedy"]) for item in row.get("per_question", []) if item.get("greedy") is not None],
    ),
    (
        "maj_accuracy",
        "majority vote",
        lambda row: [float(item["maj"]) for item in row.get("per_question", []) if item.get("maj") is not None],
    ),
)
"""Key of the evaluation, its name, and its values per question."""


def draw_evaluations(runs: Sequence[RunData]) -> list[Chart]:
    """Held-out accuracy over training, when it was measured more than once."""
    series = []
    for number, run in enumerate(runs, start=1):
        for position, (key, label, per_question) in enumerate(EVALUATED if len(runs) == 1 else EVALUATED[:2]):
            rows = [row for row in run.evaluations if isinstance(row.get(key), int | float)]
            if len(rows) < 2:
                continue
            x, y = np.array([row["step"] for row in rows], dtype=np.float64), np.array([row[key] for row in rows], dtype=np.float64)
            bounds = np.array([mean_interval(values) if (values := per_question(row)) else (row[key], row[key]) for row in rows])
            name, colour, dash = (label, position + 1, position) if len(runs) == 1 else (f"{run.name}: {label}", number, position)
            series.append(Series(name, x, y, y, bounds[:, 0], bounds[:, 1], colour, dash, marker=True))
    if not series:
        return []
    note = "Held-out questions; bars are 95 % intervals over questions."
    return [chart("Held-out accuracy", "share of answers that are right", "share", note, series)]
