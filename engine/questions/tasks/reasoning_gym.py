"""Questions of the `reasoning-gym` package's generators, scored by the generators themselves."""

import difflib
from functools import cache
from typing import Any

from headrace.config import ReasoningGymSource
from headrace.questions.sets import Split
from headrace.questions.tasks import split_of
from headrace.records import Question
from headrace.streams import stream_seed

_TRIES = 64  # candidates per question; three quarters or a quarter of them are of the right split


class ReasoningGym:
    """Generated questions; the configured generators take turns."""

    def __init__(self, source: ReasoningGymSource, seed: int, split: Split) -> None:
        if not source.datasets:
            raise ValueError(f"questions.{split}.datasets: expected at least one generator name, e.g. chain_sum")
        self._source, self._split = source, split
        per_generator = -(-source.count // len(source.datasets))
        self._stride = per_generator
        self._generators = [
            _generator(name, stream_seed(seed, f"reasoning_gym/{split}/{name}") % 2**31, per_generator * _TRIES) for name in source.datasets
        ]

    def __len__(self) -> int:
        return self._source.count

    def question(self, index: int) -> Question:
        if not 0 <= index < len(self):
            raise IndexError(f"question {index} of {len(self)}")
        turn, which = divmod(index, len(self._generators))
        name = self._source.datasets[which]
        entry = self._entry(self._generators[which], name, turn)
        return Question(
            id=f"reasoning_gym/{self._split}/{name}/{turn}",
            messages=({"role": "user", "content": entry["question"]},),
            answer=str(entry["answer"]),
            source=name,
            extra={"dataset": name, "entry": entry},
        )

    def _entry(self, generator: Any, name: str, turn: int) -> dict[str, Any]:
        for candidate in range(turn, len(generator), self._stride):
            entry = generator[candidate]
            if split_of(f"{name} {entry['question']}") == self._split:
                return dict(entry)
        raise ValueError(f"questions.{self._split}: {name} makes too few different questions to hold some out")

    @staticmethod
    def verify(question: Question, answer: str) -> float:
        """See the module's ``verify``."""
        return verify(question, answer)


def verify(question: Question, answer: str) -> float:
    """Score of an extracted answer by the generator that made the question: 1 is right, some generators give partial credit.

    Raises:
        ValueError: the question is not one of this module's, or its generator does not exist here.
    """
    try:
        name, entry = question.extra["dataset"], question.extra["entry"]
    except KeyError:
        raise ValueError(f"question {question.id}: it carries no reasoning-gym entry to score against") from None
    return float(_scorer(name).score_answer(answer, entry))


@cache
def _scorer(name: str) -> Any:
    return _generator(name, seed=0, size=1)


def _generator(name: str, seed: int, size: int) -> Any:
    """A data set of the package, made lazily item by item.

    Raises:
        ValueError: the package is not installed, or has no such generator.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(
            f"questions: kind reasoning_gym needs the package; install it with `pip install reasoning-gym` ({error})"
        ) from None

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {len(DATASETS)}, e.g. chain_sum, leg_counting, countdown"
        raise ValueError(f"questions: reasoning-gym has no generator {name!r}; {hint}")
    return reasoning_gym.create_dataset(name, seed=seed, size=size)
