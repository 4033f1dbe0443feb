"""Groups, batches and a tiny learner, for the tests of packing, update, ranks and checkpoints."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from headrace.config import Config, LossConfig, SamplingConfig, ScratchTextModel, ScratchVisionModel
from headrace.credit.rules import credit_rules
from headrace.encoding import Encoder
from headrace.policy.model import Policy
from headrace.policy.packing import build_batch, response_lengths
from headrace.policy.parallel import Parallel
from headrace.policy.scratch import build_text, build_vision
from headrace.policy.update import Learner
from headrace.records import Completion, Group, Media, Prompt, Question, Reward, Rollout, StepBatch

SAMPLING = SamplingConfig(group_size=2, max_tokens=8)
BANNED = (7, 60)
"""Never drawn in these batches, left out of every softmax."""


def make_rollout(index: int, logprobs: Any, masked: Any = None, *, reward: float | None = 1.0, failure: str = "", ids: Any = None):
    """A rollout with these behaviour log-probs; token ids count up from 50 unless given."""
    length = len(logprobs)
    completion = Completion(
        token_ids=np.arange(50, 50 + length, dtype=np.int32) if ids is None else np.asarray(ids, dtype=np.int32),
        logprobs=np.asarray(logprobs, dtype=np.float32),
        masked=np.zeros(length, dtype=bool) if masked is None else np.asarray(masked, dtype=bool),
        versions=np.zeros(length, dtype=np.int32),
        finish_reason="stop",
    )
    score = None if reward is None else Reward(reward, reward)
    return Rollout(index=index, wave=1, arm="free", completion=completion, reward=score, failure=failure)


def make_group(
    rollouts: Sequence[Rollout], advantages: Any, prompt: Any = (1, 2, 3), name: str = "q", media: tuple[Media, ...] = ()
) -> Group:
    question = Question(id=name, messages=(), answer="", media=media)
    return Group(Prompt(question, np.asarray(prompt, dtype=np.int64)), tuple(rollouts), advantages=np.asarray(advantages, dtype=np.float32))


def random_groups(
    rng: np.random.Generator, groups: int, size: int = 4, longest: int = 9, zero_groups: int = 0, vocabulary: int = 64
) -> list[Group]:
    """Groups of random tokens and lengths, a fifth of the positions masked; the first ``zero_groups`` have no advantage."""
    allowed = np.setdiff1d(np.arange(vocabulary), BANNED)
    made = []
    for g in range(groups):
        rollouts = []
        for i in range(size):
            length = int(rng.integers(1, longest + 1))
            logprobs = -3 - 2 * rng.random(length)
            rollouts.append(make_rollout(i, logprobs, rng.random(length) < 0.2, ids=rng.choice(allowed, size=length)))
        advantages = np.zeros(size) if g < zero_groups else rng.standard_normal(size)
        made.append(make_group(rollouts, advantages, prompt=rng.choice(allowed, size=rng.integers(1, 6)), name=f"q{g}"))
    return made


def random_batch(seed: int, loss: LossConfig, groups: int = 3, **shape: int) -> StepBatch:
    return build_batch(random_groups(np.random.default_rng(seed), groups, **shape), loss, SAMPLING)


def tiny_model(directory: Path, hidden: int = 32, layers: int = 2, seed: int = 0) -> Path:
    """A model directory of about 30 k parameters and 64 or more head rows."""
    build_text(directory, ScratchTextModel(kind="scratch_text", hidden=hidden, layers=layers, heads=2), [f"w{i}" for i in range(56)], seed)
    return directory


def tiny_vision_model(directory: Path) -> Path:
    """A Qwen3-VL of the smallest sizes, head of 64 or more rows."""
    source = ScratchVisionModel(kind="scratch_vision", hidden=32, layers=2, heads=2, vision_hidden=32, vision_layers=2)
    build_vision(directory, source, [f"w{i}" for i in range(48)], 0)
    return directory


def picture_batch(model: Path, seed: int, loss: LossConfig) -> StepBatch:
    """Two groups about a picture each and two about none; a rank may therefore see no picture in a micro-batch."""
    encoder = Encoder.load(model, think_prefill=True, system_prompt=None, max_prompt_tokens=99)
    rng = np.random.default_rng(seed)
    groups = []
    for number, group in enumerate(random_groups(rng, 4, size=3, vocabulary=48)):
        path = model / f"{seed}.{number}.png"
        Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(path)
        media = (Media("image", str(path)),) if number % 2 else ()
        content = "<image> w1 w2" if media else "w3 w4"
        question = Question(f"q{number}", ({"role": "user", "content": content},), "", media)
        groups.append(replace(group, prompt=encoder.encode(question)))
    return build_batch(groups, loss, SAMPLING)


def with_claims(batch: StepBatch, seed: int = 0) -> StepBatch:
    """The batch with a claim on about half of every response that has a picture."""
    rng = np.random.default_rng(seed)
    lengths = response_lengths(batch.response_mask, batch.cu_seqlens)
    firsts = [int(rng.integers(0, length)) for length in lengths]
    spans = [((first, min(int(length), first + 1 + int(length) // 2)),) for first, length in zip(firsts, lengths, strict=True)]
    return replace(batch, claims=tuple(span if media else None for span, media in zip(spans, batch.media, strict=True)))


def make_config(directory: Path, **sections: Any) -> Config:
    """A configuration for the learner; sections are merged over small defaults."""
    tree: dict[str, Any] = {
        "model": {"source": {"kind": "directory", "path": str(directory)}},
        "questions": {"train": {"kind": "multi_hop"}},
        "sampling": {"max_tokens": SAMPLING.max_tokens, "group_size": 4},
        "optimizer": {"learning_rate": 1e-2, "weight_decay": 0.1, "warmup_steps": 2, "schedule": "cosine"},
        "learner": {"micro_batch_tokens": 48},
        "run": {"steps": 10},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return Config.model_validate(tree)


def make_learner(config: Config, parallel: Parallel | None = None) -> Learner:
    torch.manual_seed(0)
    policy = Policy.load(Path(config.model.source.path), config.model, torch.device("cpu"))
    return Learner(policy, config, BANNED, parallel, credit_rules(config.credit))


def moved(learner: Learner, seed: int = 1, scale: float = 0.03) -> Learner:
    """The learner with weights away from its reference, so that a KL term has something to say."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in learner.policy.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return learner
