"""Where the top-token mask may fire: the reasoning span, the spared tokens, the cap.

The rule has three parts in three places:

* `ReasoningSpans` follows each response through the tokens drawn so far: a position is inside its span iff the last
  think tag before it is the opening one. Of the prompt it knows one thing: whether it ends in a pre-filled opening tag.
* `spared_tokens` names the top tokens that are never removed, whatever their probability.
* The kernels compare the probability with the threshold and remove the token.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

from headrace.records import Array, SampleRequest


class Vocabulary(Protocol):
    """What the rule needs to know of the tokenizer. Implemented by ``encoding.Encoder``."""

    vocab_size: int
    think_open: int | None
    think_close: int | None
    lexical: Array  # bool [vocab_size]


class ReasoningSpans:
    """Reasoning spans and mask counters of B responses that grow by one token at a time.

    A row's position is examined iff it lies inside the span, and may be masked iff, besides, the row draws under the
    mask and has masked fewer positions than its cap. Calls alternate: `eligible(rows)` before a token is drawn for each
    of those rows, `advance(rows, …)` with what was drawn. Rows that have ended are no longer named.
    """

    def __init__(self, requests: Sequence[SampleRequest], vocabulary: Vocabulary) -> None:
        count = len(requests)
        self.open, self.close = vocabulary.think_open, vocabulary.think_close
        self.inside = np.array([request.prompt.prefilled for request in requests], dtype=bool)  # [B]
        self.caps = np.array([request.mask.cap if request.mask else 0 for request in requests], dtype=np.int64)  # [B], 0 draws freely
        self.examined = np.zeros(count, dtype=np.int64)  # [B] positions inside the span
        self.confident = np.zeros(count, dtype=np.int64)  # [B] of those, positions above the threshold
        self.masked = np.zeros(count, dtype=np.int64)  # [B] positions where the mask fired

    def eligible(self, rows: Array) -> Array:
        """[N] bool: the next position of each row may be masked, if its top token is not spared."""
        return self.inside[rows] & (self.masked[rows] < self.caps[rows])

    def advance(self, rows: Array, tokens: Array, fired: Array, confident: Array) -> None:
        """Move every row past the position that was just drawn.

        Args:
            rows: [N] distinct row numbers.
            tokens: [N] drawn tokens.
            fired: [N] bool, the mask removed the top token.
            confident: [N] bool, the top probability exceeded the threshold.
        """
        inside = self.inside[rows]
        assert not (fired & ~self.eligible(rows)).any(), "the mask fired outside a reasoning span or beyond the cap"
        self.examined[rows] += inside
        self.confident[rows] += inside & confident
        self.masked[rows] += fired
        self.inside[rows] = (inside & (tokens != self.close)) | (tokens == self.open)

    def cap_hit(self, row: int) -> bool:
        """The row has masked as often as it may."""
        return bool(0 < self.caps[row] <= self.masked[row])


def spared_tokens(vocabulary: Vocabulary, token_filter: Literal["none", "lexical"]) -> Array:
    """[V] bool: tokens that are not removed when they are the most likely one.

    Always the think tags; with ``lexical`` also what has no letter, digits, punctuation, white space and special tokens.
    """
    spared = np.zeros(vocabulary.vocab_size, dtype=bool) if token_filter == "none" else ~np.asarray(vocabulary.lexical, dtype=bool)
    for tag in (vocabulary.think_open, vocabulary.think_close):
        if tag is not None:
            spared[tag] = True
    return spared
