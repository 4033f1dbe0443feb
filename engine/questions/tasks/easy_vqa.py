"""Multi-hop questions over real pictures: yes/no questions of the `easy-vqa` data set about one picture, each yielding a number.

A picture shows one coloured shape. A question reads (``<image>`` stands for the picture)::

    <image> q1 is there a red shape ? 4 : 7 ; q2 is no circle present ? 2 : 9 =

and is reasoned out by naming what is seen before any hop is decided::

    <think> blue rectangle ; q1 red no 7 sum 7 ; q2 not circle yes 2 sum 9 </think> <answer> 9 </answer>

The caption first is what makes the policy look: without it the decisions stay at chance.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from headrace.config import EasyVQASource
from headrace.questions.sets import Split
from headrace.questions.tasks import split_of
from headrace.records import Hint, Media, Question
from headrace.streams import stream

COLOURS = ("black", "blue", "brown", "gray", "green", "red", "teal", "yellow")
SHAPES = ("circle", "rectangle", "triangle")
MAX_VALUE = 9  # yes and no numbers are drawn from 1..MAX_VALUE
_MAX_DRAWS = 1_000


@dataclass(frozen=True, slots=True)
class Check:
    """A yes/no question of the data set with its answer."""

    text: str
    """Without the question mark."""
    holds: bool

    @property
    def attribute(self) -> str:
        """The colour or shape it asks about."""
        return next(word for word in self.text.split() if word in COLOURS or word in SHAPES)

    @property
    def negated(self) -> bool:
        """It asks whether the attribute is absent."""
        return not {"not", "no"}.isdisjoint(self.text.split())

    @property
    def asked(self) -> str:
        """What it asks about, as a response names it."""
        return f"not {self.attribute}" if self.negated else self.attribute


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture whose colour and shape the data set's answers tell."""

    name: str
    path: str
    colour: str
    shape: str
    checks: tuple[Check, ...]


@dataclass(frozen=True, slots=True)
class Composed:
    """One composed question: checks of one picture with the two numbers of each."""

    picture: Picture
    checks: tuple[Check, ...]
    numbers: tuple[tuple[int, int], ...]
    """(yes, no) of every check."""

    @property
    def answer(self) -> int:
        """Sum of the numbers that the checks yield."""
        return sum(yes if check.holds else no for check, (yes, no) in zip(self.checks, self.numbers, strict=True))

    def text(self) -> str:
        """The question as the policy reads it."""
        hops = zip(self.checks, self.numbers, strict=True)
        return "<image> " + " ; ".join(f"q{i} {check.text} ? {yes} : {no}" for i, (check, (yes, no)) in enumerate(hops, 1)) + " ="


@cache
def pictures(split: Literal["train", "test"]) -> tuple[Picture, ...]:
    """The data set's pictures of known colour and shape that have yes/no questions, by number.

    Raises:
        ValueError: the package is not installed.
    """
    try:
        import easy_vqa
    except ImportError as error:
        raise ValueError(f"questions: kind easy_vqa needs the package; install it with `pip install easy-vqa` ({error})") from None

    questions, paths = (
        (easy_vqa.get_train_questions(), easy_vqa.get_train_image_paths())
        if split == "train"
        else (easy_vqa.get_test_questions(), easy_vqa.get_test_image_paths())
    )
    seen: dict[int, set[str]] = defaultdict(set)
    checks: dict[int, list[Check]] = defaultdict(list)
    for text, answer, number in zip(*questions, strict=True):
        if answer not in ("yes", "no"):
            seen[number].add(answer)
            continue
        check = Check(text.rstrip("?").strip(), answer == "yes")
        checks[number].append(check)
        if check.holds != check.negated:
            seen[number].add(check.attribute)
    known = []
    for number in sorted(checks):
        colour, shape = (next((word for word in words if word in seen[number]), None) for words in (COLOURS, SHAPES))
        if colour and shape:
            known.append(Picture(f"{split}/{number}", paths[number], colour, shape, tuple(checks[number])))
    return tuple(known)


class EasyVQA:
    """Composed questions over the data set's pictures (see ``sets.TaskSet``)."""

    def __init__(self, source: EasyVQASource, seed: int, split: Split) -> None:
        if not source.hops or min(source.hops) < 1:
            raise ValueError(f"questions.{split}.hops = {list(source.hops)}: expected one or more counts of at least 1")
        self._by_hops = {n: [picture for picture in pictures(source.split) if len(picture.checks) >= n] for n in source.hops}
        for n, fitting in self._by_hops.items():
            if not fitting:
                raise ValueError(f"questions.{split}.hops: no picture has {n} yes/no questions")
        self._source, self._seed, self._split = source, seed, split

    def __len__(self) -> int:
        return self._source.count

    def composed(self, index: int) -> Composed:
        """What question ``index`` shows and asks."""
        if not 0 <= index < len(self):
            raise IndexError(f"question {index} of {len(self)}")
        rng = stream(self._seed, f"easy_vqa/{self._split}", index=index)
        for _ in range(_MAX_DRAWS):
            composed = self._draw(rng)
            if split_of(f"{composed.picture.name} {composed.text()}") == self._split:
                return composed
        raise AssertionError("a quarter of all candidates belongs to the rarer split")

    def question(self, index: int) -> Question:
        composed = self.composed(index)
        return Question(
            id=f"easy_vqa/{self._split}/{index}",
            messages=({"role": "user", "content": composed.text()},),
            answer=str(composed.answer),
            media=(Media("image", composed.picture.path),),
            source="easy_vqa",
            extra={"hops": len(composed.checks), "picture": composed.picture.name},
        )

    def trace(self, index: int, rng: np.random.Generator, noise: float = 0.0) -> str:
        composed = self.composed(index)
        total, steps = 0, [f"{composed.picture.colour} {composed.picture.shape}"]
        for number, (check, (yes, no)) in enumerate(zip(composed.checks, composed.numbers, strict=True), 1):
            verdict = check.holds ^ bool(rng.random() < noise)
            value = yes if verdict else no
            total += value
            steps.append(f"q{number} {check.asked} {'yes' if verdict else 'no'} {value} sum {total}")
        return f"<think> {' ; '.join(steps)} </think> <answer> {total} </answer>"

    def hint(self, index: int) -> Hint:
        """What the picture shows, and the first check worked out; a single check, which would be the answer, is only named."""
        composed = self.composed(index)
        seen = f"{composed.picture.colour} {composed.picture.shape}"
        check, (yes, no) = composed.checks[0], composed.numbers[0]
        step = f"q1 {check.asked}" + (f" {'yes' if check.holds else 'no'} {yes if check.holds else no}" if len(composed.checks) > 1 else "")
        return Hint(caption=seen, visual=seen, reasoning=step)

    def supports(self, index: int, claim: str) -> bool | None:
        """Whether the picture shows every colour and shape that a claim names; None for one that names none, or denies something."""
        picture, words = self.composed(index).picture, claim.split()
        named = [word for word in words if word in COLOURS or word in SHAPES]
        if not named or not {"not", "no"}.isdisjoint(words):
            return None
        return {picture.colour, picture.shape}.issuperset(named)

    def vocabulary(self) -> list[str]:
        hops = max(self._source.hops)
        asked = {
            word for split in ("train", "test") for picture in pictures(split) for check in picture.checks for word in check.text.split()
        }
        words = sorted(asked | {*COLOURS, *SHAPES, "yes", "no", "not", "sum", "?", ":", ";", "="})
        return [*words, *(f"q{i}" for i in range(1, hops + 1)), *(str(number) for number in range(1, hops * MAX_VALUE + 1))]

    def _draw(self, rng: np.random.Generator) -> Composed:
        count = int(rng.choice(self._source.hops))
        fitting = self._by_hops[count]
        picture = fitting[int(rng.integers(len(fitting)))]
        checks = tuple(picture.checks[i] for i in rng.choice(len(picture.checks), count, replace=False))
        numbers = tuple((int(yes), int(no)) for yes, no in (1 + rng.choice(MAX_VALUE, 2, replace=False) for _ in checks))
        return Composed(picture, checks, numbers)
