"""The top-token mask and the sampler over rows of logits."""

import torch
from torch import Tensor

from headrace.kernels.reference.noise import gumbel
from headrace.kernels.top_token_records import TopTokenMask, TopTokenSample


def top_token(
    logits: Tensor,
    eligible: Tensor,
    threshold: Tensor,
    banned: Tensor | None = None,
    spared: Tensor | None = None,
) -> TopTokenMask:
    """Which rows lose their top token."""
    scores = working_copy(logits, banned)
    top, top_id = leader(scores)
    rest = without(scores, top_id)
    second = leader(rest)[0]
    # The rest is summed against its own maximum, so it keeps its digits however far below the top it lies.
    log_rest = mass_above(rest, second).log()
    odds = second - top + log_rest
    top_prob = odds.exp().add(1).reciprocal()
    raw = top + odds.exp().log1p()
    empty = torch.isneginf(top)
    top_prob, raw = torch.where(empty, 0, top_prob), torch.where(empty, top, raw)
    fired = eligible & exceeds(top_prob, threshold) & (second > -torch.inf)
    if spared is not None:
        fired &= ~spared[top_id]
    return TopTokenMask(fired, top_id, top_prob, raw, torch.where(fired, second + log_rest, raw))


def top_token_sample(
    logits: Tensor,
    eligible: Tensor,
    threshold: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    banned: Tensor | None = None,
    spared: Tensor | None = None,
) -> TopTokenSample:
    """A draw from each row, after the mask."""
    scores = working_copy(logits, banned)
    mask = top_token(scores, eligible, threshold, None, spared)
    greedy = temperature == 0
    scaled = scores / torch.where(greedy, 1, temperature)[:, None].to(scores.dtype)
    open_ = torch.where(mask.fired[:, None], without(scaled, mask.top_id), scaled)
    noise = gumbel(seeds, positions, scores.shape[1], scores.dtype)
    token = leader(open_ + torch.where(greedy[:, None], 0, noise))[1]
    logprob = torch.where(greedy, 0, logprob_at(open_, token))
    raw_logprob = logprob_at(scaled, token)
    lost = mask.raw_lse.isnan() | mask.raw_lse.isneginf()
    nothing = torch.nan
    return TopTokenSample(
        torch.where(lost, -1, token),
        mask.fired,
        mask.top_id,
        mask.top_prob,
        torch.where(lost, nothing, logprob),
        torch.where(lost, nothing, raw_logprob),
    )


def exceeds(top_prob: Tensor, threshold: Tensor) -> Tensor:
    """The strict comparison p* > τ, in the dtype of p*."""
    return top_prob > threshold.to(top_prob.dtype)


def working_copy(logits: Tensor, banned: Tensor | None) -> Tensor:
    """The logits in fp32 (float64 stays) with −inf at banned ids."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    return scores if banned is None else scores.index_fill(1, banned, -torch.inf)


def leader(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value of each row, NaN aside, and the lowest id that has it."""
    values = torch.where(scores.isnan(), -torch.inf, scores)
    top = values.amax(1)
    return top, (values == top[:, None]).to(torch.uint8).argmax(1)


def mass_above(scores: Tensor, base: Tensor) -> Tensor:
    """Σ e^(score − base); 0 for a row without finite scores."""
    return (scores - torch.where(torch.isneginf(base), 0, base)[:, None]).exp().sum(1)


def logprob_at(scores: Tensor, ids: Tensor) -> Tensor:
    """Log-prob of one entry of each row, from differences to the row's maximum so that a common shift costs no digits."""
    top = leader(scores)[0]
    return scores.gather(1, ids[:, None]).squeeze(1) - top - mass_above(scores, top).log()


def without(scores: Tensor, ids: Tensor) -> Tensor:
    """A copy with one entry of each row removed."""
    return scores.scatter(1, ids[:, None], -torch.inf)
