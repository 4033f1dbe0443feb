"""From kept questions to rows: at most two a video, the held-out split, the gates."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from headrace.questions.hopchain import film
from headrace.questions.hopchain.prompt_texts import prompt
from headrace.questions.hopchain.quotas import Cell, Draw, draw_stratified, scale
from headrace.questions.hopchain.records import Candidate, Dropped, Video
from headrace.questions.hopchain.render import render
from headrace.questions.hopchain.settings import CorpusConfig, HeldOutConfig

Split = Literal["train", "held_out"]
POOL = 4
"""Videos among which each held-out one is chosen."""
Accuracy = Callable[[str, str], float]
"""``(response, reference)`` to 1 where the response's answer is right: the trainer's own scorer, for the round trip."""


@dataclass(frozen=True)
class Kept:
    """A question that passed every stage."""

    candidate: Candidate
    video: Video
    proxy: Path
    shots: int
    """Of the whole video."""

    @property
    def id(self) -> str:
        return self.candidate.specification.question_id

    @property
    def hops(self) -> int:
        return len(self.candidate.hops)


@dataclass
class Assembly:
    """The data set, and what did not get into it."""

    splits: dict[Split, list[Kept]] = field(default_factory=lambda: {"train": [], "held_out": []})
    dropped: dict[str, Dropped] = field(default_factory=dict)
    """Question id to the reason: ``surplus``, ``held_out_sibling`` or a gate's."""
    deviation: int = 0
    """Of the held-out split from its quotas, over all axes."""
    wanted: int = 0
    """Held-out questions that the configuration would have in a corpus of this size."""


def assemble(kept: Sequence[Kept], config: CorpusConfig, accuracy: Accuracy) -> Assembly:
    """Choose, split, and let every row through the gates."""
    assembly = Assembly()
    by_video: dict[str, list[Kept]] = defaultdict(list)
    for question in kept:
        by_video[question.video.id].append(question)
    for identity, questions in by_video.items():
        sound = [question for question in questions if _passes(question, config, accuracy, assembly)]
        by_video[identity] = least_alike(sound, config.keep_per_video)
        for question in sound:
            if question not in by_video[identity]:
                assembly.dropped[question.id] = Dropped("surplus", f"{config.keep_per_video} questions a video")
    by_video = {identity: questions for identity, questions in by_video.items() if questions}
    held_out, draw, assembly.wanted = hold_out(by_video, config.held_out)
    assembly.deviation = draw.deviation
    for identity in sorted(by_video):
        for question in by_video[identity]:
            if identity not in held_out:
                assembly.splits["train"].append(question)
            elif held_out[identity] is question:
                assembly.splits["held_out"].append(question)
            else:
                assembly.dropped[question.id] = Dropped("held_out_sibling", "its video is held out with another question")
    return assembly


def least_alike(questions: Sequence[Kept], most: int) -> list[Kept]:
    """The ``most`` questions that share the fewest scene references and hop types; the first such set."""
    if len(questions) <= most:
        return list(questions)

    def shared(first: Kept, second: Kept) -> int:
        scenes, types = (
            [{part for hop in question.candidate.hops for part in get(hop)} for question in (first, second)]
            for get in (lambda hop: hop.scenes, lambda hop: (hop.type,))
        )
        return len(scenes[0] & scenes[1]) + len(types[0] & types[1])

    return list(min(combinations(questions, most), key=lambda chosen: sum(shared(*pair) for pair in combinations(chosen, 2))))


def hold_out(by_video: Mapping[str, Sequence[Kept]], rules: HeldOutConfig) -> tuple[dict[str, Kept], Draw, int]:
    """The held-out question of each held-out video, how the draw went, and how many it should have been."""
    order = sorted(by_video)
    Random(rules.split_seed).shuffle(order)
    wanted = min(rules.size, int(rules.max_share * len(order)))
    eligible: list[Kept] = []
    for identity in order:
        fitting = [
            q for q in by_video[identity] if q.hops >= rules.min_hops and len(set(q.candidate.specification.types)) >= rules.min_types
        ]
        if fitting:
            eligible.append(max(fitting, key=lambda question: question.hops))
    size = min(wanted, len(eligible))
    pool = eligible[: POOL * size]
    if not size:
        return {}, Draw((), 0), wanted
    axes = _axes(pool, rules)
    cells: list[Cell] = [tuple(name(question) for name, _ in axes) for question in pool]
    draw = draw_stratified(cells, [scale(weights, size) for _, weights in axes], size, rules.draw_seed)
    return {pool[index].video.id: pool[index] for index in draw.chosen}, draw, wanted


def _axes(pool: Sequence[Kept], rules: HeldOutConfig) -> list[tuple[Callable[[Kept], str], dict[str, float]]]:
    """Name of a question's cell and weights of the cells, per axis."""
    axes: list[tuple[Callable[[Kept], str], dict[str, float]]] = [
        (lambda question: str(question.hops), _weights(rules.hops, (str(question.hops) for question in pool))),
        (lambda question: question.video.source, _weights(rules.sources, (question.video.source for question in pool))),
    ]
    if rules.shots is not None:
        bounds = sorted(bound for bound in rules.shots if bound)
        axes.append((lambda question: str(next((bound for bound in bounds if question.shots < bound), 0)), _weights(rules.shots, ())))
    return axes


def _weights(given: Mapping[Any, float] | None, own: Iterable[str]) -> dict[str, float]:
    """Weights by cell name: as given, or as the corpus has them."""
    if given is not None:
        return {str(name): weight for name, weight in given.items()}
    weights: dict[str, float] = defaultdict(float)
    for name in own:
        weights[name] += 1.0
    return dict(sorted(weights.items()))


def row(question: Kept, config: CorpusConfig) -> dict[str, Any]:
    """The row of a question, as ``questions.rows`` reads it."""
    candidate, specification = question.candidate, question.candidate.specification
    text = render(specification, candidate.hops)
    system = prompt("system") if config.system_prompt is None else config.system_prompt
    return {
        "prompt": [{"role": "system", "content": system}, {"role": "user", "content": f"<video>\n{text}"}],
        "images": [],
        "videos": [{"video": question.proxy.absolute().as_uri(), "nframes": config.frames, "max_pixels": config.max_pixels}],
        "data_source": config.name,
        "ability": "video",
        "reward_model": {"ground_truth": str(candidate.answer), "style": "rule"},
        "extra_info": {
            "reward_type": "numeric",
            "answer": str(candidate.answer),
            "hops": question.hops,
            "hop_types": list(specification.types),
            "question_id": question.id,
            "video_id": question.video.id,
            "link": specification.link,
            "tolerance": 0.0,
        },
    }


def gate(made: Mapping[str, Any], config: CorpusConfig, accuracy: Accuracy) -> None:
    """Last look at a row.

    Raises:
        Dropped: with the gate's name as reason.
    """
    answer, extra = made["reward_model"]["ground_truth"], made["extra_info"]
    if not answer.lstrip("-").isdigit():
        raise Dropped("answer", f"{answer!r} is no integer")
    if extra["answer"] != answer:
        raise Dropped("answer", f"extra_info has {extra['answer']!r}, ground_truth {answer!r}")
    if not extra["tolerance"] < 1:
        raise Dropped("tolerance", f"{extra['tolerance']} would let a wrong integer pass")
    if accuracy(gold(answer), answer) < 1 or accuracy(gold(str(int(answer) + 7)), answer) >= 1:
        raise Dropped("round_trip", f"the scorer does not tell {answer} from {int(answer) + 7}")
    for clip in made["videos"]:
        path = Path(unquote(urlsplit(clip["video"]).path))
        frames = film.probe(path).frames
        if frames != config.frames:
            raise Dropped("frames", f"{path}: has {frames} frames, expected {config.frames}")


def gold(answer: str) -> str:
    """A response in the contract's form."""
    return f"<think>Adding the values gives {answer}.</think>\n<answer>\\boxed{{{answer}}}</answer>"


def _passes(question: Kept, config: CorpusConfig, accuracy: Accuracy, assembly: Assembly) -> bool:
    try:
        gate(row(question, config), config, accuracy)
    except Dropped as drop:
        assembly.dropped[question.id] = drop
        return False
    return True
