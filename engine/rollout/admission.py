"""Which question is drawn next, as a prompt."""

import logging

from headrace.config import Config
from headrace.encoding import Encoder
from headrace.questions.ledger import Key, Ledger
from headrace.questions.sets import QuestionSet, stops_at_bad_rows
from headrace.records import Prompt

log = logging.getLogger(__name__)


class Admission:
    """Takes questions from the ledger and encodes them; those that cannot be encoded are left out and counted."""

    def __init__(self, config: Config, questions: QuestionSet, encoder: Encoder, ledger: Ledger) -> None:
        self.ledger = ledger
        self._questions, self._encoder = questions, encoder
        self._stops = stops_at_bad_rows(config.questions.train)
        self._failed: set[int] = set()  # since the last that could be used; a small set comes round quickly
        self._unusable: list[Key] = []
        self._warned = False

    def next(self) -> tuple[Key, Prompt]:
        """The next question that can be used.

        Raises:
            ValueError: one cannot be used and bad rows are to stop the run, or none of the set can; the message is the last one's.
        """
        while True:
            key = self.ledger.admit()
            try:
                prompt = self._encoder.encode(self._questions.question(key[1]))
            except ValueError as error:
                self._failed.add(key[1])
                self._unusable.append(key)
                if len(self._failed) >= len(self._questions) or self._stops:
                    raise
                if not self._warned:
                    self._warned = True
                    log.warning("%s; the question is left out, further ones are only counted", error)
                continue
            self._failed.clear()
            return key, prompt

    def unusable(self) -> list[Key]:
        """Questions left out since the last call; still in flight for the ledger."""
        left_out, self._unusable = self._unusable, []
        return left_out
