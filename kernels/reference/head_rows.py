"""Log-prob and entropy statistics of logit rows, and the gradient through them."""

import torch
from torch import Tensor

from headrace.kernels.rows import MAX, STATE_WIDTH, SUM, TARGET, WEIGHTED, entropies_of, new_state


def statistics(logits: Tensor, targets: Tensor, inv_temperature: Tensor, state: Tensor | None = None, offset: int = 0) -> Tensor:
    """Fold columns into `state` [N, 4]."""
    if state is None:
        state = new_state(len(logits), logits, STATE_WIDTH)
    scaled = logits * inv_temperature[:, None]
    shifted, mass = fold_softmax(state, scaled)
    state[:, SUM] += mass.sum(1)
    state[:, WEIGHTED] += weighted(mass, shifted).sum(1)
    fold_target(state[:, TARGET], scaled, targets, offset)
    return state


def fold_softmax(state: Tensor, scaled: Tensor) -> tuple[Tensor, Tensor]:
    """Raise the maximum of a state for new columns, re-base its sums, and return z − m and e^(z−m) of the columns."""
    before = state[:, MAX].clone()
    top = torch.maximum(before, scaled.amax(1))
    finite_top = torch.where(torch.isneginf(top), 0, top)
    shift = torch.where(torch.isneginf(before), 0, before - finite_top)
    rescale(state, shift)
    state[:, MAX] = top
    shifted = scaled - finite_top[:, None]
    return shifted, shifted.exp()


def rescale(state: Tensor, shift: Tensor) -> None:
    """Express SUM and WEIGHTED against a maximum that lies −shift higher."""
    state[:, WEIGHTED] = (state[:, WEIGHTED] + state[:, SUM] * shift) * shift.exp()
    state[:, SUM] *= shift.exp()


def weighted(mass: Tensor, values: Tensor) -> Tensor:
    """mass · values, 0 where the mass is 0 whatever the value."""
    return torch.where(mass == 0, 0, mass * values)


def fold_target(column: Tensor, scaled: Tensor, targets: Tensor, offset: int) -> None:
    """Write z of the targets that lie in these columns."""
    local = targets - offset
    inside = (local >= 0) & (local < scaled.shape[1])
    found = scaled.gather(1, torch.where(inside, local, 0)[:, None]).squeeze(1)
    column.copy_(torch.where(inside, found, column))


def gradient(
    logits: Tensor,
    targets: Tensor,
    inv_temperature: Tensor,
    state: Tensor,
    grad_logprobs: Tensor,
    grad_entropies: Tensor,
    *,
    rows: Tensor | None = None,
    offset: int = 0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """d loss / d logits, [M, C]."""
    if rows is not None:
        logits, targets, inv_temperature = logits[rows], targets[rows], inv_temperature[rows]
        state, grad_logprobs, grad_entropies = state[rows], grad_logprobs[rows], grad_entropies[rows]
    log_probs = logits * inv_temperature[:, None] - (state[:, MAX] + state[:, SUM].log())[:, None]
    probs = log_probs.exp()
    grad = -grad_logprobs[:, None] * probs
    grad -= grad_entropies[:, None] * weighted(probs, log_probs + entropies_of(state)[:, None])
    local = targets - offset
    owners = ((local >= 0) & (local < logits.shape[1])).nonzero().squeeze(1)
    grad[owners, local[owners]] += grad_logprobs[owners]
    grad *= inv_temperature[:, None]
    grad[(grad_logprobs == 0) & (grad_entropies == 0)] = 0
    return grad.to(logits.dtype if dtype is None else dtype)
