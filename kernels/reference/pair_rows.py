"""Divergences between two rows of logits over the same vocabulary."""

import math

import torch
from torch import Tensor

from headrace.kernels.reference.head_rows import fold_softmax, fold_target, weighted
from headrace.kernels.rows import (
    CROSS,
    CROSS_CF,
    MAX,
    PAIR_STATE_WIDTH,
    STATE_WIDTH,
    SUM,
    TARGET,
    WEIGHTED,
    new_state,
)


def pair_statistics(
    logits: Tensor,
    logits_cf: Tensor,
    targets: Tensor,
    inv_temperature: Tensor,
    state: Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    """Fold columns of both into `state` [N, 10]."""
    if state is None:
        state = new_state(len(logits), logits, PAIR_STATE_WIDTH)
    first, second = state[:, :STATE_WIDTH], state[:, STATE_WIDTH : 2 * STATE_WIDTH]
    scaled, scaled_cf = logits * inv_temperature[:, None], logits_cf * inv_temperature[:, None]
    before = state.clone()
    shifted, mass = fold_softmax(first, scaled)
    shifted_cf, mass_cf = fold_softmax(second, scaled_cf)
    rebase_cross(state, before)

    difference = shifted - shifted_cf
    first[:, SUM] += mass.sum(1)
    first[:, WEIGHTED] += weighted(mass, shifted).sum(1)
    second[:, SUM] += mass_cf.sum(1)
    second[:, WEIGHTED] += weighted(mass_cf, shifted_cf).sum(1)
    state[:, CROSS] += weighted(mass, difference).sum(1)
    state[:, CROSS_CF] += weighted(mass_cf, -difference).sum(1)
    fold_target(first[:, TARGET], scaled, targets, offset)
    fold_target(second[:, TARGET], scaled_cf, targets, offset)
    return state


def rebase_cross(state: Tensor, before: Tensor) -> None:
    """Express the cross sums against the maxima that a state has now."""
    move = gap(before) - gap(state)
    shrink = decay(before[:, MAX], state[:, MAX])
    shrink_cf = decay(before[:, STATE_WIDTH + MAX], state[:, STATE_WIDTH + MAX])
    state[:, CROSS] = (state[:, CROSS] + before[:, SUM] * move) * shrink
    state[:, CROSS_CF] = (state[:, CROSS_CF] - before[:, STATE_WIDTH + SUM] * move) * shrink_cf


def gap(state: Tensor) -> Tensor:
    """m − m', with the maximum of an empty part taken as 0."""
    top, top_cf = state[:, MAX], state[:, STATE_WIDTH + MAX]
    return torch.where(torch.isneginf(top), 0, top) - torch.where(torch.isneginf(top_cf), 0, top_cf)


def decay(before: Tensor, after: Tensor) -> Tensor:
    """e^(before − after), 1 while nothing was folded."""
    return torch.where(torch.isneginf(before), 1, (before - after).exp())


def pair_divergences(logits: Tensor, logits_cf: Tensor, inv_temperature: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Jensen-Shannon divergence and total variation, [N] each, from a second read."""
    log_probs = logits * inv_temperature[:, None] - normaliser(state[:, :STATE_WIDTH])
    log_probs_cf = logits_cf * inv_temperature[:, None] - normaliser(state[:, STATE_WIDTH:])
    probs, probs_cf = log_probs.exp(), log_probs_cf.exp()
    difference = log_probs - log_probs_cf
    # log p − log ((p + p')/2) = log 2 − log(1 + e^−d)
    own = weighted(probs, math.log(2) - torch.logaddexp(torch.zeros_like(difference), -difference))
    other = weighted(probs_cf, math.log(2) - torch.logaddexp(torch.zeros_like(difference), difference))
    js = 0.5 * (own.sum(1) + other.sum(1))
    return js.clamp_min(0), 0.5 * (probs - probs_cf).abs().sum(1)


def normaliser(state: Tensor) -> Tensor:
    return (state[:, MAX] + state[:, SUM].log())[:, None]
