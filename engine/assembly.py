"""Builds the parts of a run from its configuration and connects them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from headrace import checkpoint
from headrace.config import Config, ConfigError, load_config
from headrace.controller import Controller
from headrace.encoding import Encoder
from headrace.journal.journal import Journal
from headrace.policy import parallel as ranks
from headrace.policy.model import Policy
from headrace.policy.parallel import Parallel
from headrace.policy.update import Learner
from headrace.questions.ledger import Ledger
from headrace.questions.sets import QuestionSet, Split, load, stops_at_bad_rows
from headrace.records import Prompt, Question, Reward
from headrace.rewards.pool import ScoringPool
from headrace.run_folder import claim_folder
from headrace.sampling.local import LocalEngine
from headrace.starting_model import encoder_of, starting_model

RewardFunction = Callable[[Question, str], float | Reward]
"""The user's own reward; the name ``module:function`` of one may stand in its place and runs in a process that can be killed."""


@dataclass
class RolloutSide:
    """What only rank 0 has."""

    controller: Controller
    scorer: ScoringPool
    engine: LocalEngine
    held_out: list[Prompt]
    replica: Policy | None
    """Unsharded copy that the engine draws with when the learner is sharded."""


@dataclass
class Parts:
    """A run, ready to go."""

    config: Config
    parallel: Parallel
    journal: Journal
    encoder: Encoder
    policy: Policy
    learner: Learner
    rollouts: RolloutSide | None
    version: int = 0
    """Parameter version: optimizer batches trained."""

    def refresh_engine(self) -> None:
        """Give the embedded engine the learner's weights; collective when they are sharded."""
        if self.parallel.world_size > 1:
            ranks.gather_full_weights(self.policy, self.rollouts.replica if self.rollouts else None)


class _Rows:
    """A user's own sequence of questions as a question set."""

    def __init__(self, questions: Sequence[Question]) -> None:
        self._questions = questions

    def __len__(self) -> int:
        return len(self._questions)

    def question(self, index: int) -> Question:
        return self._questions[index]


@contextmanager
def assemble(config: Config, reward: RewardFunction | str | None, questions: Sequence[Question] | None, *, fresh: bool) -> Iterator[Parts]:
    """Build everything, hand it over, and close it again.

    Raises:
        ValueError: model, questions or an earlier run in the same folder do not fit; one line.
    """
    parallel = ranks.start()
    journal = Journal(config, config.run.steps, active=parallel.is_main)
    rollouts = None
    held: list[IO[bytes]] = []
    try:
        parallel.run_on_main(lambda: held.append(claim_folder(config, fresh)))
        configured = _configured(config, "train", needs_answers=reward is None)
        train = _Rows(questions) if questions is not None else configured
        if not train:
            raise ConfigError("questions: there is nothing to train on; set questions.train, or give the trainer questions")
        held_out = _configured(config, "held_out", needs_answers=reward is None) if parallel.is_main else None
        if reward is None:
            _check_scorers(config, {"train": train, "held_out": held_out})
        directories: list[Path] = []
        parallel.run_on_main(lambda: directories.append(starting_model(config, configured, parallel.device, journal)))
        directory = Path(parallel.broadcast_json(str(directories[0]) if directories else None))
        encoder = encoder_of(directory, config)
        policy = Policy.load(directory, config.model, parallel.device)
        replica = Policy.load(directory, config.model, parallel.device) if parallel.is_main and parallel.world_size > 1 else None
        learner = Learner(policy, config, encoder.banned_ids, parallel)
        parts = Parts(config, parallel, journal, encoder, policy, learner, None)
        if parallel.is_main:
            rollouts = parts.rollouts = _rollout_side(parts, train, reward, held_out, replica)
        yield parts
        ranks.meet()
    finally:
        if rollouts is not None:
            rollouts.scorer.close()
        journal.close()
        ranks.stop()
        for lock in held:
            lock.close()


def _configured(config: Config, split: Split, needs_answers: bool) -> QuestionSet | None:
    """The configured source of questions to train or to evaluate on."""
    source = config.questions.train if split == "train" else config.questions.held_out
    return None if source is None else load(source, config.run.seed, split, require_answer=needs_answers)


def _check_scorers(config: Config, sets: dict[str, QuestionSet | None]) -> None:
    """Raise where answers are to be scored by a task generator and a set comes from none that scores."""
    for name, questions in sets.items():
        if config.reward.verifier == "task" and questions is not None and not hasattr(questions, "verify"):
            raise ConfigError(f"reward.verifier = task: questions.{name} has no scorer of its own; use exact or math_verify")


def _encoded(questions: QuestionSet, parts: Parts) -> list[Prompt]:
    """The first held-out questions that can be encoded, as many as are evaluated; one line tells how many could not.

    Raises:
        ValueError: one cannot and bad rows are to stop the run, or none can.
    """
    wanted, stops = parts.config.evaluation.questions, stops_at_bad_rows(parts.config.questions.held_out)
    prompts: list[Prompt] = []
    faults: list[ValueError] = []
    for index in range(len(questions)):
        if len(prompts) == wanted:
            break
        try:
            prompts.append(parts.encoder.encode(questions.question(index)))
        except ValueError as error:
            if stops:
                raise
            faults.append(error)
    if faults and not prompts:
        raise faults[0]
    if faults:
        parts.journal.warn(f"{len(faults)} held-out questions left out; the first: {faults[0]}")
    return prompts


def _rollout_side(
    parts: Parts, train: QuestionSet, reward: RewardFunction | str | None, held_out: QuestionSet | None, replica: Policy | None
) -> RolloutSide:
    config, encoder = parts.config, parts.encoder
    prompts = [] if held_out is None else _encoded(held_out, parts)
    scorer = ScoringPool(config.reward, reward=reward, verify=getattr(train, "verify", None))
    engine = LocalEngine(replica or parts.policy, encoder, batch_rows=config.sampling.batch_rows, version=lambda: parts.version)
    controller = Controller(config, train, encoder, engine, scorer, Ledger(len(train), config.run.seed))
    return RolloutSide(controller, scorer, engine, prompts, replica)


def export_newest(run: Path, out: Path) -> int:
    """Write the newest checkpoint of a run folder as a model directory; its step.

    Raises:
        ValueError: the folder holds no run or no checkpoint, or the starting model cannot be had again.
    """
    config = load_config(run / "config.yaml")
    config = config.model_copy(update={"loss": config.loss.model_copy(update={"kl_coef": 0.0})})  # needs no reference
    device = Parallel().device
    questions = _configured(config, "train", needs_answers=False)
    directory = starting_model(config, questions, device, Journal(config, config.run.steps, active=False))
    encoder = encoder_of(directory, config)
    policy = Policy.load(directory, config.model, device)
    restored = checkpoint.restore(run / "checkpoints", Learner(policy, config, encoder.banned_ids))
    if restored is None:
        raise ConfigError(f"{run}: has no checkpoint to export")
    checkpoint.export(policy, encoder, out)
    return restored.step
