"""Line charts as inline SVG whose colours are the page's CSS variables, so that they follow its theme."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import matplotlib
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from headrace.journal.intervals import wilson
from headrace.journal.run_data import RunData
from headrace.records import Array

COLOURS = 8
"""Series colours that the page defines as ``--series-1`` to ``--series-8``; more series start over."""
POINTS = 240
"""Points a line may have; longer runs are averaged over equal stretches of steps."""
DASHES = ("solid", (0, (5, 2)), (0, (1.5, 1.5)))
_PLACEHOLDERS = {f"#c0de{number:02x}": f"var(--series-{number})" for number in range(1, COLOURS + 1)}
_INK, _FAINT, _GRID = "#c0dea1", "#c0dea2", "#c0dea3"
_PLACEHOLDERS |= {_INK: "var(--ink)", _FAINT: "var(--muted)", _GRID: "var(--grid)"}

Scale = Literal["share", "zero", "free"]


@dataclass(frozen=True)
class Series:
    """One line: ``x`` steps and ``y`` values per step, and their smoothed course. With a band the single steps are not drawn."""

    label: str
    x: Array
    y: Array
    smooth: Array
    low: Array | None = None
    high: Array | None = None
    colour: int = 1
    dash: int = 0
    marker: bool = False
    """Draw every point with an error bar: few measurements rather than a curve."""


def window_of(steps: int) -> int:
    """Steps in the moving window, odd; 1 leaves short runs as they are."""
    return 1 if steps < 12 else max(3, steps // 12) | 1


def moving(values: Array, window: int) -> Array:
    """Centred moving sum that shrinks at the ends; NaN counts as nothing."""
    sums = np.concatenate([[0.0], np.cumsum(np.nan_to_num(values))])
    half = window // 2
    where = np.arange(len(values))
    return sums[np.minimum(where + half + 1, len(values))] - sums[np.maximum(where - half, 0)]


def mean_series(run: RunData, metric: str, label: str, colour: int = 1, dash: int = 0) -> Series:
    """A metric per step and its moving mean."""
    values = run.column(metric)
    window = window_of(len(values))
    known = moving(np.isfinite(values).astype(np.float64), window)
    with np.errstate(invalid="ignore", divide="ignore"):
        smooth = np.where(known > 0, moving(values, window) / known, np.nan)
    return Series(label, run.steps, values, smooth, colour=colour, dash=dash)


def rate_series(run: RunData, metric: str, denominator: str, label: str, colour: int = 1, dash: int = 0) -> Series:
    """A share per step, its value pooled over the moving window, and that pool's 95 % interval."""
    window = window_of(len(run.steps))
    counts, totals = moving(run.column(f"{metric}_n"), window), moving(run.column(denominator), window)
    with np.errstate(invalid="ignore", divide="ignore"):
        smooth = np.where(totals > 0, counts / totals, np.nan)
    bounds = np.array([wilson(count, total) if total > 0 else (np.nan, np.nan) for count, total in zip(counts, totals, strict=True)])
    low, high = bounds.reshape(-1, 2).T
    return Series(label, run.steps, run.column(metric), smooth, low, high, colour, dash)


def _thinned(series: Series) -> Series:
    """The series with at most ``POINTS`` points, each the mean of a stretch of steps."""
    if len(series.x) <= POINTS:
        return series
    edges = np.linspace(0, len(series.x), POINTS + 1).astype(int)

    def fold(values: Array) -> Array:
        known = np.isfinite(values)
        sums = np.add.reduceat(np.where(known, values, 0.0), edges[:-1])
        counts = np.add.reduceat(known.astype(np.float64), edges[:-1])
        return np.divide(sums, counts, out=np.full(POINTS, np.nan), where=counts > 0)

    low = None if series.low is None else fold(series.low)
    high = None if series.high is None else fold(series.high)
    return Series(series.label, fold(series.x), fold(series.y), fold(series.smooth), low, high, series.colour, series.dash, series.marker)


def line_chart(series: Sequence[Series], name: str, unit: str, scale: Scale = "free", x_label: str = "training step") -> str:
    """An SVG element. ``scale``: ``share`` starts at 0 and ends at or below 1, ``zero`` starts at 0, ``free`` fits the data."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9.5, "axes.linewidth": 0.8}):
        figure = Figure(figsize=(4.3, 2.6), layout="constrained")
        axes = figure.add_subplot()
        for item in map(_thinned, series):
            _draw(axes, item)
        _dress(axes, unit, scale, x_label)
        target = io.StringIO()
        FigureCanvasSVG(figure).print_svg(target, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _themed(target.getvalue(), name)


@dataclass(frozen=True)
class Track:
    """Points in the plane in their order, each with an interval on both axes, and what stands beside it."""

    label: str
    x: Array
    y: Array
    x_bounds: Array  # [P, 2]
    y_bounds: Array  # [P, 2]
    marks: Sequence[str]
    colour: int = 1
    dash: int = 0


def phase_chart(tracks: Sequence[Track], name: str, unit: str, x_label: str) -> str:
    """An SVG element: where every track goes."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9.5, "axes.linewidth": 0.8}):
        figure = Figure(figsize=(4.3, 3.4), layout="constrained")
        axes = figure.add_subplot()
        for item in tracks:
            colour = f"#c0de{(item.colour - 1) % COLOURS + 1:02x}"
            spread = [np.abs(bounds.T - values) for values, bounds in ((item.y, item.y_bounds), (item.x, item.x_bounds))]
            axes.errorbar(item.x, item.y, yerr=spread[0], xerr=spread[1], fmt="none", ecolor=colour, elinewidth=0.8, alpha=0.45)
            axes.plot(item.x, item.y, color=colour, linestyle=DASHES[item.dash % len(DASHES)], linewidth=1.4, marker="o", markersize=4)
            for mark, x, y in zip(item.marks, item.x, item.y, strict=True):
                axes.annotate(mark, (x, y), (4, 4), textcoords="offset points", color=_INK, fontsize=8.5)
        _dress(axes, unit, "free", x_label)
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        axes.margins(0.06)
        target = io.StringIO()
        FigureCanvasSVG(figure).print_svg(target, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _themed(target.getvalue(), name)


def _draw(axes, item: Series) -> None:
    colour = f"#c0de{(item.colour - 1) % COLOURS + 1:02x}"
    style = DASHES[item.dash % len(DASHES)]
    if item.marker:
        assert item.low is not None
        assert item.high is not None
        spread = np.abs(np.stack([item.y - item.low, item.high - item.y]))
        axes.errorbar(
            item.x, item.y, yerr=spread, color=colour, linestyle=style, linewidth=1.4, elinewidth=1, capsize=2.5, marker="o", markersize=4
        )
        return
    if item.low is not None and item.high is not None:
        axes.fill_between(item.x, item.low, item.high, color=colour, alpha=0.13, linewidth=0)
    elif len(item.x) >= 12:
        axes.plot(item.x, item.y, color=colour, linewidth=0.8, alpha=0.28)
    axes.plot(item.x, item.smooth, color=colour, linewidth=1.8, linestyle=style, marker="o" if len(item.x) < 3 else None, markersize=4)


def _dress(axes, unit: str, scale: Scale, x_label: str) -> None:
    axes.set_title(unit, loc="left", fontsize=9.5, color=_FAINT, pad=7)
    axes.set_xlabel(x_label, color=_FAINT, fontsize=9.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.patch.set_visible(False)
    axes.figure.patch.set_visible(False)
    axes.tick_params(axis="y", length=0, labelcolor=_INK)
    axes.tick_params(axis="x", length=3, color=_FAINT, labelcolor=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.margins(x=0.02)
    low, high = axes.get_ylim()
    if scale == "share":
        axes.set_ylim(0, min(1.0, max(high, 0.01)) if high <= 1 else 1.02)
    elif scale == "zero":
        axes.set_ylim(0, high if high > 0 else 1)
    if low < 0 < high and scale == "free":
        axes.axhline(0, color=_FAINT, linewidth=0.8)


def _themed(svg: str, name: str) -> str:
    """Only the element, with the page's colours and fonts, identifiers of its own, and no fixed size."""
    svg = svg[svg.index("<svg") :].strip()
    for placeholder, variable in _PLACEHOLDERS.items():
        svg = svg.replace(placeholder, variable)
    prefix = re.sub(r"\W+", "-", name)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", svg)
    svg = re.sub(r'xlink:href="#([^"]+)"', rf'xlink:href="#{prefix}-\1"', svg)
    svg = re.sub(r"font: (\d+(?:\.\d+)?)px [^;\"]+", r"font-size: \1px", svg)
    svg = re.sub(r" font-family: [^;\"]+;", "", svg)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r'\1 aria-hidden="true" focusable="false"', svg, count=1)
    return svg
