"""How a group is drawn: one free wave, or Confidence-Gated Exploration's two.

    wave 1 (free) -> score -> all accuracies equal? -> wave 2 (under the top-token mask, or free) -> score -> group

A share of the triggered groups, drawn from the stream ``control``, leaves its second wave unmasked: the randomised
control that tells what the mask recovers from what a second try recovers anyway.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from headrace.config import CGEConfig, SamplingConfig
from headrace.ranges import span
from headrace.records import Arm, Array, Engine, Group, Prompt, Rollout, SampleRequest, SamplingParameters, Scorer, TopTokenRule
from headrace.streams import stream, stream_seed


class ResponseText(Protocol):
    """Turns a response into text. Implemented by ``encoding.Encoder``."""

    def response_text(self, prompt: Prompt, token_ids: Array) -> str:
        """Text of a response, with the think tag that its prompt pre-filled."""
        ...


def first_wave_size(group_size: int, fraction: float = 0.5) -> int:
    """Rollouts of the free first wave: the rounded share (a half rounds to even), and at least one rollout in each wave.

    Raises:
        ValueError: a group of fewer than two rollouts cannot have two waves.
    """
    if group_size < 2:
        raise ValueError(f"group_size = {group_size}: two waves need at least 2 rollouts")
    return min(max(round(group_size * fraction), 1), group_size - 1)


def should_intervene(accuracies: Sequence[float | None], max_mean: float = 1.0) -> bool:
    """Whether a first wave gives no gradient: at least two scored rollouts (None and NaN are unscored), all equal, and
    their mean at most ``max_mean``."""
    valid = [accuracy for accuracy in accuracies if accuracy is not None and not math.isnan(accuracy)]
    return bool(len(valid) >= 2 and min(valid) == max(valid) and valid[0] <= max_mean)


@dataclass(frozen=True, slots=True)
class _Wave:
    """The second or only wave of one question, before it is drawn."""

    prompt: Prompt
    epoch: int
    arm: Arm = "free"
    first: tuple[Rollout, ...] = ()
    """Rollouts that are drawn already."""

    @property
    def number(self) -> Literal[1, 2]:
        return 2 if self.first else 1


async def draw_groups(
    prompts: Sequence[Prompt],
    engine: Engine,
    scorer: Scorer,
    config: SamplingConfig,
    *,
    seed: int,
    epochs: Sequence[int],
    encoder: ResponseText,
    scored: Callable[[Prompt, Sequence[Rollout]], None] | None = None,
) -> list[Group]:
    """Draw and score the group of every prompt, in order; rollouts are in index order.

    Each wave is one call of the engine for all prompts; questions are scored concurrently. Rollout i of a question has
    the seed of the stream ``rollout`` at (epoch, question, i) whatever the config, so a rollout that is not masked is
    the rollout of plain sampling. A response that the engine aborted is not scored and counts as failure ``aborted``.

    Args:
        seed: the run's.
        epochs: one per prompt.
        encoder: gives the text that is scored.
        scored: called with a question's rollouts as soon as they are scored: those of its first wave, then all of them.
    """
    size, cge = config.group_size, config.cge
    waves = [_Wave(prompt, epoch) for prompt, epoch in zip(prompts, epochs, strict=True)]
    if cge is None:
        with span("wave 1"):
            drawn = await _draw(waves, range(size), engine, scorer, encoder, config, seed)
        return _groups(waves, drawn, scored)
    split = first_wave_size(size, cge.first_wave_fraction)
    with span("wave 1"):
        first = await _draw(waves, range(split), engine, scorer, encoder, config, seed)
    if scored is not None:
        for wave, rollouts in zip(waves, first, strict=True):
            scored(wave.prompt, rollouts)
    waves = [replace(wave, first=tuple(rollouts), arm=_arm(wave, rollouts, cge, seed)) for wave, rollouts in zip(waves, first, strict=True)]
    with span("wave 2"):
        second = await _draw(waves, range(split, size), engine, scorer, encoder, config, seed)
    return _groups(waves, second, scored)


def _arm(wave: _Wave, first: Sequence[Rollout], cge: CGEConfig, seed: int) -> Arm:
    """What the second wave will be."""
    accuracies = [None if rollout.reward is None else rollout.reward.accuracy for rollout in first]
    if not should_intervene(accuracies, cge.max_mean):
        return "free"
    lot = stream(seed, "control", wave.epoch, wave.prompt.question.id).random()
    return "control" if lot < cge.control_share else "masked"


def _groups(
    waves: Sequence[_Wave], drawn: Sequence[Sequence[Rollout]], scored: Callable[[Prompt, Sequence[Rollout]], None] | None
) -> list[Group]:
    """The groups that are complete with the rollouts of their last wave."""
    groups = [
        Group(prompt=wave.prompt, rollouts=(*wave.first, *last), epoch=wave.epoch, intervened=wave.arm != "free", arm=wave.arm)
        for wave, last in zip(waves, drawn, strict=True)
    ]
    if scored is not None:
        for group in groups:
            scored(group.prompt, group.rollouts)
    return groups


async def _draw(
    waves: Sequence[_Wave], indices: range, engine: Engine, scorer: Scorer, encoder: ResponseText, config: SamplingConfig, seed: int
) -> list[list[Rollout]]:
    """The rollouts ``indices`` of every question, drawn in one call and scored."""
    requests = [_request(wave, index, config, seed) for wave in waves for index in indices]
    completions = await engine.sample(requests)
    if len(completions) != len(requests):
        raise RuntimeError(f"engine: {len(completions)} completions for {len(requests)} requests")
    assert all(request.mask or not completion.masked.any() for request, completion in zip(requests, completions, strict=True))
    following = iter(completions)
    rollouts = [
        [
            Rollout(
                index=index,
                wave=wave.number,
                arm=wave.arm,
                completion=completion,
                text=encoder.response_text(wave.prompt, completion.token_ids),
            )
            for index, completion in zip(indices, following, strict=False)
        ]
        for wave in waves
    ]
    with span("scoring"):
        return await asyncio.gather(*(_score(wave, drawn, scorer) for wave, drawn in zip(waves, rollouts, strict=True)))


def _request(wave: _Wave, index: int, config: SamplingConfig, seed: int) -> SampleRequest:
    cge = config.cge
    masked = cge is not None and wave.arm == "masked"
    return SampleRequest(
        prompt=wave.prompt,
        index=index,
        seed=stream_seed(seed, "rollout", wave.epoch, wave.prompt.question.id, index),
        parameters=SamplingParameters(
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            stop=config.stop,
            stop_ids=config.stop_ids,
        ),
        mask=TopTokenRule(threshold=cge.threshold, token_filter=cge.token_filter, cap=cge.cap) if masked else None,
        confidence=cge.threshold if cge else 0.95,
    )


async def _score(wave: _Wave, rollouts: Sequence[Rollout], scorer: Scorer) -> list[Rollout]:
    """Score what was drawn to its end; order is kept."""
    whole = [rollout for rollout in rollouts if rollout.completion.finish_reason != "abort"]
    scored = {rollout.index: rollout for rollout in await scorer.score(wave.prompt.question, whole)} if whole else {}
    return [scored.get(rollout.index) or replace(rollout, failure="aborted") for rollout in rollouts]
