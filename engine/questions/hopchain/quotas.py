"""The held-out split: one question of each chosen video, stratified on three axes at once."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

Cell = tuple[str, ...]
"""A question's place on every axis."""


def scale(weights: Mapping[str, float], size: int) -> dict[str, int]:
    """Whole numbers in proportion to the weights that sum to ``size``, by largest remainder; ties go to the first."""
    total = sum(weights.values())
    exact = {name: weight * size / total for name, weight in weights.items()}
    quotas = {name: int(share + 1e-9) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: quotas[name] - exact[name])
    for name in by_remainder[: size - sum(quotas.values())]:
        quotas[name] += 1
    return quotas


@dataclass(frozen=True, slots=True)
class Draw:
    """What was held out."""

    chosen: tuple[int, ...]
    """Positions in the candidates, in order."""
    deviation: int
    """Sum over all axes and cells of |drawn - quota|."""


def draw_stratified(candidates: Sequence[Cell], quotas: Sequence[Mapping[str, int]], size: int, seed: int = 1234) -> Draw:
    """Choose ``size`` candidates whose marginals come closest to the quotas.

    A seeded order; a candidate is taken while its cells on all axes are below quota; then the best of the rest fill up, and swaps
    go on until none brings the marginals closer.

    Args:
        candidates: the cells of one question per video.
        quotas: per axis.
    """
    order = list(range(len(candidates)))
    Random(seed).shuffle(order)
    counts = [Counter[str]() for _ in quotas]
    chosen: list[int] = []
    for index in order:
        cell = candidates[index]
        if len(chosen) < size and all(counts[axis][name] < quotas[axis].get(name, 0) for axis, name in enumerate(cell)):
            _add(counts, cell, 1)
            chosen.append(index)
    rest = [index for index in order if index not in set(chosen)]
    while rest and len(chosen) < size:
        best = min(rest, key=lambda index: _change(counts, quotas, None, candidates[index]))
        _add(counts, candidates[best], 1)
        rest.remove(best)
        chosen.append(best)
    _swap(candidates, quotas, counts, chosen, rest)
    return Draw(
        tuple(sorted(chosen)),
        sum(abs(counts[axis][name] - wanted.get(name, 0)) for axis, wanted in enumerate(quotas) for name in {*wanted, *counts[axis]}),
    )


def _swap(
    candidates: Sequence[Cell], quotas: Sequence[Mapping[str, int]], counts: list[Counter[str]], chosen: list[int], rest: list[int]
) -> None:
    """Exchange chosen for other candidates while that lowers the deviation; candidates of one cell are alike."""
    while True:
        inside, outside = ({candidates[index]: index for index in reversed(part)} for part in (chosen, rest))
        moves = [(_change(counts, quotas, out, into), out, into) for out in inside for into in outside if out != into]
        gain, out, into = min(moves, default=(0, (), ()))
        if gain >= 0:
            return
        _add(counts, out, -1)
        _add(counts, into, 1)
        leaving, entering = inside[out], outside[into]
        chosen[chosen.index(leaving)] = entering
        rest[rest.index(entering)] = leaving


def _add(counts: list[Counter[str]], cell: Cell, number: int) -> None:
    for axis, name in enumerate(cell):
        counts[axis][name] += number


def _change(counts: list[Counter[str]], quotas: Sequence[Mapping[str, int]], out: Cell | None, into: Cell) -> int:
    """How the deviation would change if ``out`` left and ``into`` came."""
    change = 0
    for axis, wanted in enumerate(quotas):
        moves = Counter({into[axis]: 1})
        if out is not None:
            moves[out[axis]] -= 1
        for name, number in moves.items():
            gap = counts[axis][name] - wanted.get(name, 0)
            change += abs(gap + number) - abs(gap)
    return change
