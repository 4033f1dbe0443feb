"""The policy that reinforcement learning starts from: a model directory, converted, made or warm-started once and cached."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from headrace.checkpoint import export
from headrace.config import Config, ConfigError, WarmStartConfig
from headrace.encoding import Encoder
from headrace.journal.journal import Journal
from headrace.policy.model import Policy
from headrace.policy.sources import materialise, once
from headrace.policy.warm_start import warm_start
from headrace.questions.hints import Scripted
from headrace.questions.sets import QuestionSet, TaskSet
from headrace.records import Prompt
from headrace.selection.paqm import hinted
from headrace.streams import stream


def encoder_of(directory: Path, config: Config) -> Encoder:
    """The encoder of a model directory, as the run configures it."""
    return Encoder.load(
        directory,
        think_prefill=config.sampling.think_prefill,
        system_prompt=config.questions.system_prompt,
        max_prompt_tokens=config.questions.max_prompt_tokens,
        stop_ids=config.sampling.stop_ids,
    )


def starting_model(config: Config, questions: QuestionSet | None, device: torch.device, journal: Journal) -> Path:
    """Directory of the starting policy.

    Args:
        questions: the configured training questions; scratch models take their vocabulary and warm starts their traces.

    Raises:
        ConfigError: a warm start without a task generator.
        ValueError: the model source cannot be used.
    """
    task = questions if isinstance(questions, TaskSet) else None
    base = materialise(config.model.source, config.run.cache, config.run.seed, task.vocabulary() if task else None)
    if config.warm_start is None:
        return base
    if task is None:
        raise ConfigError("warm_start: questions.train has no traces to learn from; leave warm_start out, or use a task generator")
    directory = config.run.cache / "warm_start" / _key(config, base)
    if directory.exists():
        journal.say(f"warm start: cached in {directory}")
        return directory
    encoder = encoder_of(base, config)
    policy = Policy.load(base, config.model.model_copy(update={"train_vision": True, "lora": None}), device)
    with journal.phase("warm start") as tick:
        warm_start(policy, encoder, config.warm_start, _traces(task, encoder, config.warm_start, config.run.seed), config.run.seed, tick)
    return once(directory, lambda part: export(policy, encoder, part))


def _key(config: Config, base: Path) -> str:
    """Name of a warm start by everything that its weights depend on."""
    parts = config.model_dump(mode="json")
    questions, model = parts["questions"], parts["model"]
    own = model["source"]["kind"] == "directory"  # a model made in the cache says in its name what is in it
    text = json.dumps(
        [
            str(base.resolve()) if own else base.name,
            model["dtype"],
            parts["warm_start"],
            questions["train"],
            questions["system_prompt"],
            [parts["sampling"][name] for name in ("think_prefill", "stop_ids")],
            config.run.seed,
        ]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _traces(task: TaskSet, encoder: Encoder, config: WarmStartConfig, seed: int) -> Callable[[int, float], list[tuple[Prompt, str]]]:
    """``examples(step, noise)``: a batch of prompts with gold responses, drawn with replacement.

    Raises:
        ConfigError: hints are asked for of a task that has none.
    """
    if config.hinted and not isinstance(task, Scripted):
        raise ConfigError("warm_start.hinted: these questions do not hint at themselves; leave it out")

    def example(index: int, noise: float, rng: np.random.Generator, hint: bool) -> tuple[Prompt, str]:
        question = task.question(index)
        if hint and isinstance(task, Scripted):
            question, noise = hinted(question, task.hint(index).reasoning, config.hint_template), 0.0
        return encoder.encode(question), task.trace(index, rng, noise)

    def examples(step: int, noise: float) -> list[tuple[Prompt, str]]:
        rng = stream(seed, "warm_start", step)
        chosen = rng.integers(len(task), size=config.batch).tolist()
        lots = stream(seed, "warm_start/hints", step).random(config.batch) < config.hinted
        return [example(index, noise, rng, bool(hint)) for index, hint in zip(chosen, lots, strict=True)]

    return examples
