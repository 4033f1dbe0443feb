"""The questions of a run: what is drawn in training and what is held out."""

from collections.abc import Sequence

from headrace.config import Config, ConfigError
from headrace.questions.sets import QuestionSet, Split, load
from headrace.records import Question


class GivenQuestions:
    """A user's own sequence of questions as a question set."""

    def __init__(self, questions: Sequence[Question]) -> None:
        self._questions = questions

    def __len__(self) -> int:
        return len(self._questions)

    def question(self, index: int) -> Question:
        return self._questions[index]


def configured(config: Config, split: Split, *, needs_answers: bool) -> QuestionSet | None:
    """The configured source of questions to train or to evaluate on."""
    source = config.questions.train if split == "train" else config.questions.held_out
    return None if source is None else load(source, config.run.seed, split, require_answer=needs_answers)


def question_sets(config: Config, given: Sequence[Question] | None, *, needs_answers: bool) -> tuple[QuestionSet, QuestionSet | None]:
    """Questions to train on (``given`` ones in place of the configured) and held-out ones.

    Args:
        needs_answers: whether the configured rules score, rather than the user's own function.

    Raises:
        ValueError: there are none, or answers are to be scored by a task generator and a set comes from none that scores.
    """
    train = configured(config, "train", needs_answers=needs_answers) if given is None else GivenQuestions(given)
    if not train:
        raise ConfigError("questions: there is nothing to train on; set questions.train, or give the trainer questions")
    held_out = configured(config, "held_out", needs_answers=needs_answers)
    if needs_answers and config.reward.verifier == "task":
        for name, questions in {"train": train, "held_out": held_out}.items():
            if questions is not None and not hasattr(questions, "verify"):
                raise ConfigError(f"reward.verifier = task: questions.{name} has no scorer of its own; use exact or math_verify")
    return train, held_out
