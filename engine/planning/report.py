"""A plan as tables for a terminal and as JSON."""

from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from headrace.planning.memory import Memory
from headrace.planning.plan import Candidate, Plan

_TRACKS = ("learner_spans", "engine_track")
_GB = 1e9
_FIGURES = ("s / batch", "s / version", "learner idle", "engines idle", "rows / server", "tokens/s", "push s")


def to_json(plan: Plan) -> dict[str, Any]:
    """Everything but the tracks that only the picture needs."""
    return {
        "model": asdict(plan.shape),
        "device": None if plan.device is None else asdict(plan.device),
        "workload": plan.workload.model_dump(),
        "schedule": {"questions_per_version": plan.questions_per_version, "slots": plan.slots, "max_lag": plan.max_lag},
        "candidates": [_candidate_json(item) for item in plan.candidates],
        "best": None if plan.best is None else _candidate_json(plan.best),
        "configured": None if plan.configured is None else _candidate_json(plan.configured),
        "scaled": [
            {"gpus": item.gpus, "questions_per_step": item.questions_per_step, **_candidate_json(item.candidate)} for item in plan.scaled
        ],
    }


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    simulation = candidate.simulation
    return {
        "learner_gpus": candidate.split.ranks,
        "rollout_gpus": candidate.split.rollout_gpus,
        "servers": candidate.split.servers,
        "rows": candidate.rows,
        "cache_tokens": candidate.cache_tokens,
        "rates": candidate.rates.model_dump(),
        "learner_memory": None if candidate.learner is None else {**asdict(candidate.learner), "fits": candidate.learner.fits},
        "server_memory": None if candidate.server is None else {**asdict(candidate.server), "fits": candidate.server.fits},
        "simulation": None if simulation is None else {key: value for key, value in asdict(simulation).items() if key not in _TRACKS},
    }


def tables(plan: Plan, *, assumed: bool) -> RenderableType:
    """Everything on one page.

    Args:
        assumed: nobody stated the workload; the page says so.
    """
    shown: list[RenderableType] = [_heading(plan, assumed)]
    chosen = plan.configured or plan.best or plan.candidates[0]
    if chosen.learner is not None:
        shown.append(_memory_table(chosen))
    shown.append(_split_table(plan))
    if plan.scaled:
        shown.append(_scaling_table(plan))
    shown.append(_verdict(plan))
    return Group(*shown)


def _heading(plan: Plan, assumed: bool) -> str:
    workload, schedule = plan.workload, plan.config.schedule
    device = "rates as given" if plan.device is None else f"{plan.device.name}, by roofline unless rates are given"
    origin = "[bold]assumed[/bold], state your own with --workload" if assumed else "as stated"
    return (
        f"{plan.shape.name}: {plan.shape.parameters / _GB:.2f} G parameters; {device}\n"
        f"workload ({origin}): prompt {workload.prompt_tokens:,.0f} tokens, response {workload.response_tokens:,.0f}"
        f" (second wave x {workload.second_wave:g}, {workload.at_limit:.1%} at the limit)\n"
        f"schedule: {plan.config.run.questions_per_step} groups a batch, {plan.questions_per_version} a version, {plan.slots} slots "
        f"(staleness {schedule.staleness:g}); a trained token lags at most {plan.max_lag} versions\n"
    )


def _memory_table(candidate: Candidate) -> Table:
    table = Table(title=f"Memory of one GPU at {_name(candidate)} GPUs", title_justify="left")
    for column in ("learner", "GB", "server", "GB"):
        table.add_column(column, justify="right" if column == "GB" else "left")
    sides = [_memory_rows(candidate.learner), _memory_rows(candidate.server)]
    for row in range(max(map(len, sides))):
        table.add_row(*[cell for side in sides for cell in (side[row] if row < len(side) else ("", ""))])
    return table


def _memory_rows(memory: Memory | None) -> list[tuple[str, str]]:
    if memory is None:
        return []
    rows = [(name, f"{size / _GB:.1f}") for name, size in memory.parts.items()]
    verdict = "" if memory.fits else " [red]does not fit[/red]"
    return [*rows, (f"[bold]of {memory.available / _GB:.0f} GB[/bold]{verdict}", f"[bold]{memory.needed / _GB:.1f}[/bold]")]


def _split_table(plan: Plan) -> Table:
    table = Table(title="Splits of the GPUs", title_justify="left")
    for column in ("learner + rollout", *_FIGURES, ""):
        table.add_column(column, justify="right" if column in _FIGURES else "left")
    for item in plan.candidates:
        marks = [mark for mark, chosen in (("fastest", plan.best), ("configured", plan.configured)) if item is chosen]
        table.add_row(_name(item), *_figures(item), ", ".join(marks))
    return table


def _scaling_table(plan: Plan) -> Table:
    table = Table(title="Weak scaling: groups per batch and both sides in proportion", title_justify="left")
    for column in ("GPUs", "groups", "learner + rollout", *_FIGURES):
        table.add_column(column, justify="left" if "+" in column else "right")
    for item in plan.scaled:
        table.add_row(f"{item.gpus:,}", f"{item.questions_per_step:,}", _name(item.candidate), *_figures(item.candidate))
    return table


def _name(candidate: Candidate) -> str:
    split = candidate.split
    return f"{split.ranks:,} shared" if split.shared else f"{split.ranks:,} + {split.rollout_gpus:,}"


def _figures(candidate: Candidate) -> list[str]:
    simulation = candidate.simulation
    if simulation is None:
        return ["does not fit", *[""] * 6]
    return [
        f"{simulation.batch_seconds:,.4g}",
        f"{simulation.version_seconds:,.4g}",
        f"{simulation.learner_idle:.0%}",
        f"{simulation.engine_idle:.0%}",
        f"{simulation.engine_rows:.0f} of {candidate.rows}",
        f"{simulation.tokens_per_second:,.0f}",
        f"{candidate.rates.sync:.2f}",
    ]


def _verdict(plan: Plan) -> str:
    if plan.best is None:
        return "[red]No split fits.[/red] Shard over more ranks, recompute activations, shorten micro-batches, or raise tensor_parallel."
    assert plan.best.simulation is not None
    text = f"Fastest: {_name(plan.best)} GPUs, {plan.best.simulation.batch_seconds:,.4g} s per batch."
    if plan.configured is not None and plan.configured is not plan.best and plan.configured.simulation is not None:
        text += f" As configured it takes {plan.configured.simulation.batch_seconds / plan.best.simulation.batch_seconds:.2f} x that."
    return text + " Tokens/s are response tokens that train."
