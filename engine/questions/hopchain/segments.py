"""Scenes to shots of 2 to 10 seconds."""

from collections.abc import Sequence
from itertools import pairwise
from math import floor

Span = tuple[float, float]


def segment_shots(
    scenes: Sequence[Span],
    duration: float | None = None,
    min_seconds: float = 2.0,
    max_seconds: float = 10.0,
    *,
    strict_max: bool = False,
) -> list[Span]:
    """Cut long scenes into equal parts, then merge short segments with what follows.

    A scene of L > max_seconds becomes floor(L / max_seconds) + 1 parts, bounds rounded to hundredths. A segment below min_seconds
    joins the next ones until it is long enough; a short last one joins its predecessor. So a merged segment may be longer than
    max_seconds, by less than twice min_seconds; ``strict_max`` cuts such a one again.

    Args:
        scenes: (start, end) in seconds, in order.
        duration: of the whole video, which is the one scene where no cut was found.

    Raises:
        ValueError: neither a scene nor a duration above 0.
    """
    if not scenes:
        if duration is None or duration <= 0:
            raise ValueError("segment_shots: no scenes, expected the video's duration in seconds (above 0)")
        scenes = [(0.0, duration)]
    parts = [part for scene in scenes for part in _split(scene, max_seconds)]
    merged = _merge(parts, min_seconds)
    return [part for segment in merged for part in _split(segment, max_seconds)] if strict_max else merged


def _split(scene: Span, longest: float) -> list[Span]:
    start, end = scene
    length = end - start
    count = floor(length / longest) + 1 if length > longest else 1
    bounds = [round(start + length * i / count, 2) for i in range(count + 1)]
    return list(pairwise(bounds))


def _merge(parts: Sequence[Span], shortest: float) -> list[Span]:
    merged: list[Span] = []
    open_start: float | None = None  # start of a segment that is still too short
    for start, end in parts:
        start = start if open_start is None else open_start
        if round(end - start, 6) >= shortest:
            merged.append((start, end))
            open_start = None
        else:
            open_start = start
    if open_start is not None:
        end = parts[-1][1]
        if merged:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((open_start, end))
    return merged
