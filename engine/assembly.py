"""Builds the parts of a run from its configuration and connects them."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from headrace.checkpoint import export
from headrace.config import Config, ConfigError
from headrace.controller import Controller
from headrace.encoding import Encoder
from headrace.journal.journal import Journal
from headrace.policy import parallel as ranks
from headrace.policy.model import Policy
from headrace.policy.parallel import Parallel
from headrace.policy.sources import materialise
from headrace.policy.update import Learner
from headrace.policy.warm_start import warm_start
from headrace.questions.ledger import Ledger
from headrace.questions.sets import QuestionSet, TaskSet, load
from headrace.records import Prompt, Question, Reward
from headrace.rewards.pool import ScoringPool
from headrace.sampling.local import LocalEngine
from headrace.streams import stream

RewardFunction = Callable[[Question, str], float | Reward]
"""The user's own reward; the name ``module:function`` of one may stand in its place and runs in a process that can be killed."""

MAY_CHANGE = (
    "run.steps",
    "run.folder",
    "run.cache",
    "run.evaluate_every",
    "run.checkpoint_every",
    "run.keep_checkpoints",
    "journal",
    "reward.workers",
)
"""Fields that may differ when a run goes on: none of them changes a number of the steps already done."""


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
    try:
        parallel.run_on_main(lambda: _claim_folder(config, fresh))
        train = _questions(config, questions, needs_answers=reward is None)
        directories: list[Path] = []
        parallel.run_on_main(lambda: directories.append(_starting_model(config, train, parallel, journal)))
        directory = Path(parallel.broadcast_json(str(directories[0]) if directories else None))
        encoder = _encoder(directory, config)
        policy = Policy.load(directory, config.model, parallel.device)
        replica = Policy.load(directory, config.model, parallel.device) if parallel.is_main and parallel.world_size > 1 else None
        learner = Learner(policy, config, encoder.banned_ids, parallel)
        parts = Parts(config, parallel, journal, encoder, policy, learner, None)
        if parallel.is_main:
            rollouts = parts.rollouts = _rollout_side(parts, train, reward, replica)
        yield parts
    finally:
        if rollouts is not None:
            rollouts.scorer.close()
        journal.close()
        ranks.stop()


def _questions(config: Config, own: Sequence[Question] | None, needs_answers: bool) -> QuestionSet:
    """What to train on: the user's own questions, or the configured source."""
    if own is None:
        return load(config.questions.train, config.run.seed, "train", require_answer=needs_answers)
    if not own:
        raise ConfigError("questions: an empty sequence was given to the trainer")
    return _Rows(own)


def _rollout_side(parts: Parts, train: QuestionSet, reward: RewardFunction | str | None, replica: Policy | None) -> RolloutSide:
    config, encoder = parts.config, parts.encoder
    scorer = ScoringPool(config.reward, reward=reward, verify=getattr(train, "verify", None))
    engine = LocalEngine(replica or parts.policy, encoder, batch_rows=config.sampling.batch_rows, version=lambda: parts.version)
    controller = Controller(config, train, encoder, engine, scorer, Ledger(len(train), config.run.seed))
    held_out = []
    if config.questions.held_out is not None:
        questions = load(config.questions.held_out, config.run.seed, "held_out")
        held_out = [encoder.encode(questions.question(index)) for index in range(min(len(questions), config.evaluation.questions))]
    return RolloutSide(controller, scorer, engine, held_out, replica)


def _encoder(directory: Path, config: Config) -> Encoder:
    return Encoder.load(
        directory,
        think_prefill=config.sampling.think_prefill,
        system_prompt=config.questions.system_prompt,
        max_prompt_tokens=config.questions.max_prompt_tokens,
    )


# ------------------------------------------------------------------------------------------------------ the run folder


def _claim_folder(config: Config, fresh: bool) -> None:
    """Make sure that what lies in the run folder is this run's.

    Raises:
        ConfigError: another configuration made it; the message names the first field that differs.
    """
    folder = config.run_folder
    if fresh and folder.exists():
        shutil.rmtree(folder)
    written = folder / "config.yaml"
    if not written.exists():
        return
    earlier, present = _fields(yaml.safe_load(written.read_text(encoding="utf-8"))), _fields(config.model_dump(mode="json"))
    for field in sorted(earlier.keys() | present.keys()):
        if earlier.get(field) != present.get(field) and not field.startswith(MAY_CHANGE):
            raise ConfigError(
                f"{folder}: the run there has {field} = {earlier.get(field)!r}, this configuration {present.get(field)!r}; "
                "give the new run another run.name, or start over with --fresh"
            )


def _fields(tree: object, prefix: str = "") -> dict[str, object]:
    """Leaves of a nested dictionary by dotted name."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {name: leaf for key, value in tree.items() for name, leaf in _fields(value, f"{prefix}.{key}" if prefix else str(key)).items()}


# ------------------------------------------------------------------------------------------------------ the starting policy


def _starting_model(config: Config, train: QuestionSet, parallel: Parallel, journal: Journal) -> Path:
    """Directory of the policy that reinforcement learning starts from; conversions and warm starts are cached."""
    vocabulary = train.vocabulary() if isinstance(train, TaskSet) else None
    base = materialise(config.model.source, config.run.cache, config.run.seed, vocabulary)
    if config.warm_start is None:
        return base
    if not isinstance(train, TaskSet):
        raise ConfigError("warm_start: questions.train has no traces to learn from; leave warm_start out, or use a task generator")
    key = json.dumps(
        [
            config.warm_start.model_dump(mode="json"),
            config.questions.train.model_dump(mode="json"),
            config.sampling.think_prefill,
            base.name,
        ]
    )
    directory = config.run.cache / "warm_start" / hashlib.sha256(key.encode()).hexdigest()[:16]
    if directory.exists():
        journal.say(f"warm start: cached in {directory}")
        return directory
    encoder = _encoder(base, config)
    policy = Policy.load(base, config.model.model_copy(update={"train_vision": True}), parallel.device)
    with journal.phase("warm start") as tick:
        warm_start(policy, encoder, config.warm_start, _traces(train, encoder, config), config.run.seed, tick)
    return export(policy, encoder, directory)


def _traces(train: TaskSet, encoder: Encoder, config: Config) -> Callable[[int, float], list[tuple[Prompt, str]]]:
    """``examples(step, noise)``: a batch of prompts with gold responses, drawn with replacement."""
    assert config.warm_start is not None
    batch = config.warm_start.batch

    def examples(step: int, noise: float) -> list[tuple[Prompt, str]]:
        rng = stream(config.run.seed, "warm_start", step)
        chosen: Sequence[int] = np.asarray(rng.integers(len(train), size=batch)).tolist()
        return [(encoder.encode(train.question(index)), train.trace(index, rng, noise)) for index in chosen]

    return examples
