"""Our GRPO step, and what it and another's have in common."""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.config import Config, DirectoryModel, ModelConfig, MultiHopSource, ScratchTextModel
from headrace.encoding import Encoder
from headrace.journal.journal import Journal
from headrace.policy.model import Policy
from headrace.policy.scratch import build_text
from headrace.policy.update import Learner
from headrace.questions.tasks.multi_hop import MultiHop
from headrace.records import Question
from headrace.rollout.side import OwnRollouts, Sides
from headrace.sampling.local import LocalEngine
from headrace.task_sets import GivenQuestions

MODEL = ScratchTextModel(kind="scratch_text", hidden=128, layers=4, heads=4)
HOPS = 3  # of every question: prompts of nearly one length


@dataclass(frozen=True, slots=True)
class StepTime:
    """Wall-clock seconds of one step."""

    whole: float
    sampling: float
    """Rewards included."""

    @property
    def update(self) -> float:
        """Everything else: forward, backward, optimizer, logs."""
        return self.whole - self.sampling


@dataclass(frozen=True)
class Setting:
    """What both sides train, on what."""

    folder: Path
    """Holds the model in ``model``; runs may write beside it."""
    encoder: Encoder
    questions: tuple[Question, ...]
    """Enough for every step."""
    config: Config
    prompt_tokens: int
    """Of every prompt."""
    parameters: int

    @property
    def steps(self) -> int:
        return self.config.run.steps

    @property
    def rows(self) -> int:
        return self.config.run.questions_per_step * self.config.sampling.group_size


def reward(text: str) -> float:
    """How many words are from the first half of the alphabet, later ones weighing more: cheap, about 1, and two responses hardly tie."""
    words = text.split()
    return 2 * sum(place for place, word in enumerate(words, start=1) if word < "h") / sum(range(1, len(words) + 1))


def make_setting(folder: Path, prompts: int, rollouts: int, tokens: int, steps: int) -> Setting:
    """Write the model, with random weights, and pick questions of one length."""
    wanted = prompts * steps
    task = MultiHop(MultiHopSource(kind="multi_hop", hops=(HOPS,), count=8 * wanted), seed=0, split="train")
    model = folder / "model"
    build_text(model, MODEL, task.vocabulary(), seed=0)
    encoder = Encoder.load(model, think_prefill=True, system_prompt=None, max_prompt_tokens=1 << 20)
    questions = [task.question(index) for index in range(len(task))]
    lengths = [len(encoder.encode(question).token_ids) for question in questions]
    usual, count = Counter(lengths).most_common(1)[0]
    if count < wanted:
        raise ValueError(f"step: {count} of {len(questions)} questions have {usual} tokens, expected {wanted}")
    config = Config.model_validate(
        {
            "run": {"name": "ours", "folder": str(folder), "steps": steps, "questions_per_step": prompts},
            "model": {"source": {"kind": "directory", "path": str(model)}},
            "sampling": {"group_size": rollouts, "max_tokens": tokens},
            "optimizer": {"learning_rate": 1e-4},
            "learner": {"micro_batch_tokens": prompts * rollouts * (usual + tokens)},
            "journal": {"tensorboard": False},
        }
    )
    picked = tuple(question for question, length in zip(questions, lengths, strict=True) if length == usual)[:wanted]
    parameters = sum(parameter.numel() for parameter in load_policy(model).parameters())
    return Setting(folder, encoder, picked, config, usual, parameters)


def load_policy(model: Path) -> Policy:
    return Policy.load(model, ModelConfig(source=DirectoryModel(kind="directory", path=model)), "cpu")


class OwnStep:
    """Steps as the trainer makes them, one per call; no response ends before its last token."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        config = setting.config
        policy = load_policy(setting.folder / "model")
        encoder = replace(setting.encoder, eos_ids=())
        self.journal = Journal(config, config.run.steps, quiet=True)
        self.journal.start()
        self.learner = Learner(policy, config, encoder.banned_ids)
        sides = Sides(GivenQuestions(setting.questions), None, lambda question, text: reward(text))
        engine = LocalEngine(policy, encoder, batch_rows=config.sampling.batch_rows)
        self.rollouts = OwnRollouts(config, sides, engine, encoder, self.journal.warn)
        self.loop = asyncio.new_event_loop()
        self.done = 0

    def __enter__(self) -> "OwnStep":
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.run_until_complete(self.rollouts.close())
        self.loop.close()
        self.journal.close()

    def __call__(self) -> StepTime:
        """One step, timed."""
        return self.loop.run_until_complete(self._step())

    async def _step(self) -> StepTime:
        self.done += 1
        started = time.perf_counter()
        with self.journal.phase("sampling"):
            drawn = await self.rollouts.draw()
        sampled = time.perf_counter()
        with self.journal.phase("update"):
            assert drawn.batch is not None
            metrics = self.learner.update(drawn.batch)
        await self.rollouts.settle(drawn.fates)
        await self.rollouts.release()
        self.journal.log(self.done, {**metrics, **drawn.counts(0)}, drawn.sampled, self.setting.encoder.decode)
        whole = time.perf_counter() - started
        tokens = self.setting.rows * self.setting.config.sampling.max_tokens
        if metrics["learner/response_tokens"] != tokens:
            raise ValueError(f"step: trained on {metrics['learner/response_tokens']:.0f} response tokens, expected {tokens}")
        return StepTime(whole, sampled - started)
