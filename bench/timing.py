"""Times several pieces of work against each other in one process."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

ROUNDS = (3, 40)
"""Least and most timed calls of each piece of work."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Wall-clock seconds of one call."""

    best: float
    median: float
    calls: int


def interleaved(works: Mapping[str, Callable[[], object]], budgets: Mapping[str, float], device: torch.device) -> dict[str, Timing]:
    """Time all works in turn, A B C A B C …, so that a busy machine or a hot chip is every work's trouble alike.

    The caller has run each once already. A work takes part in every round until it has used its budget of seconds, but in at least
    ``ROUNDS[0]``. Every other round runs in reverse, so that no work always follows the same one.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(ROUNDS[1]):
        going = [name for name, taken in seconds.items() if number < ROUNDS[0] or sum(taken) < budgets[name]]
        for name in going if number % 2 == 0 else reversed(going):
            seconds[name].append(once(works[name], device))
    return {name: Timing(min(taken), statistics.median(taken), len(taken)) for name, taken in seconds.items()}


def once(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, the device's work included; what the call returns is dropped inside."""
    finish(device)
    start = time.perf_counter()
    work()
    finish(device)
    return time.perf_counter() - start


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
