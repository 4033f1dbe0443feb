"""The rollout side: takes drawn groups, selects, assembles one batch per step, and accounts for every question."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from headrace.config import Config
from headrace.credit.advantage import group_advantages
from headrace.credit.routing import ClaimRouting
from headrace.policy.packing import build_batch
from headrace.questions.ledger import Key
from headrace.ranges import span
from headrace.records import Group, StepBatch
from headrace.rollout.admission import Admission
from headrace.rollout.groups import GroupSource
from headrace.selection import paqm
from headrace.selection.dapo import Refill, keep
from headrace.selection.hsr import assemble_groups


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one step drew."""

    batch: StepBatch | None
    """None when nothing can train: every group was filtered or failed."""
    sampled: tuple[Group, ...]
    """Every group drawn for it, filtered ones included."""
    fates: dict[Key, str]
    """How each admitted question of the step ends, once the update is done."""
    metrics: dict[str, float] = field(default_factory=dict)
    """How sampling went."""

    def counts(self, version: int) -> dict[str, float]:
        """Questions by fate and the lag of tokens behind ``version``, as metrics."""
        rollouts = [rollout for group in self.sampled for rollout in group.rollouts]
        questions = Counter(self.fates.values())
        lags = version - np.concatenate([rollout.completion.versions for rollout in rollouts] or [np.array([version])])
        return {
            **{f"questions/{fate}": float(count) for fate, count in sorted(questions.items())},
            "staleness/mean": float(lags.mean()) if len(lags) else 0.0,
            "staleness/max": float(lags.max(initial=0)),
            **self.metrics,
        }


def fate(group: Group, config: Config) -> str:
    """How a drawn group's question ends: ``trained``, or why not."""
    if sum(rollout.reward is not None for rollout in group.rollouts) < 2:
        return "unscored"
    if group.mining is not None and not group.mining.kept:
        return "trivial"
    accuracies = [rollout.reward.accuracy for rollout in group.rollouts if rollout.reward is not None]
    if config.dynamic_sampling and not keep(accuracies):
        return "no_variance"
    return "trained"


def drawing_rounds(config: Config) -> int:
    """Times that a step asks for more groups in place of those that do not train."""
    return max((section.max_rounds for section in (config.dynamic_sampling, config.paqm) if section is not None), default=1)


class Controller:
    """Turns groups into batches.

    Every admitted question is settled exactly once: ``draw`` decides its fate, ``settle`` writes it to the ledger
    after the optimizer step. A run killed in between finds the question in the queue again.
    """

    def __init__(self, config: Config, source: GroupSource, admission: Admission, routing: ClaimRouting | None = None) -> None:
        self.config = config
        self.routing = routing
        self.source = source
        self.admission = admission

    async def draw(self) -> Drawn:
        """Take groups until the batch is full or the drawing rounds are used up."""
        wanted = self.config.run.questions_per_step
        refill: Refill[tuple[Key, Group]] = Refill(wanted, max_rounds=drawing_rounds(self.config))
        fates: dict[Key, str] = {}
        sampled: list[Group] = []
        while refill.status == "open":
            drawn = [(key, self._credited(group)) for key, group in await self.source.take(refill.missing)]
            sampled += [group for _, group in drawn]
            fates |= {key: fate(group, self.config) for key, group in drawn}
            refill.add([(key, group) for key, group in drawn if fates[key] == "trained"])
        kept, surplus = refill.take(partial=True)
        fates |= {key: "surplus" for key, _ in surplus} | dict.fromkeys(self.admission.unusable(), "unusable")
        groups, metrics = self._reassembled([group for _, group in kept])
        metrics |= self.source.metrics()
        if self.config.paqm is not None:
            metrics |= paqm.metrics(sampled)
        if self.routing is not None:
            groups = await asyncio.gather(*map(self.routing.collect, groups))
            metrics |= self.routing.metrics()
        with span("packing"):
            batch = build_batch(groups, self.config.loss, self.config.sampling) if groups else None
        return Drawn(batch, tuple(sampled), fates, metrics)

    def settle(self, fates: dict[Key, str]) -> None:
        """Write the fates of a step to the ledger."""
        for key, end in fates.items():
            self.admission.ledger.settle(key, end)
        self.source.trained([key for key, end in fates.items() if end == "trained"])

    def _reassembled(self, groups: list[Group]) -> tuple[list[Group], dict[str, float]]:
        """The batch's groups as stratified replay makes them, with advantages, and its metrics."""
        if self.config.hsr is None:
            return groups, {}
        groups, metrics = assemble_groups(groups, self.config.hsr, self.config.run.seed)
        return [group if group.advantages is not None else self._credited(group) for group in groups], metrics

    def _credited(self, group: Group) -> Group:
        rewards = [None if rollout.reward is None else rollout.reward.total for rollout in group.rollouts]
        if sum(reward is not None for reward in rewards) < 2:
            return group
        advantage = self.config.advantage
        return replace(group, advantages=group_advantages(rewards, ddof=advantage.ddof, normalise=advantage.normalise))
