"""Top-k and top-p after the top-token mask: the same race, run among fewer tokens."""

import torch
from torch import Tensor

from headrace.kernels.reference.noise import gumbel
from headrace.kernels.reference.top_token_rows import leader, logprob_at, without, working_copy
from headrace.kernels.top_token_records import TopTokenSample


def truncate(
    sample: TopTokenSample,
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    banned: Tensor | None,
    top_k: int | None,
    top_p: float | None,
) -> TopTokenSample:
    """The draw of `sample` repeated among the tokens that top-k and then top-p keep; greedy rows stay."""
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1 or None, got {top_k}")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p must lie in (0, 1] or be None, got {top_p}")
    scores = working_copy(logits, banned)
    greedy = temperature == 0
    scaled = scores / torch.where(greedy, 1, temperature)[:, None]
    kept = torch.where(sample.fired[:, None], without(scaled, sample.top_id), scaled)
    kept = keep_probable(keep_largest(kept, top_k), top_p)
    token = leader(kept + gumbel(seeds, positions, scores.shape[1], scores.dtype))[1]
    token = torch.where(greedy, sample.token, token)
    logprob = torch.where(greedy, 0, logprob_at(kept, token))
    raw = torch.where(greedy, sample.raw_logprob, logprob_at(scaled, token))
    return sample._replace(token=token, logprob=logprob, raw_logprob=raw)


def keep_largest(scores: Tensor, k: int | None) -> Tensor:
    """−inf for all but the k largest of each row; among equals the lower id stays."""
    if k is None or k >= scores.shape[1]:
        return scores
    order = scores.argsort(dim=1, descending=True, stable=True)
    return scores.scatter(1, order[:, k:], -torch.inf)


def keep_probable(scores: Tensor, p: float | None) -> Tensor:
    """−inf outside the smallest set of largest tokens whose probability reaches p, the token that reaches it included."""
    if p is None or p >= 1.0:
        return scores
    ranked, order = scores.sort(dim=1, descending=True, stable=True)
    probs = ranked.softmax(dim=1)
    before = probs.cumsum(1) - probs
    return scores.scatter(1, order, ranked.masked_fill(before >= p, -torch.inf))
