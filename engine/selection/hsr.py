"""Hybrid Stratified Replay: groups reassembled by outcome and path entropy (paper 001, phases 1 and 2).

Half of a group's places are structured: surprising right answers (epiphanies), confident right ones (anchors) and confident
wrong ones (hard negatives). The rest is drawn from the question's own rollouts except surprising wrong ones (noise). A rollout
may be drawn twice and then weighs twice. Nothing outlives the step: the buffers are local to one call.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from typing import Literal, TypeVar

import numpy as np

from headrace.config import HSRConfig
from headrace.records import Array, Group, Rollout
from headrace.selection.degenerate import degenerate, expected_share, outcomes, rates, share_metrics
from headrace.streams import stream

T = TypeVar("T")
Class = Literal["anchor", "hard_negative", "epiphany", "noise", "natural"]
Pick = tuple[int, int]
"""A rollout of the batch: number of its question, position in that question's pool."""
STRUCTURED: tuple[Class, ...] = ("epiphany", "anchor", "hard_negative")
"""Classes with a quota, in the order in which they are drawn."""


def thresholds(path_entropies: Sequence[float], low: float = 0.10, high: float = 0.90) -> tuple[float, float]:
    """Quantiles of all path entropies of a global batch, linearly interpolated.

    Raises:
        ValueError: there are none.
    """
    if not len(path_entropies):
        raise ValueError("hsr.thresholds: expected at least one path entropy, got none")
    lower, upper = np.quantile(np.asarray(path_entropies, dtype=np.float64), [low, high])
    return float(lower), float(upper)


def quotas(size: int) -> dict[str, int]:
    """Places of a group of ``size`` by class; what the structured half cannot divide goes to the natural stream."""
    structured = size // 2
    places = {"epiphany": structured // 2, "anchor": structured // 4, "hard_negative": structured // 4}
    return {**places, "natural": size - sum(places.values())}


def stratify(rewards: Sequence[float], path_entropies: Sequence[float], low: float, high: float) -> list[Class]:
    """Class of every rollout. Both inequalities are strict: a path entropy on a threshold is natural.

    Args:
        rewards: accuracies; 1 is right, everything below is wrong.
        path_entropies: nats per token.
        low, high: the thresholds of the batch.
    """
    classes: list[Class] = []
    for reward, entropy in zip(rewards, path_entropies, strict=True):
        right = reward >= 1
        if entropy < low:
            classes.append("anchor" if right else "hard_negative")
        elif entropy > high:
            classes.append("epiphany" if right else "noise")
        else:
            classes.append("natural")
    return classes


def assemble(classes: Sequence[Class], size: int, rng: np.random.Generator, *, repeat: bool = False) -> list[int]:
    """Positions of a group of exactly ``size``, structured places first; a position may occur more than once.

    Args:
        classes: of the question's own rollouts.
        repeat: a class that is not empty fills its quota with replacement instead of leaving the rest to natural places.

    Raises:
        ValueError: there is no rollout.
    """
    structured = _structured(_buffers(classes), {}, size, rng, repeat)
    return [position for _, position in structured] + _natural(classes, size - len(structured), rng)


def _buffers(classes: Sequence[Class], number: int = 0) -> dict[Class, list[Pick]]:
    """Rollouts of question ``number`` by class, those with a quota."""
    return {name: [(number, place) for place, each in enumerate(classes) if each == name] for name in STRUCTURED}


def _structured(
    own: Mapping[Class, Sequence[Pick]], others: Mapping[Class, Sequence[Pick]], size: int, rng: np.random.Generator, repeat: bool
) -> list[Pick]:
    """Up to its quota of every class without replacement: the question's own first, then other questions'."""
    chosen: list[Pick] = []
    for name in STRUCTURED:
        quota, mine, donors = quotas(size)[name], own[name], others.get(name, ())
        drawn = _choose(mine, min(quota, len(mine)), rng)
        drawn += _choose(donors, min(quota - len(drawn), len(donors)), rng)
        if repeat and drawn:
            drawn += _choose(drawn, quota - len(drawn), rng, replace=True)
        chosen += drawn
    return chosen


def _natural(classes: Sequence[Class], count: int, rng: np.random.Generator) -> list[int]:
    """``count`` rollouts of the valid pool (all but noise; all, where there is nothing else) without replacement.

    A pool that is too small is taken whole and topped up with replacement.
    """
    pool = [position for position, name in enumerate(classes) if name != "noise"] or list(range(len(classes)))
    if not pool:
        raise ValueError("hsr.assemble: expected at least one rollout, got none")
    drawn = _choose(pool, min(count, len(pool)), rng)
    return drawn + _choose(pool, count - len(drawn), rng, replace=True)


def _choose(items: Sequence[T], count: int, rng: np.random.Generator, *, replace: bool = False) -> list[T]:
    return [items[int(place)] for place in rng.choice(len(items), count, replace=replace)] if count > 0 else []


# ---------------------------------------------------------------------------------------------------- the global batch


@dataclass(frozen=True, slots=True)
class _Pool:
    """The rollouts of one question that may be drawn: scored, and with a path entropy."""

    group: Group
    rollouts: tuple[Rollout, ...]
    places: tuple[int, ...]
    """Their positions in the group."""
    entropies: tuple[float, ...]

    @classmethod
    def of(cls, group: Group) -> "_Pool":
        usable = [
            (place, rollout, entropy)
            for place, rollout in enumerate(group.rollouts)
            if rollout.reward is not None and not rollout.failure and (entropy := rollout.completion.path_entropy) is not None
        ]
        places, rollouts, entropies = zip(*usable, strict=True) if usable else ((), (), ())
        return cls(group, rollouts, places, entropies)

    def classes(self, low: float, high: float) -> list[Class]:
        accuracies = [rollout.reward.accuracy for rollout in self.rollouts if rollout.reward is not None]
        return stratify(accuracies, self.entropies, low, high)


@dataclass(frozen=True, slots=True)
class _Assembled:
    """One question's new group and how it came about."""

    group: Group
    picks: list[Pick]
    structured: int
    mixed: bool
    """The question's own rollouts held both outcomes."""
    rescued: bool = False
    """A natural place was given to the outcome that had gone missing."""


def assemble_groups(groups: Sequence[Group], config: HSRConfig, seed: int) -> tuple[list[Group], dict[str, float]]:
    """The groups of one global batch, reassembled, and the metrics of it.

    Every group keeps its size, question and wave labels. Copies of a rollout are the same object; one taken in from another
    question carries its own ``prompt``. Groups with fewer than two usable rollouts stay as they are. A question draws from
    the stream ``hsr`` of its epoch, whatever else is in the batch, as far as the thresholds and donors are the same.

    Args:
        groups: every group of the optimizer batch over all ranks, scored. With ``baseline: original`` they carry advantages,
            which travel with the copies; else the new groups have none yet.
        seed: the run's.

    Raises:
        ValueError: ``baseline: original`` and a group has no advantages.
    """
    pools = [_Pool.of(group) for group in groups]
    everything = [entropy for pool in pools for entropy in pool.entropies]
    if not everything:
        return list(groups), {}
    low, high = thresholds(everything, config.low, config.high)
    classes = [pool.classes(low, high) for pool in pools]
    buffers = [_buffers(each, number) for number, each in enumerate(classes)]
    made = {
        number: _reassembled(number, pools, classes[number], buffers, config, seed)
        for number, pool in enumerate(pools)
        if len(pool.rollouts) >= 2
    }
    final = [made[number].group if number in made else group for number, group in enumerate(groups)]
    metrics = {"hsr/threshold_low": low, "hsr/threshold_high": high, "hsr/path_entropy": fsum(everything) / len(everything)}
    metrics |= share_metrics("natural", map(outcomes, groups)) | share_metrics("assembled", map(outcomes, final))
    return final, metrics | _metrics(pools, classes, list(made.values()))


def _reassembled(
    number: int,
    pools: Sequence[_Pool],
    classes: Sequence[Class],
    buffers: Sequence[Mapping[Class, Sequence[Pick]]],
    config: HSRConfig,
    seed: int,
) -> _Assembled:
    """The new group of question ``number``, whose rollouts have these classes."""
    group = pools[number].group
    size, rng = len(group.rollouts), stream(seed, "hsr", group.epoch, group.prompt.question.id)
    others: dict[Class, list[Pick]] = {}
    if config.scope == "global_batch":
        for name in STRUCTURED:
            others[name] = [pick for donor, buffer in enumerate(buffers) if donor != number for pick in buffer[name]]
    structured = _structured(buffers[number], others, size, rng, config.short_buffers == "repeat")
    picks = structured + [(number, place) for place in _natural(classes, size - len(structured), rng)]
    mixed = not degenerate(outcomes(group))
    rescued = config.ensure_contrast and mixed and _rescue(picks, number, pools, classes, rng)
    return _Assembled(_group(group, picks, pools, config), picks, len(structured), mixed, rescued)


def _rescue(picks: list[Pick], number: int, pools: Sequence[_Pool], classes: Sequence[Class], rng: np.random.Generator) -> bool:
    """Give the last natural place to a random rollout of the missing outcome, where one that is no noise exists."""
    present = {_right(pools, pick) for pick in picks}
    missing = [(number, place) for place, name in enumerate(classes) if name != "noise" and _right(pools, (number, place)) not in present]
    if len(present) > 1 or not missing:
        return False
    picks[-1:] = _choose(missing, 1, rng)
    return True


def _right(pools: Sequence[_Pool], pick: Pick) -> bool:
    reward = pools[pick[0]].rollouts[pick[1]].reward
    return reward is not None and reward.accuracy >= 1


def _group(group: Group, picks: Sequence[Pick], pools: Sequence[_Pool], config: HSRConfig) -> Group:
    """The picked rollouts as a group of the question."""
    chosen = [(pools[number], place) for number, place in picks]
    rollouts = tuple(
        pool.rollouts[place] if pool.group is group else replace(pool.rollouts[place], prompt=pool.group.prompt) for pool, place in chosen
    )
    advantages = None
    if config.baseline == "original":
        advantages = np.array([_advantages(pool.group)[pool.places[place]] for pool, place in chosen])
    return replace(group, rollouts=rollouts, advantages=advantages)


def _advantages(group: Group) -> Array:
    if group.advantages is None:
        raise ValueError(f"hsr.baseline = original: question {group.prompt.question.id} has no advantages yet")
    return group.advantages


def _metrics(pools: Sequence[_Pool], classes: Sequence[Sequence[Class]], made: Sequence[_Assembled]) -> dict[str, float]:
    """How the assembly went; every rate beside its counts (``_n``)."""
    counts = Counter(name for each in classes for name in each)
    rollouts, places = counts.total(), sum(len(each.picks) for each in made)
    budget = [sum(quotas(len(each.picks))[name] for name in STRUCTURED) - each.structured for each in made]
    lost = sum(each.mixed and degenerate(outcomes(each.group)) for each in made)
    repeats = sum(len(each.picks) - len(set(each.picks)) for each in made)
    donated = sum(rollout.prompt is not None for each in made for rollout in each.group.rollouts)
    theory = expected_share(outcomes(pool.group) for pool in pools)
    return {
        **{f"hsr/{name}_n": float(counts[name]) for name in (*STRUCTURED, "noise", "natural")},
        "hsr/rollouts_n": float(rollouts),
        "hsr/groups_n": float(len(made)),
        "hsr/places_n": float(places),
        "hsr/excluded_n": float(sum(len(pool.group.rollouts) - len(pool.rollouts) for pool in pools)),
        "hsr/rescued_n": float(sum(each.rescued for each in made)),
        **rates({"hsr/noise_share": counts["noise"]}, rollouts),
        **rates({"hsr/quota_full": budget.count(0), "hsr/created_degenerate": lost}, len(made)),
        **({"hsr/short_mean": fsum(budget) / len(made)} if made else {}),
        **rates({"hsr/dup_share": repeats, "hsr/donated_share": donated}, places),
        **({} if theory is None else {"degen/expected": theory}),
    }
