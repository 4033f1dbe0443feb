"""What a set of questions is, and how a configured source becomes one."""

from typing import Literal, Protocol, runtime_checkable

import numpy as np

from headrace.config import EasyVQASource, HopchainSource, MultiHopSource, QuestionSource, ReasoningGymSource, RowsSource
from headrace.records import Question

Split = Literal["train", "held_out"]


@runtime_checkable
class QuestionSet(Protocol):
    """Questions by index. The same (source, seed, split, index) always gives the same question."""

    def __len__(self) -> int:
        """Questions in one epoch."""
        ...

    def question(self, index: int) -> Question:
        """Question ``index``, 0 <= index < len(self)."""
        ...


@runtime_checkable
class TaskSet(QuestionSet, Protocol):
    """A question set whose generator also knows how a question is reasoned out: a policy can be warm-started on it."""

    def trace(self, index: int, rng: np.random.Generator, noise: float = 0.0) -> str:
        """A full response to question ``index``, opening think tag included, end token excluded.

        ``noise`` is the share of hop decisions that are flipped; what follows a flipped decision is consistent with it.
        """
        ...

    def vocabulary(self) -> list[str]:
        """Every word that questions and traces of this source can hold, each once, in a fixed order."""
        ...


def stops_at_bad_rows(source: QuestionSource | None) -> bool:
    """Whether a question that cannot be used ends the run, instead of being counted and left out."""
    return isinstance(source, RowsSource) and source.bad_rows == "stop"


def load(source: QuestionSource, seed: int, split: Split, *, require_answer: bool = True) -> QuestionSet:
    """The question set of a configured source.

    Generated splits share no question, whatever their seeds and counts. ``require_answer=False`` takes rows without an
    answer, for a reward that needs none.

    Raises:
        ValueError: the source cannot be used; the message names the field and what is expected.
    """
    match source:
        case MultiHopSource():
            from headrace.questions.tasks.multi_hop import MultiHop

            return MultiHop(source, seed, split)
        case EasyVQASource():
            from headrace.questions.tasks.easy_vqa import EasyVQA

            return EasyVQA(source, seed, split)
        case ReasoningGymSource():
            from headrace.questions.tasks.reasoning_gym import ReasoningGym

            return ReasoningGym(source, seed, split)
        case HopchainSource():
            from headrace.questions.tasks.hopchain import HopchainTask

            return HopchainTask(source, split)
        case RowsSource():
            from headrace.questions.rows import load_rows

            return load_rows(source.path, source.bad_rows, require_answer=require_answer)
    raise ValueError(f"questions: unknown source {source!r}")
