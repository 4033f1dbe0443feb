"""What ends a response: end tokens, stop ids, stop strings, the token limit."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from headrace.records import Array, SampleRequest

TAIL_SLACK = 4
"""Tokens decoded beyond the longest stop string: a character can begin in an earlier token, and leading white space may be dropped."""


class Text(Protocol):
    """What is needed of the tokenizer. Implemented by ``encoding.Encoder``."""

    eos_ids: tuple[int, ...]
    vocab_size: int

    def decode(self, token_ids: Array) -> str: ...


class Stops:
    """When each of B growing responses ends.

    A stop string is looked for in the decoded tail, where its last character must lie in the newest token; the response keeps it whole.
    """

    def __init__(self, requests: Sequence[SampleRequest], context: int | None, text: Text) -> None:
        """Args:
        context: most positions the model has, prompt included; None is no bound.

        Raises:
            ValueError: a prompt is empty or leaves no room for a response, or a stop id is no token.
        """
        self.text = text
        self.limits = np.array([_limit(request, context) for request in requests], dtype=np.int64)  # [B] response tokens
        kinds = {stop_ids: number for number, stop_ids in enumerate(dict.fromkeys(request.parameters.stop_ids for request in requests))}
        self._kind = np.array([kinds[request.parameters.stop_ids] for request in requests], dtype=np.int64)
        self._ends = np.zeros((len(kinds), text.vocab_size), dtype=bool)
        for stop_ids, number in kinds.items():
            if not all(0 <= token < text.vocab_size for token in stop_ids):
                raise ValueError(f"stop_ids = {list(stop_ids)}: expected ids below the vocabulary's {text.vocab_size}")
            self._ends[number, [*text.eos_ids, *stop_ids]] = True
        self._strings = [request.parameters.stop for request in requests]
        self._tails = [max((len(stop.encode()) for stop in stops), default=0) + TAIL_SLACK for stops in self._strings]
        self._with_strings = np.array([bool(stops) for stops in self._strings], dtype=bool)

    def stopped(self, rows: Array, tokens: Array, responses: Array, length: int) -> Array:
        """[N] bool: the responses that end with their newest token.

        Args:
            rows: [N] row numbers.
            tokens: [N] newest tokens.
            responses: [B, ≥ length] tokens of all rows so far, newest included.
            length: tokens so far.
        """
        ended = self._ends[self._kind[rows], tokens]
        for place in np.flatnonzero(self._with_strings[rows] & ~ended):
            row = rows[place]
            tail = self.text.decode(responses[row, max(length - self._tails[row], 0) : length])
            ended[place] = any(stop in tail for stop in self._strings[row])
        return ended


def _limit(request: SampleRequest, context: int | None) -> int:
    length = len(request.prompt.token_ids)
    if length == 0:
        raise ValueError(f"question {request.prompt.question.id}: the prompt is empty; expected at least one token")
    if context is None:
        return request.parameters.max_tokens
    if length >= context:
        raise ValueError(
            f"question {request.prompt.question.id}: the prompt has {length} tokens, the model's context is {context}; "
            "expected a prompt that leaves room for a response"
        )
    return min(request.parameters.max_tokens, context - length)
