"""Multi-hop questions over a written scene: each hop is a yes/no question that yields one of two integers; the answer is their sum.

A question reads::

    ball=4 ; drum=2 ; kite=8 ; lamp=9 | q1 lamp > drum ? 2 : 5 ; q2 ball > kite ? 7 : 3 =

and is reasoned out by restating the evidence of every hop beside a running sum::

    <think> q1 lamp lamp=9 > drum drum=2 yes 2 sum 2 ; q2 ball ball=4 > kite kite=8 no 3 sum 5 </think> <answer> 5 </answer>

Every word is one token. Numbered hops, restated names and facts of one token (``lamp=9``) turn every look-up into one match and copy, which
three layers learn within a few hundred steps; with name and value as two tokens they had not learned it after six hundred.
"""

from dataclasses import dataclass
from itertools import permutations

import numpy as np

from headrace.config import MultiHopSource
from headrace.questions.sets import Split
from headrace.questions.tasks import split_of
from headrace.records import Hint, Question
from headrace.streams import stream

OBJECTS = ("ball", "cone", "disc", "drum", "fork", "gear", "jar", "kite", "lamp", "mug", "ring", "star")
_MAX_DRAWS = 10_000


@dataclass(frozen=True, slots=True)
class Hop:
    """One check: is ``left`` worth more than ``right``? It yields ``yes`` or ``no``."""

    left: str
    right: str
    yes: int
    no: int


@dataclass(frozen=True, slots=True)
class Scene:
    """The evidence and the checks of one question."""

    values: dict[str, int]
    """Object name -> value, in the order shown; all values differ."""
    hops: tuple[Hop, ...]

    def holds(self, hop: Hop) -> bool:
        """The truth of one check."""
        return self.values[hop.left] > self.values[hop.right]

    @property
    def answer(self) -> int:
        """Sum over the hops of the number each yields."""
        return sum(hop.yes if self.holds(hop) else hop.no for hop in self.hops)

    def fact(self, name: str) -> str:
        """What the evidence says about one object."""
        return f"{name}={self.values[name]}"

    def step(self, number: int, hop: Hop, verdict: bool) -> str:
        """Hop ``number`` reasoned out with that verdict, up to the number it yields."""
        left, right = (f"{name} {self.fact(name)}" for name in (hop.left, hop.right))
        return f"q{number} {left} > {right} {'yes' if verdict else 'no'} {hop.yes if verdict else hop.no}"

    def text(self) -> str:
        """The question as the policy reads it."""
        evidence = " ; ".join(map(self.fact, self.values))
        checks = " ; ".join(f"q{i} {hop.left} > {hop.right} ? {hop.yes} : {hop.no}" for i, hop in enumerate(self.hops, 1))
        return f"{evidence} | {checks} ="


class MultiHop:
    """Generated multi-hop questions (see ``sets.TaskSet``)."""

    def __init__(self, source: MultiHopSource, seed: int, split: Split) -> None:
        if source.objects > min(len(OBJECTS), source.max_value):
            raise ValueError(
                f"questions.{split}.objects = {source.objects}: values must differ, so at most max_value = {source.max_value} "
                f"objects can be shown, and there are {len(OBJECTS)} names"
            )
        if not source.hops or min(source.hops) < 1:
            raise ValueError(f"questions.{split}.hops = {list(source.hops)}: expected one or more counts of at least 1")
        self._source, self._seed, self._split = source, seed, split

    def __len__(self) -> int:
        return self._source.count

    def scene(self, index: int) -> Scene:
        """What question ``index`` shows and asks."""
        if not 0 <= index < len(self):
            raise IndexError(f"question {index} of {len(self)}")
        rng = stream(self._seed, f"multi_hop/{self._split}", index=index)
        for _ in range(_MAX_DRAWS):
            scene = self._draw(rng)
            if split_of(scene.text()) == self._split:
                return scene
        raise ValueError(f"questions.{self._split}: hops, objects and max_value are so small that no {self._split} question exists")

    def question(self, index: int) -> Question:
        scene = self.scene(index)
        return Question(
            id=f"multi_hop/{self._split}/{index}",
            messages=({"role": "user", "content": scene.text()},),
            answer=str(scene.answer),
            source="multi_hop",
            extra={"hops": len(scene.hops)},
        )

    def trace(self, index: int, rng: np.random.Generator, noise: float = 0.0) -> str:
        scene = self.scene(index)
        total, steps = 0, []
        for number, hop in enumerate(scene.hops, 1):
            verdict = scene.holds(hop) ^ bool(rng.random() < noise)
            value = hop.yes if verdict else hop.no
            total += value
            steps.append(f"{scene.step(number, hop, verdict)} sum {total}")
        return f"<think> {' ; '.join(steps)} </think> <answer> {total} </answer>"

    def hint(self, index: int) -> Hint:
        """The first hop worked out; of a single hop, which would be the answer, the evidence alone."""
        scene = self.scene(index)
        step = scene.step(1, scene.hops[0], scene.holds(scene.hops[0]))
        return Hint(reasoning=step if len(scene.hops) > 1 else step.rsplit(" ", 2)[0])

    def vocabulary(self) -> list[str]:
        hops = max(self._source.hops)
        numbers = [str(number) for number in range(1, hops * self._source.max_value + 1)]
        facts = [f"{name}={value}" for name in OBJECTS for value in range(1, self._source.max_value + 1)]
        return [*(f"q{i}" for i in range(1, hops + 1)), *OBJECTS, *facts, *numbers, ">", "?", ":", ";", "|", "=", "yes", "no", "sum"]

    def _draw(self, rng: np.random.Generator) -> Scene:
        source = self._source
        names = [OBJECTS[i] for i in rng.choice(len(OBJECTS), source.objects, replace=False)]
        values = 1 + rng.choice(source.max_value, source.objects, replace=False)
        pairs = list(permutations(names, 2))
        count = int(rng.choice(source.hops))
        hops = []
        for i in rng.choice(len(pairs), count, replace=count > len(pairs)):
            yes, no = 1 + rng.choice(source.max_value, 2, replace=False)
            left, right = pairs[i]
            hops.append(Hop(left, right, int(yes), int(no)))
        return Scene({name: int(value) for name, value in zip(names, values, strict=True)}, tuple(hops))
