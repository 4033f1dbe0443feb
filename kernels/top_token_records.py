"""What the top-token operations return."""

from typing import NamedTuple

from torch import Tensor


class TopTokenMask(NamedTuple):
    """The mask decision for B rows of logits."""

    fired: Tensor
    """[B] bool: the top token was removed."""
    top_id: Tensor
    """[B] int64, the most likely token before the mask (lowest id among equals)."""
    top_prob: Tensor
    """[B] p*, its probability at temperature 1."""
    raw_lse: Tensor
    """[B] log-sum-exp of the row before the mask."""
    masked_lse: Tensor
    """[B] log-sum-exp of what can still be drawn: without the top token where the mask fired, else `raw_lse`."""


class TopTokenSample(NamedTuple):
    """One draw for each of B rows of logits."""

    token: Tensor
    """[B] int64."""
    fired: Tensor
    """[B] bool: the top token could not be drawn."""
    top_id: Tensor
    """[B] int64."""
    top_prob: Tensor
    """[B] p* at temperature 1, before mask and truncation."""
    logprob: Tensor
    """[B] nats, of the token under the distribution it was drawn from (after temperature, mask, top-k, top-p); greedy: 0."""
    raw_logprob: Tensor
    """[B] nats, under softmax(logits / temperature) with nothing removed but banned ids: what a learner's head reports. Greedy: at
    temperature 1."""
