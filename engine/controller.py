"""The rollout side: admits questions, draws and scores groups, selects, assembles one batch per step."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.config import Config
from headrace.credit.advantage import group_advantages
from headrace.encoding import Encoder
from headrace.policy.packing import build_batch
from headrace.questions.ledger import Key, Ledger
from headrace.questions.sets import QuestionSet, stops_at_bad_rows
from headrace.ranges import span
from headrace.records import Engine, Group, Prompt, Scorer, StepBatch
from headrace.sampling.waves import draw_groups
from headrace.selection.dapo import Refill, keep

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one step drew."""

    batch: StepBatch | None
    """None when nothing can train: every group was filtered or failed."""
    sampled: tuple[Group, ...]
    """Every group drawn for it, filtered ones included."""
    fates: dict[Key, str]
    """How each admitted question of the step ends, once the update is done."""

    def counts(self, version: int) -> dict[str, float]:
        """Questions by fate and the lag of tokens behind ``version``, as metrics."""
        rollouts = [rollout for group in self.sampled for rollout in group.rollouts]
        questions = Counter(self.fates.values())
        lags = version - np.concatenate([rollout.completion.versions for rollout in rollouts] or [np.array([version])])
        return {
            **{f"questions/{fate}": float(count) for fate, count in sorted(questions.items())},
            "staleness/mean": float(lags.mean()) if len(lags) else 0.0,
            "staleness/max": float(lags.max(initial=0)),
        }


class Controller:
    """Turns questions into batches.

    Every admitted question is settled exactly once: ``draw`` decides its fate, ``settle`` writes it to the ledger
    after the optimizer step. A run killed in between finds the question in the queue again.
    """

    def __init__(self, config: Config, questions: QuestionSet, encoder: Encoder, engine: Engine, scorer: Scorer, ledger: Ledger) -> None:
        self.config = config
        self.questions = questions
        self.encoder = encoder
        self.engine = engine
        self.scorer = scorer
        self.ledger = ledger
        self._warned = False

    async def draw(self) -> Drawn:
        """Draw groups until the batch is full or the drawing rounds are used up."""
        dynamic = self.config.dynamic_sampling
        wanted = self.config.run.questions_per_step
        refill: Refill[tuple[Key, Group]] = Refill(wanted, max_rounds=dynamic.max_rounds if dynamic else 1)
        fates: dict[Key, str] = {}
        sampled: list[Group] = []
        while refill.status == "open":
            keys, prompts = self._admit(refill.missing, fates)
            groups = [self._credited(group) for group in await self._sample(keys, prompts)]
            sampled += groups
            fates |= {key: self._fate(group) for key, group in zip(keys, groups, strict=True)}
            refill.add([(key, group) for key, group in zip(keys, groups, strict=True) if fates[key] == "trained"])
        kept, surplus = refill.take(partial=True)
        fates |= {key: "surplus" for key, _ in surplus}
        with span("packing"):
            batch = build_batch([group for _, group in kept], self.config.loss, self.config.sampling) if kept else None
        return Drawn(batch, tuple(sampled), fates)

    def settle(self, drawn: Drawn) -> None:
        """Write the fates of a step to the ledger."""
        for key, fate in drawn.fates.items():
            self.ledger.settle(key, fate)

    def _admit(self, count: int, fates: dict[Key, str]) -> tuple[list[Key], list[Prompt]]:
        """The next ``count`` questions that can be encoded; the others are settled as ``unusable``.

        Raises:
            ValueError: one cannot be used and bad rows are to stop the run, or none of the set can; the message is the last one's.
        """
        keys: list[Key] = []
        prompts: list[Prompt] = []
        failed: set[int] = set()  # since the last that could be used; a small set comes round within one batch
        while len(prompts) < count:
            key = self.ledger.admit()
            try:
                prompts.append(self.encoder.encode(self.questions.question(key[1])))
            except ValueError as error:
                failed.add(key[1])
                fates[key] = "unusable"
                if len(failed) >= len(self.questions) or stops_at_bad_rows(self.config.questions.train):
                    raise
                if not self._warned:
                    self._warned = True
                    log.warning("%s; the question is left out, further ones are only counted", error)
                continue
            failed.clear()
            keys.append(key)
        return keys, prompts

    async def _sample(self, keys: Sequence[Key], prompts: Sequence[Prompt]) -> list[Group]:
        return await draw_groups(
            prompts,
            self.engine,
            self.scorer,
            self.config.sampling,
            seed=self.config.run.seed,
            epochs=[epoch for epoch, _ in keys],
            encoder=self.encoder,
        )

    def _credited(self, group: Group) -> Group:
        rewards = [None if rollout.reward is None else rollout.reward.total for rollout in group.rollouts]
        if sum(reward is not None for reward in rewards) < 2:
            return group
        advantage = self.config.advantage
        return replace(group, advantages=group_advantages(rewards, ddof=advantage.ddof, normalise=advantage.normalise))

    def _fate(self, group: Group) -> str:
        if group.advantages is None:
            return "unscored"
        accuracies = [rollout.reward.accuracy for rollout in group.rollouts if rollout.reward is not None]
        if self.config.dynamic_sampling and not keep(accuracies):
            return "no_variance"
        return "trained"
