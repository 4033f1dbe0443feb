"""The kernel bench as a picture: above the achieved share of the floor, below peak memory over T."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from headrace.bench.record import Measured, Memory, Record

matplotlib.use("Agg")

OWN = ("#0b6e99", "#7fb8d0", "#bcd9e5")
OTHERS = ("#b5651d", "#c9a227", "#7a7a7a", "#8f5fa8", "#5b8c5a", "#c25b78", "#9c8468", "#444444")


def draw(record: Record, path: Path) -> None:
    """Write a picture; its format follows from the name.

    Raises:
        ValueError: a format matplotlib does not know.
    """
    operations = [operation for operation, _ in record.cases()]
    below = bool(record.memory)
    figure = Figure(figsize=(max(4.6 * len(operations), 6), 7.5 if below else 4.2), layout="constrained")
    axes = figure.subplots(1 + below, len(operations), squeeze=False)
    colours = _colours(record)
    for column, (operation, rows) in enumerate(record.cases()):
        _shares(axes[0, column], operation, rows, colours)
        if below:
            _peaks(axes[1, column], [entry for entry in record.memory if entry.operation == operation], colours)
    axes[0, 0].set_ylabel("share of the floor's speed, %")
    if below:
        axes[1, 0].set_ylabel("peak extra memory, MB")
    named: dict[Any, Any] = {}
    for axis in axes.flat:
        handles, labels = axis.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    figure.legend(
        list(named.values()), list(named), loc="outside lower center", ncols=max(3, min(len(named), 2 * len(operations))), frameon=False
    )
    figure.suptitle(f"headrace kernels on {record.device}, {record.threads} CPU threads")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _colours(record: Record) -> dict[str, str]:
    own = dict.fromkeys(row.name for row in record.measured if row.kind == "ours")
    others = dict.fromkeys(row.name for row in record.measured if row.kind == "peer")
    return dict(zip(own, OWN, strict=False)) | dict(zip(others, OTHERS, strict=False))


def _shares(axis: Axes, operation: str, rows: list[Measured], colours: dict[str, str]) -> None:
    sizes = list(dict.fromkeys(row.size for row in rows))
    names = list(dict.fromkeys(row.name for row in rows if row.kind != "floor"))
    width = 0.84 / max(len(names), 1)
    for number, name in enumerate(names):
        found = {row.size: 100 / row.ratio for row in rows if row.name == name}
        at = [place + (number - (len(names) - 1) / 2) * width for place, size in enumerate(sizes) if size in found]
        axis.bar(at, [found[size] for size in sizes if size in found], width, color=colours.get(name), label=name)
    axis.axhline(100, color="black", linewidth=1)
    goals = {row.goal for row in rows if row.goal}
    for goal in goals:
        axis.axhline(100 / goal, color="black", linewidth=0.8, linestyle=":")
    floor = next(row.name for row in rows if row.kind == "floor")
    axis.set_title(f"{operation}\nfloor: {floor}" + (f", goal {min(goals):.2f} x" if goals else ""), fontsize=10)
    axis.set_xticks(
        range(len(sizes)), [f"T {size.split('x')[0]}\nD {size.split('x')[1]}\nV {size.split('x')[2]}" for size in sizes], fontsize=8
    )
    axis.spines[["top", "right"]].set_visible(False)


def _peaks(axis: Axes, entries: list[Memory], colours: dict[str, str]) -> None:
    for name in dict.fromkeys(entry.name for entry in entries):
        points = sorted((entry.tokens, max(entry.extra_bytes / 1e6, 0.1)) for entry in entries if entry.name == name)
        own = any(entry.name == name and entry.kind == "ours" for entry in entries)
        axis.plot(*zip(*points, strict=True), marker="o", markersize=4, linewidth=2.4 if own else 1.2, color=colours.get(name), label=name)
    if entries:
        tokens = sorted({entry.tokens for entry in entries})
        logits = [4e-6 * count * entries[0].vocabulary for count in tokens]
        axis.plot(tokens, logits, color="black", linestyle=":", linewidth=1, label="one fp32 logits matrix")
        axis.set_xticks(tokens, [f"{count:,}" for count in tokens])
        axis.set_title(f"V = {entries[0].vocabulary:,}", fontsize=9)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    if entries:
        axis.set_xticks(tokens, [f"{count:,}" for count in tokens], minor=False)
    axis.set_xlabel("T, tokens")
    axis.spines[["top", "right"]].set_visible(False)
