"""Potential-aware query mining: what to do about questions that are always or never solved (paper 001, phase 0).

    pilot group ─► all right: trivial, kept by lot
                ├► mixed: distillation, trains as it is
                └► none right: impossible ─► text-only probe ─► the hint that its deficit asks for ─► drawn again under the hint

The pilot rollouts are the group that plain sampling draws, from the same seeds, and train unless a hint replaces them. A share of
the hinted questions is also drawn again without the hint: what a new try alone reclaims. Hints never reach an evaluation.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil, fsum
from typing import Any, Literal, Protocol

from headrace.config import PAQMConfig, SamplingConfig
from headrace.records import Group, Hint, Mining, Prompt, Question
from headrace.selection.degenerate import outcomes, rates, share_metrics
from headrace.streams import stream, stream_seed

Zone = Literal["distillation", "trivial", "impossible"]
ZONES: tuple[Zone, ...] = ("distillation", "trivial", "impossible")
DEFICITS = ("perceptual", "cognitive")
PROBE_TEXT = "(In place of the {kind}: {caption})"
_PLACEHOLDER = re.compile(r"<(image|video)>")


def zone(rewards: Sequence[float]) -> Zone:
    """Zone of a question by its pilot rollouts; a reward of 1 or more is right.

    Raises:
        ValueError: there is no reward.
    """
    if not len(rewards):
        raise ValueError("paqm.zone: expected at least one reward, got none")
    right = sum(reward >= 1 for reward in rewards)
    return "trivial" if right == len(rewards) else "distillation" if right else "impossible"


def deficit(probe: Sequence[float], share: float = 0.0) -> Literal["perceptual", "cognitive"]:
    """What an impossible question lacks, by its text-only probe: solved without the picture, it was the perception that failed.

    Args:
        probe: accuracies of the probe's rollouts; none at all is a failure to reason.
        share: the probe succeeds with at least one right rollout and at least this share of right ones.
    """
    needed = max(1, ceil(round(share * len(probe), 9)))
    return "perceptual" if sum(accuracy >= 1 for accuracy in probe) >= needed else "cognitive"


def keeps_trivial(question_id: str, epoch: int, share: float) -> bool:
    """Whether a trivial question trains in this epoch: a hash of both, in [0, 1), lies below ``share``."""
    digest = hashlib.sha256(f"paqm:{question_id}:{epoch}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < share


def hinted(question: Question, hint: str, template: str) -> Question:
    """The question with a hint after the text of its last message."""
    *before, last = question.messages
    content = last["content"] + template.replace("{hint}", hint)
    return replace(question, messages=(*before, {**last, "content": content}))


def without_media(question: Question, caption: str) -> Question:
    """The question with its pictures and clips replaced by words: the first by the caption, the others by nothing."""
    waiting = [caption]

    def words(match: re.Match[str]) -> str:
        return PROBE_TEXT.format(kind=match[1], caption=waiting.pop()) if waiting else ""

    messages = tuple({**message, "content": _PLACEHOLDER.sub(words, message["content"])} for message in question.messages)
    return replace(question, messages=messages, media=())


class Draw(Protocol):
    """Draws and scores one group per prompt, in order (``sampling.waves.draw_groups`` on the run's engine)."""

    async def __call__(self, prompts: Sequence[Prompt], sampling: SamplingConfig, *, seed: int, epochs: Sequence[int]) -> list[Group]: ...


class Miner:
    """Draws groups as plain sampling does and mines their questions.

        miner = Miner(config.paqm, config.sampling, draw, encoder.encode, load_hints(config.paqm.hints), config.run.seed)
        groups = await miner.draw(prompts, epochs)      # each carries its ``mining``; those not kept do not train

    Every further draw of a question has a seed of its own, so mining never moves the pilot's numbers, nor the control the hint's.
    """

    def __init__(
        self,
        config: PAQMConfig,
        sampling: SamplingConfig,
        draw: Draw,
        encode: Callable[[Question], Prompt],
        hints: Mapping[str, Hint],
        seed: int,
    ) -> None:
        """Args:
        draw: draws and scores groups.
        encode: makes a prompt of a question; a ValueError means that it cannot.
        hints: by question id.
        seed: the run's.
        """
        self.config, self.sampling, self.hints, self.seed = config, sampling, hints, seed
        self._draw, self._encode = draw, encode

    async def draw(self, prompts: Sequence[Prompt], epochs: Sequence[int]) -> list[Group]:
        """One group per prompt, in order; a hinted question's has the hinted prompt. A group nobody scored is not mined."""
        groups = [self._zoned(group) for group in await self._draw(prompts, self.sampling, seed=self.seed, epochs=epochs)]
        impossible = [place for place, group in enumerate(groups) if group.mining is not None and group.mining.zone == "impossible"]
        for place, group in zip(impossible, await self._reclaimed([groups[place] for place in impossible]), strict=True):
            groups[place] = group
        return groups

    def _zoned(self, group: Group) -> Group:
        accuracies = outcomes(group)
        if not accuracies:
            return group
        where = zone(accuracies)
        kept = where != "trivial" or keeps_trivial(group.prompt.question.id, group.epoch, self.config.keep_trivial)
        entropies = [entropy for rollout in group.rollouts if (entropy := rollout.completion.path_entropy) is not None]
        entropy = fsum(entropies) / len(entropies) if entropies else None
        return replace(group, mining=Mining(where, kept, tuple(accuracies), entropy))

    async def _reclaimed(self, pilots: Sequence[Group]) -> list[Group]:
        """Impossible groups, each drawn again under its hint, or as it was with the reason."""
        groups = await self._diagnosed(pilots)
        plans = [self._hinted_prompt(group) for group in groups]
        groups = [_mined(group, outcome=plan if isinstance(plan, str) else "hinted") for group, plan in zip(groups, plans, strict=True)]
        ready = {place: plan for place, plan in enumerate(plans) if isinstance(plan, Prompt)}
        second = await self._again("hinted", list(ready.values()), [groups[place] for place in ready])
        for place, group in zip(ready, second, strict=True):
            found = _mined(groups[place], extra=len(group.rollouts), hinted=tuple(outcomes(group))).mining
            groups[place] = replace(group, mining=found)
        chosen = [place for place in ready if self._is_control(pilots[place])]
        control = await self._again("control", [pilots[place].prompt for place in chosen], [pilots[place] for place in chosen])
        for place, group in zip(chosen, control, strict=True):
            groups[place] = _mined(groups[place], extra=len(group.rollouts), control=tuple(outcomes(group)))
        return groups

    async def _diagnosed(self, pilots: Sequence[Group]) -> list[Group]:
        """The groups with their deficits, as far as there is a hint to choose."""
        probes: dict[int, Prompt] = {}
        for place, group in enumerate(pilots):
            question, hint = group.prompt.question, self._hint(group)
            caption = str(question.extra.get("caption") or hint.caption)
            if question.media and caption and (hint.visual or hint.reasoning):
                try:
                    probes[place] = self._encode(without_media(question, caption))
                except ValueError:
                    continue  # words that the encoder does not take are no probe
        free = self.sampling.model_copy(update={"cge": None})
        answers = await self._again("probe", list(probes.values()), [pilots[place] for place in probes], free)
        probed = dict(zip(probes, answers, strict=True))
        return [self._with_deficit(group, probed.get(place)) for place, group in enumerate(pilots)]

    def _with_deficit(self, group: Group, probe: Group | None) -> Group:
        """A probe tells the deficit. Without one, a picture counts as the cause where only its decomposition is at hand."""
        question, hint = group.prompt.question, self._hint(group)
        if probe is not None:
            accuracies = outcomes(probe)
            choice = len(question.answer.strip()) == 1 and question.answer.strip().isalpha()
            found = deficit(accuracies, self.config.probe_share_choice if choice else self.config.probe_share)
            return _mined(group, extra=len(probe.rollouts), deficit=found, probe=tuple(accuracies))
        if not hint.visual and not hint.reasoning:
            return group
        return _mined(group, deficit="perceptual" if question.media and not hint.reasoning else "cognitive")

    def _hinted_prompt(self, group: Group) -> Prompt | Literal["no_hint", "unusable_hint"]:
        hint, found = self._hint(group), group.mining.deficit if group.mining else ""
        text = {"perceptual": hint.visual, "cognitive": hint.reasoning, "": ""}[found]
        if not text:
            return "no_hint"
        try:
            return self._encode(hinted(group.prompt.question, text, self.config.hint_template))
        except ValueError:
            return "unusable_hint"

    def _hint(self, group: Group) -> Hint:
        return self.hints.get(group.prompt.question.id, Hint())

    def _is_control(self, group: Group) -> bool:
        return bool(stream(self.seed, "paqm/lot", group.epoch, group.prompt.question.id).random() < self.config.control_share)

    async def _again(
        self, purpose: str, prompts: Sequence[Prompt], groups: Sequence[Group], sampling: SamplingConfig | None = None
    ) -> list[Group]:
        """Draw a further time, with the seeds of that purpose."""
        if not prompts:
            return []
        seed = stream_seed(self.seed, f"paqm/{purpose}")
        return await self._draw(prompts, sampling or self.sampling, seed=seed, epochs=[group.epoch for group in groups])


def _mined(group: Group, *, extra: int = 0, **found: Any) -> Group:
    """The group with more known about its question."""
    assert group.mining is not None
    return replace(group, mining=replace(group.mining, extra_rollouts=group.mining.extra_rollouts + extra, **found))


# ------------------------------------------------------------------------------------------------------------ metrics


def metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Zones, deficits, what was reclaimed and what it cost, over every mined group of a step; rates beside their counts (``_n``)."""
    mined = [group.mining for group in groups if group.mining is not None]
    by_zone = {name: [each for each in mined if each.zone == name] for name in ZONES}
    impossible, trivial = by_zone["impossible"], by_zone["trivial"]
    hinted = [each for each in impossible if each.outcome == "hinted"]
    controlled = [each for each in hinted if each.control]
    reclaimed = sum(_solved(each.hinted) for each in hinted)
    paired = {
        "paqm/control_reclaimed": sum(_solved(each.control) for each in controlled),
        "paqm/paired_reclaimed": sum(_solved(each.hinted) for each in controlled),
    }
    return {
        "paqm/questions_n": float(len(mined)),
        **rates({f"paqm/{name}": len(found) for name, found in by_zone.items()}, len(mined)),
        **rates({"paqm/trivial_kept": sum(each.kept for each in trivial)}, len(trivial)),
        **rates({f"paqm/{name}": sum(each.deficit == name for each in impossible) for name in DEFICITS}, len(impossible)),
        **rates({"paqm/reclaimed": reclaimed}, len(impossible)),
        **rates({"paqm/reclaimed_of_hinted": reclaimed}, len(hinted)),
        **rates(paired, len(controlled)),
        "paqm/only_hint_n": float(sum(_solved(each.hinted) and not _solved(each.control) for each in controlled)),
        "paqm/only_control_n": float(sum(_solved(each.control) and not _solved(each.hinted) for each in controlled)),
        "paqm/probed_n": float(sum(bool(each.probe) for each in impossible)),
        "paqm/hinted_n": float(len(hinted)),
        "paqm/control_n": float(len(controlled)),
        **{f"paqm/{name}_n": float(sum(each.outcome == name for each in impossible)) for name in ("no_hint", "unusable_hint")},
        "paqm/extra_rollouts_n": float(sum(each.extra_rollouts for each in mined)),
        **_path_entropies(by_zone),
        **share_metrics("pilot", [each.pilot for each in mined]),
        **share_metrics("after_paqm", [outcomes(group) for group in groups if group.mining is not None and group.mining.kept]),
    }


def _path_entropies(by_zone: Mapping[Zone, Sequence[Mining]]) -> dict[str, float]:
    """Mean path entropy of each zone's pilots; logged, no rule goes by it."""
    known = {name: [each.path_entropy for each in found if each.path_entropy is not None] for name, found in by_zone.items()}
    return {f"paqm/path_entropy_{name}": fsum(values) / len(values) for name, values in known.items() if values}


def _solved(accuracies: Sequence[float]) -> bool:
    return any(accuracy >= 1 for accuracy in accuracies)
