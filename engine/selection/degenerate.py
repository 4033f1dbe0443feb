"""Groups without contrast: how many there are, and how many chance alone would make (paper 001, Eq. 4)."""

from collections.abc import Iterable, Mapping, Sequence
from math import fsum

from headrace.records import Group


def expected(success: float, size: int) -> float:
    """Probability that ``size`` independent rollouts of a question all end alike: p^G + (1 - p)^G."""
    return success**size + (1 - success) ** size


def outcomes(group: Group) -> list[float]:
    """1 for every right and 0 for every wrong rollout of a group that was scored."""
    return [float(rollout.reward.accuracy >= 1) for rollout in group.rollouts if rollout.reward is not None]


def degenerate(results: Sequence[float]) -> bool:
    """Whether a group's outcomes are all equal."""
    return min(results) == max(results)


def share_metrics(name: str, groups: Iterable[Sequence[float]]) -> dict[str, float]:
    """``degen/NAME``: the share of groups whose outcomes are all equal, with its counts; groups without outcomes do not count."""
    scored = [results for results in groups if results]
    return {f"degen/{name}_groups_n": float(len(scored)), **rates({f"degen/{name}": sum(map(degenerate, scored))}, len(scored))}


def rates(counts: Mapping[str, int], total: int) -> dict[str, float]:
    """Counts under ``NAME_n`` and, where there is anything to share, their shares of ``total`` under ``NAME``."""
    shares = {name: count / total for name, count in counts.items()} if total else {}
    return {f"{name}_n": float(count) for name, count in counts.items()} | shares


def expected_share(groups: Iterable[Sequence[float]]) -> float | None:
    """Mean of ``expected`` at every group's own success rate; None without groups.

    Taken at the rate of the very rollouts it is compared with, it is an upper estimate: by Jensen's inequality the mean over
    samples of a convex function lies above the function of the mean.
    """
    shares = [expected(fsum(results) / len(results), len(results)) for results in groups if results]
    return fsum(shares) / len(shares) if shares else None
