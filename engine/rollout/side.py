"""Everything that draws: the controller with its engine and scorer, and the held-out questions."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.config import Config, SamplingConfig
from headrace.controller import Controller, Drawn, fate
from headrace.credit.routing import ClaimRouting
from headrace.encoding import Encoder
from headrace.evaluation.measure import evaluate, held_out_prompts
from headrace.questions.hints import hints_for
from headrace.questions.ledger import Key, Ledger
from headrace.questions.sets import QuestionSet
from headrace.records import Engine, Group, Prompt, Question, Reward
from headrace.rewards.pool import ScoringPool
from headrace.rollout.admission import Admission
from headrace.rollout.groups import Ahead, Pace, Together, while_engine_fails
from headrace.sampling.waves import draw_groups
from headrace.schedule import max_lag, slots
from headrace.selection.paqm import Miner
from headrace.wire import pack, unpack

log = logging.getLogger(__name__)

RewardFunction = Callable[[Question, str], float | Reward]
"""The user's own reward; the name ``module:function`` of one may stand in its place and runs in a process that can be killed."""


@dataclass(frozen=True, slots=True)
class RolloutState:
    """What a resumed run goes on from."""

    ledger: dict[str, Any] | None = None
    """``Ledger.state``."""
    batches: int = 0
    """Batches settled."""
    unreleased: tuple[Key, ...] = ()
    """Questions that have trained since the engines last got weights."""
    groups: dict[Key, Group] = field(default_factory=dict)
    """Groups that were drawn and had not trained."""

    def for_checkpoint(self) -> tuple[dict[str, Any], bytes]:
        """As JSON, and groups as bytes. By then every group that has trained is as good as released: a resumed run pushes first."""
        return {"ledger": self.ledger, "batches": self.batches}, pack(self.groups) if self.groups else b""

    @classmethod
    def from_checkpoint(cls, extra: Mapping[str, Any], groups: bytes) -> "RolloutState":
        """The inverse."""
        return cls(ledger=extra.get("ledger"), batches=extra.get("batches", 0), groups=unpack(groups, dict[Key, Group]) if groups else {})


class Rollouts(Protocol):
    """The rollout side as the trainer sees it, in this process or in one of its own."""

    async def draw(self) -> Drawn:
        """Groups and batch of the next step."""
        ...

    async def settle(self, fates: dict[Key, str]) -> None:
        """The update on a step's batch is done."""
        ...

    async def release(self) -> None:
        """The engines hold the weights of every step settled so far."""
        ...

    async def evaluate(self) -> dict[str, Any] | None:
        """Accuracy on the held-out questions (``evaluation.evaluate``); None when there are none."""
        ...

    async def state(self) -> RolloutState:
        """For the checkpoint."""
        ...

    async def restore(self, state: RolloutState) -> None:
        """Go on from a checkpoint; before anything is drawn."""
        ...

    async def close(self) -> None:
        """Stop drawing, end the workers."""
        ...


class OwnRollouts:
    """The rollout side in this process.

    With the local engine a step's groups are drawn together when the step wants them. With another engine sampling runs ahead as
    far as the schedule allows, while the caller does something else in the event loop.
    """

    def __init__(self, config: Config, sides: "Sides", engine: Engine, encoder: Encoder, warn: Callable[[str], None]) -> None:
        self._config, self._engine, self._encoder = config, engine, encoder
        self._held_out: list[Prompt] = []
        if sides.held_out is not None:
            self._held_out, left_out = held_out_prompts(sides.held_out, encoder, config)
            for reason in left_out[:1]:
                warn(f"{len(left_out)} held-out questions left out; the first: {reason}")
        self._scorer = ScoringPool(config.reward, reward=sides.reward, verify=getattr(sides.train, "verify", None))
        self._admission = Admission(config, sides.train, encoder, Ledger(len(sides.train), config.run.seed))
        self._routing = ClaimRouting(config.credit, encoder, config.sampling.group_size)
        self._miner = self._make_miner(sides.train)
        self._batches = 0
        self._controller = self._make_controller(RolloutState())

    async def draw(self) -> Drawn:
        return await self._controller.draw()

    async def settle(self, fates: dict[Key, str]) -> None:
        self._controller.settle(fates)
        self._batches += 1

    async def release(self) -> None:
        self._controller.source.release()

    async def evaluate(self) -> dict[str, Any] | None:
        if not self._held_out:
            return None
        return await while_engine_fails(
            lambda: evaluate(self._held_out, self._engine, self._scorer, self._encoder, self._config),
            lambda error: log.warning("the evaluation starts again: %s", error),
        )

    async def state(self) -> RolloutState:
        source = self._controller.source
        return RolloutState(self._admission.ledger.state(), self._batches, tuple(source.unreleased), source.buffered())

    async def restore(self, state: RolloutState) -> None:
        self._admission.ledger.restore(state.ledger)
        self._batches = state.batches
        self._controller = self._make_controller(state)

    async def close(self) -> None:
        await self._controller.source.close()
        await self._routing.close()
        await asyncio.to_thread(self._scorer.close)
        closing = getattr(self._engine, "close", None)
        if closing is not None:
            await closing()

    def _make_miner(self, questions: QuestionSet) -> Miner | None:
        config = self._config
        if config.paqm is None:
            return None
        hints = hints_for(config.paqm.hints, questions)
        return Miner(config.paqm, config.sampling, self._draw, self._encoder.encode, hints, config.run.seed)

    def _make_controller(self, state: RolloutState) -> Controller:
        config = self._config
        if config.engine.kind == "local":
            return Controller(config, Together(self._admission, self._sample), self._admission, self._routing)
        ahead = Ahead(
            self._admission,
            self._sample,
            lambda group: fate(group, config) == "trained",
            Pace(slots(config), config.run.questions_per_step, config.schedule.sync_interval, max_lag(config)),
            batches=state.batches,
            drawn=state.groups,
            unreleased=state.unreleased,
        )
        return Controller(config, ahead, self._admission, self._routing)

    async def _sample(self, keys: Sequence[Key], prompts: Sequence[Prompt]) -> list[Group]:
        epochs = [epoch for epoch, _ in keys]
        if self._miner is not None:
            return await self._miner.draw(prompts, epochs)
        return await self._draw(prompts, self._config.sampling, seed=self._config.run.seed, epochs=epochs)

    async def _draw(self, prompts: Sequence[Prompt], sampling: SamplingConfig, *, seed: int, epochs: Sequence[int]) -> list[Group]:
        start = self._routing.start
        return await draw_groups(
            prompts, self._engine, self._scorer, sampling, seed=seed, epochs=epochs, encoder=self._encoder, scored=start
        )


@dataclass(frozen=True, slots=True)
class Sides:
    """What is drawn and how it is scored."""

    train: QuestionSet
    held_out: QuestionSet | None
    reward: RewardFunction | str | None
