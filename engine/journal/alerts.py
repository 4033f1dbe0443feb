"""Warnings about runs that go wrong in a known way."""

from collections import deque
from collections.abc import Mapping

WINDOW = 10
"""Steps in the reference window at the start of a run and in the moving window at its end."""
LENGTH_GROWTH = 1.5
FORMAT_FALL = 0.8
"""Responses half as long again, with a fifth of the format rate lost: the signature of a mask threshold that is too low."""


class Alerts:
    """Watches metrics step by step; feed it in order, also the rows of a resumed run."""

    def __init__(self) -> None:
        self._first: list[tuple[float, float]] = []
        self._last: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._idle_mask = 0
        self._raised: set[str] = set()

    def watch(self, metrics: Mapping[str, float]) -> list[str]:
        """New warnings, one line each; a warning is given once per run and again only after it has cleared."""
        findings = {"format": self._format_lost(metrics), "mask": self._mask_silent(metrics)}
        new = [text for name, text in findings.items() if text and name not in self._raised]
        self._raised = {name for name, text in findings.items() if text}
        return new

    def _format_lost(self, metrics: Mapping[str, float]) -> str:
        if "len/mean" not in metrics or "reward/format" not in metrics:
            return ""
        point = (metrics["len/mean"], metrics["reward/format"])
        if len(self._first) < WINDOW:
            self._first.append(point)
            return ""
        self._last.append(point)
        if len(self._last) < WINDOW:
            return ""
        (length, rate), (length_now, rate_now) = _mean(self._first), _mean(self._last)
        if length_now < LENGTH_GROWTH * length or rate_now > FORMAT_FALL * rate or rate == 0:
            return ""
        return (
            f"responses grow ({length:.0f} -> {length_now:.0f} tokens) while the format rate falls ({rate:.2f} -> {rate_now:.2f}): "
            "the mask threshold (sampling.cge.threshold) may be too low"
        )

    def _mask_silent(self, metrics: Mapping[str, float]) -> str:
        responses = metrics.get("mask/responses_n", 0.0)
        if responses:
            self._idle_mask = 0 if metrics.get("mask/positions_n", 0.0) else self._idle_mask + 1
        if self._idle_mask < WINDOW:
            return ""
        return (
            f"the mask removed no token in {self._idle_mask} steps: no top probability inside the reasoning span exceeds "
            "sampling.cge.threshold, or the span never opens (see sampling.think_prefill)"
        )


def _mean(points: list[tuple[float, float]] | deque[tuple[float, float]]) -> tuple[float, float]:
    lengths, rates = zip(*points, strict=True)
    return sum(lengths) / len(lengths), sum(rates) / len(rates)
