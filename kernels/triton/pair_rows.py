"""Divergences between two rows of logits over the same vocabulary. One program a pair of rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.rows import PAIR_STATE_WIDTH
from headrace.kernels.triton.launch import ROW_BLOCK, ROW_WARPS, on_device_of, options
from headrace.kernels.triton.online import LOWEST, rebase, scaled_by, step_to, target_score

PAIR_BLOCK = ROW_BLOCK // 2
"""Half as wide as one row's: eight running values a lane instead of three."""

LOG_TWO = tl.constexpr(0.6931471805599453)


def pair_statistics(
    logits: Tensor,
    logits_cf: Tensor,
    targets: Tensor,
    inv_temperature: Tensor,
    state: Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    """Fold columns of both into `state` [N, 10]."""
    fresh = state is None
    if state is None:
        state = torch.empty(len(logits), PAIR_STATE_WIDTH, dtype=torch.float32, device=logits.device)
    if len(logits):
        with on_device_of(logits):
            pair_statistics_kernel[(len(logits),)](
                logits,
                logits.stride(0),
                logits_cf,
                logits_cf.stride(0),
                targets,
                inv_temperature,
                state,
                state.stride(0),
                offset,
                logits.shape[1],
                FRESH=fresh,
                BLOCK=PAIR_BLOCK,
                **options(ROW_WARPS),
            )
    return state


@triton.jit
def rebase_cross(cross, total, rise, rise_cf, keep):
    """Σ e^(z−m) ((z−m) − (z'−m')) after the two maxima rose by so much."""
    return scaled_by(cross + total * (rise_cf - rise), keep)


@triton.jit
def join_pairs(top, total, weighted, cross, top_cf, total_cf, weighted_cf, cross_cf, new_top, new_top_cf):
    """The sums of lanes, or of earlier columns, against common maxima."""
    rise = new_top - top
    rise_cf = new_top_cf - top_cf
    cross = rebase_cross(cross, total, rise, rise_cf, tl.exp(-rise))
    cross_cf = rebase_cross(cross_cf, total_cf, rise_cf, rise, tl.exp(-rise_cf))
    total, weighted = rebase(top, total, weighted, new_top)
    total_cf, weighted_cf = rebase(top_cf, total_cf, weighted_cf, new_top_cf)
    return total, weighted, cross, total_cf, weighted_cf, cross_cf


@triton.jit(do_not_specialize=["state_stride", "offset"])
def pair_statistics_kernel(
    logits,
    stride,
    logits_cf,
    stride_cf,
    targets,
    inv_temperatures,
    states,
    state_stride,
    offset,
    columns,
    FRESH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    row_cf = logits_cf + index * stride_cf
    inv_temperature = tl.load(inv_temperatures + index)
    target = tl.load(targets + index)
    lanes = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], LOWEST, tl.float32)
    top_cf = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    total_cf = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    weighted_cf = tl.zeros([BLOCK], tl.float32)
    cross = tl.zeros([BLOCK], tl.float32)
    cross_cf = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + lanes
        inside = column < columns
        z = tl.load(row + column, mask=inside, other=float("-inf")) * inv_temperature
        z_cf = tl.load(row_cf + column, mask=inside, other=float("-inf")) * inv_temperature
        top, keep, mass, rise, below = step_to(top, z)
        top_cf, keep_cf, mass_cf, rise_cf, below_cf = step_to(top_cf, z_cf)
        cross = rebase_cross(cross, total, rise, rise_cf, keep) + scaled_by(below - below_cf, mass)
        cross_cf = rebase_cross(cross_cf, total_cf, rise_cf, rise, keep_cf) + scaled_by(below_cf - below, mass_cf)
        weighted = scaled_by(weighted - total * rise, keep) + scaled_by(below, mass)
        weighted_cf = scaled_by(weighted_cf - total_cf * rise_cf, keep_cf) + scaled_by(below_cf, mass_cf)
        total = total * keep + mass
        total_cf = total_cf * keep_cf + mass_cf

    best = tl.max(top, 0)
    best_cf = tl.max(top_cf, 0)
    total, weighted, cross, total_cf, weighted_cf, cross_cf = join_pairs(
        top, total, weighted, cross, top_cf, total_cf, weighted_cf, cross_cf, best, best_cf
    )
    sum_total = tl.sum(total, 0)
    sum_weighted = tl.sum(weighted, 0)
    sum_cross = tl.sum(cross, 0)
    sum_total_cf = tl.sum(total_cf, 0)
    sum_weighted_cf = tl.sum(weighted_cf, 0)
    sum_cross_cf = tl.sum(cross_cf, 0)
    score = target_score(row, target, offset, columns, inv_temperature)
    score_cf = target_score(row_cf, target, offset, columns, inv_temperature)

    state = states + index * state_stride
    if not FRESH:
        old_top = tl.maximum(tl.load(state), LOWEST)
        old_top_cf = tl.maximum(tl.load(state + 4), LOWEST)
        new_top = tl.maximum(old_top, best)
        new_top_cf = tl.maximum(old_top_cf, best_cf)
        a, b, c, d, e, f = join_pairs(
            best, sum_total, sum_weighted, sum_cross, best_cf, sum_total_cf, sum_weighted_cf, sum_cross_cf, new_top, new_top_cf
        )
        p, q, r, s, t, u = join_pairs(
            old_top,
            tl.load(state + 1),
            tl.load(state + 2),
            tl.load(state + 8),
            old_top_cf,
            tl.load(state + 5),
            tl.load(state + 6),
            tl.load(state + 9),
            new_top,
            new_top_cf,
        )
        sum_total, sum_weighted, sum_cross = a + p, b + q, c + r
        sum_total_cf, sum_weighted_cf, sum_cross_cf = d + s, e + t, f + u
        best, best_cf = new_top, new_top_cf
        score = tl.maximum(score, tl.load(state + 3), propagate_nan=tl.PropagateNan.ALL)
        score_cf = tl.maximum(score_cf, tl.load(state + 7), propagate_nan=tl.PropagateNan.ALL)
    tl.store(state, tl.where(sum_total == 0, float("-inf"), best))
    tl.store(state + 1, sum_total)
    tl.store(state + 2, sum_weighted)
    tl.store(state + 3, score)
    tl.store(state + 4, tl.where(sum_total_cf == 0, float("-inf"), best_cf))
    tl.store(state + 5, sum_total_cf)
    tl.store(state + 6, sum_weighted_cf)
    tl.store(state + 7, score_cf)
    tl.store(state + 8, sum_cross)
    tl.store(state + 9, sum_cross_cf)


def pair_divergences(logits: Tensor, logits_cf: Tensor, inv_temperature: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Jensen-Shannon divergence and total variation, [N] each, from a second read."""
    js = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    tv = torch.empty_like(js)
    if len(logits):
        with on_device_of(logits):
            pair_divergences_kernel[(len(logits),)](
                logits,
                logits.stride(0),
                logits_cf,
                logits_cf.stride(0),
                inv_temperature,
                state,
                state.stride(0),
                js,
                tv,
                logits.shape[1],
                BLOCK=ROW_BLOCK,
                **options(ROW_WARPS),
            )
    return js, tv


@triton.jit(do_not_specialize=["state_stride"])
def pair_divergences_kernel(
    logits, stride, logits_cf, stride_cf, inv_temperatures, states, state_stride, js, tv, columns, BLOCK: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    row_cf = logits_cf + index * stride_cf
    inv_temperature = tl.load(inv_temperatures + index)
    state = states + index * state_stride
    top = tl.load(state)
    top_cf = tl.load(state + 4)
    log_total = tl.log(tl.load(state + 1))
    log_total_cf = tl.log(tl.load(state + 5))
    lanes = tl.arange(0, BLOCK)
    mixture = tl.zeros([BLOCK], tl.float32)
    variation = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + lanes
        inside = column < columns
        z = tl.load(row + column, mask=inside, other=float("-inf")) * inv_temperature
        z_cf = tl.load(row_cf + column, mask=inside, other=float("-inf")) * inv_temperature
        log_prob = (z - top) - log_total
        log_prob_cf = (z_cf - top_cf) - log_total_cf
        prob = tl.exp(log_prob)
        prob_cf = tl.exp(log_prob_cf)
        # log p − log ((p + p')/2) = log 2 − log(1 + e^−d), and log(1 + e^∓d) = max(∓d, 0) + log(1 + e^−|d|)
        difference = log_prob - log_prob_cf
        bend = LOG_TWO - tl.log(1.0 + tl.exp(-tl.abs(difference)))
        own = bend - tl.maximum(-difference, 0.0)
        other = bend - tl.maximum(difference, 0.0)
        mixture += scaled_by(own, prob) + scaled_by(other, prob_cf)
        variation += tl.abs(prob - prob_cf)
    total = tl.sum(mixture, 0)
    tl.store(js + index, tl.maximum(0.5 * total, 0.0, propagate_nan=tl.PropagateNan.ALL))
    tl.store(tv + index, 0.5 * tl.sum(variation, 0))
