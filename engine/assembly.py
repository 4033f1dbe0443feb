"""Builds the parts of a run from its configuration and connects them."""

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from headrace import checkpoint
from headrace.config import Config, ConfigError, LocalEngineConfig, load_config
from headrace.credit.rules import credit_rules
from headrace.encoding import Encoder
from headrace.journal.journal import Journal
from headrace.policy import parallel as ranks
from headrace.policy.model import Policy
from headrace.policy.parallel import Parallel
from headrace.policy.update import Learner
from headrace.questions.sets import QuestionSet
from headrace.records import Question
from headrace.rollout.side import OwnRollouts, RewardFunction, Rollouts, Sides
from headrace.rollout.weights import EngineWeights, SharedWeights
from headrace.run_folder import claim_folder
from headrace.sampling.local import LocalEngine
from headrace.starting_model import encoder_of, starting_model
from headrace.task_sets import configured, question_sets


@dataclass
class Parts:
    """A run, ready to go."""

    config: Config
    parallel: Parallel
    journal: Journal
    encoder: Encoder
    policy: Policy
    learner: Learner
    weights: EngineWeights
    rollouts: Rollouts | None
    """On rank 0."""
    version: int = 0
    """Parameter version of the engine's weights."""


@asynccontextmanager
async def assemble(
    config: Config, parallel: Parallel, reward: RewardFunction | str | None, questions: Sequence[Question] | None, *, fresh: bool
) -> AsyncIterator[Parts]:
    """Build everything on a learner rank, hand it over, and close it again.

    Raises:
        ValueError: model, questions or an earlier run in the same folder do not fit; one line.
    """
    journal = Journal(config, config.run.steps, active=parallel.is_main)
    if config.sampling.cge is not None and config.loss.surprisal_coef > 0:
        journal.warn("loss.surprisal_coef lowers the entropy that sampling.cge is there to raise")
    held: list[IO[bytes]] = []
    try:
        parallel.run_on_main(lambda: held.append(claim_folder(config, fresh)))
        sides = Sides(*question_sets(config, questions, needs_answers=reward is None), reward)
        task = sides.train if questions is None else configured(config, "train", needs_answers=reward is None)
        directory = _starting_model(config, task, parallel, journal)
        encoder = encoder_of(directory, config)
        policy = Policy.load(directory, config.model, parallel.device)
        learner = Learner(policy, config, encoder.banned_ids, parallel, credit_rules(config.credit))
        async with AsyncExitStack() as closing:
            if isinstance(config.engine, LocalEngineConfig):
                parts = _with_local_engine(config, parallel, journal, encoder, learner, directory, sides)
            else:
                from headrace.rollout.start import start_remote, transferable  # brings the HTTP client, which a local run does without

                given = transferable(reward, questions)
                weights, remote = await start_remote(config, config.engine, parallel, journal, encoder, policy, directory, given, closing)
                parts = Parts(config, parallel, journal, encoder, policy, learner, weights, remote)
            if parts.rollouts is not None:
                closing.push_async_callback(parts.rollouts.close)
            yield parts
            ranks.meet()
    finally:
        journal.close()
        ranks.stop()
        for lock in held:
            lock.close()


def _starting_model(config: Config, questions: QuestionSet | None, parallel: Parallel, journal: Journal) -> Path:
    """Directory of the starting policy, made by rank 0."""
    directories: list[Path] = []
    parallel.run_on_main(lambda: directories.append(starting_model(config, questions, parallel.device, journal)))
    return Path(parallel.broadcast_json(str(directories[0]) if directories else None))


def _with_local_engine(
    config: Config, parallel: Parallel, journal: Journal, encoder: Encoder, learner: Learner, directory: Path, sides: Sides
) -> Parts:
    """The learner draws for itself; rank 0 from a whole copy where the learner is sharded."""
    replica = Policy.load(directory, config.model, parallel.device) if parallel.is_main and parallel.world_size > 1 else None
    weights = SharedWeights(learner.policy, replica, parallel)
    parts = Parts(config, parallel, journal, encoder, learner.policy, learner, weights, None)
    if parallel.is_main:
        engine = LocalEngine(replica or learner.policy, encoder, batch_rows=config.sampling.batch_rows, version=lambda: parts.version)
        parts.rollouts = OwnRollouts(config, sides, engine, encoder, journal.warn)
    return parts


def export_newest(run: Path, out: Path) -> int:
    """Write the newest checkpoint of a run folder as a model directory; its step.

    Raises:
        ValueError: the folder holds no run or no checkpoint, or the starting model cannot be had again.
    """
    learner, encoder = learner_at_start(run)
    restored = checkpoint.restore(run / "checkpoints", learner)
    if restored is None:
        raise ConfigError(f"{run}: has no checkpoint to export")
    for fault in restored.damaged:
        print(f"warning: {fault}; an older one is taken", file=sys.stderr)
    checkpoint.export(learner.policy, encoder, out)
    return restored.step


def learner_at_start(run: Path) -> tuple[Learner, Encoder]:
    """The learner of a run folder as it was before the first step, whole in this process, for a checkpoint to be loaded into.

    Raises:
        ValueError: the folder holds no run, or the starting model cannot be had again.
    """
    config, directory = start_of(run)
    encoder = encoder_of(directory, config)
    return Learner(Policy.load(directory, config.model, Parallel().device), config, encoder.banned_ids), encoder


def start_of(run: Path) -> tuple[Config, Path]:
    """A run's configuration, as one process without a reference can use it, and the model directory it started from.

    Raises:
        ValueError: the folder holds no run, or the starting model cannot be had again.
    """
    config = load_config(run / "config.yaml")
    config = config.model_copy(
        update={
            "loss": config.loss.model_copy(update={"kl_coef": 0.0}),  # needs no reference
            "model": config.model.model_copy(update={"shard": None, "offload": False}),  # one process has no ranks to lay it out over
        }
    )
    questions = configured(config, "train", needs_answers=False)
    return config, starting_model(config, questions, Parallel().device, Journal(config, config.run.steps, active=False))
