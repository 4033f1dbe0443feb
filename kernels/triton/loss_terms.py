"""The gated clipped loss of tokens as a device function: for blocks of tokens, or for the one token of a row kernel.

`kernels/policy_loss.py` has the formulas and `kernels/reference/loss_rows.py` the definition. Callers load masked tokens as
zeros, so nothing of them enters the arithmetic.
"""

import triton
import triton.language as tl

from headrace.kernels.policy_spec import K3_LIMIT as K3_LIMIT_VALUE
from headrace.kernels.policy_spec import LOG_RATIO_LIMIT as LOG_RATIO_LIMIT_VALUE

LOG_RATIO_LIMIT = tl.constexpr(LOG_RATIO_LIMIT_VALUE)
K3_LIMIT = tl.constexpr(K3_LIMIT_VALUE)


@triton.jit
def clamp_log_ratio(value):
    """±LOG_RATIO_LIMIT; NaN stays."""
    value = tl.maximum(value, -LOG_RATIO_LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(value, LOG_RATIO_LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def exp_beyond_linear(d):
    """e^d − d − 1 without cancellation: a series near 0, where the difference would have no digits left."""
    tail = 1.0 + d * (1.0 / 9.0)
    tail = 1.0 + d * (1.0 / 8.0) * tail
    tail = 1.0 + d * (1.0 / 7.0) * tail
    tail = 1.0 + d * (1.0 / 6.0) * tail
    tail = 1.0 + d * 0.2 * tail
    tail = 1.0 + d * 0.25 * tail
    tail = 1.0 + d * (1.0 / 3.0) * tail
    return tl.where(tl.abs(d) < 0.5, 0.5 * d * d * tail, tl.exp(d) - 1.0 - d)


@triton.jit
def surrogate_terms(logprob, log_ratio, advantage, clip_low, clip_high, dual_clip, CISPO: tl.constexpr):
    """The surrogate, its derivative by the log-prob, the ratio, and which of the low, high and dual clips are active."""
    ratio = tl.exp(clamp_log_ratio(log_ratio))
    low = 1.0 - clip_low
    high = 1.0 + clip_high
    dual = ratio != ratio
    if CISPO:
        below = ratio < low
        above = ratio > high
        slope = -tl.where(below, low, tl.where(above, high, ratio)) * advantage
        return slope * logprob, slope, ratio, below, above, dual & False
    else:
        below = (advantage < 0) & (ratio < low)
        above = (advantage > 0) & (ratio > high)
        dual = dual & False
        effective = tl.where(below, low, tl.where(above, high, ratio))
        if dual_clip is not None:
            dual = (advantage < 0) & (ratio > dual_clip)
            effective = tl.where(dual, dual_clip, effective)
        constant = below | above | dual | (tl.abs(log_ratio) > LOG_RATIO_LIMIT)
        return -effective * advantage, tl.where(constant, 0.0, -ratio * advantage), ratio, below, above, dual


@triton.jit
def reference_terms(logprob, reference, KL_KIND: tl.constexpr):
    """The estimate of KL(π ‖ reference) and its derivative by the log-prob."""
    raw = reference - logprob
    d = clamp_log_ratio(raw)
    if KL_KIND == "k1":
        value = -d
        slope = tl.where(d == d, 1.0, d)
    elif KL_KIND == "k2":
        value = 0.5 * d * d
        slope = -d
    else:
        value = exp_beyond_linear(d)
        slope = tl.where(value > K3_LIMIT, 0.0, -(value + d))
        value = tl.where(value > K3_LIMIT, K3_LIMIT, value)
    return value, tl.where(tl.abs(raw) > LOG_RATIO_LIMIT, 0.0, slope)


@triton.jit
def load_stream(pointer, index, counted, default):
    """A per-token input, the default for rows that do not count or where it was not given."""
    if pointer is not None:
        return tl.load(pointer + index, mask=counted, other=default)
    else:
        return tl.where(counted, default, default)


@triton.jit
def token_terms(
    logprob,
    entropy,
    log_ratios,
    old_logprobs,
    advantages,
    weights,
    gates,
    ref_logprobs,
    proximal_logprobs,
    index,
    counted,
    clip_low,
    clip_high,
    dual_clip,
    tis_cap,
    kl_coef,
    entropy_coef,
    surprisal_coef,
    CISPO: tl.constexpr,
    KL_KIND: tl.constexpr,
):
    """Loss, its derivative by log-prob and by entropy, and what the metrics need, for tokens at `index`."""
    weight = tl.load(weights + index, mask=counted, other=0.0)
    advantage = tl.load(advantages + index, mask=counted, other=0.0)
    old = tl.load(old_logprobs + index, mask=counted, other=0.0)
    gate = load_stream(gates, index, counted, 1.0)
    gated = tl.where(advantage > 0, gate * advantage, advantage)

    anchor = old
    importance = tl.where(counted, 1.0, 1.0)
    capped = counted & False
    if proximal_logprobs is not None:
        anchor = tl.load(proximal_logprobs + index, mask=counted, other=0.0)
        importance = tl.exp(clamp_log_ratio(anchor - old))
        if tis_cap is not None:
            capped = importance > tis_cap
            importance = tl.where(capped, tis_cap, importance)
    log_ratio = logprob - anchor
    if log_ratios is not None:
        log_ratio = tl.load(log_ratios + index, mask=counted, other=0.0)

    surrogate, slope, ratio, below, above, dual = surrogate_terms(logprob, log_ratio, gated, clip_low, clip_high, dual_clip, CISPO)
    loss = importance * surrogate - entropy_coef * entropy - surprisal_coef * logprob
    grad_logprob = importance * slope - surprisal_coef
    kl = logprob * 0.0
    if ref_logprobs is not None:
        kl, kl_slope = reference_terms(logprob, tl.load(ref_logprobs + index, mask=counted, other=0.0), KL_KIND)
        loss += kl_coef * kl
        grad_logprob += kl_coef * kl_slope
    drift = clamp_log_ratio(logprob - old)
    return (
        tl.where(counted, weight * loss, 0.0),
        tl.where(counted, weight * grad_logprob, 0.0),
        tl.where(counted, -entropy_coef * weight, 0.0),
        ratio,
        drift,
        kl,
        gate,
        advantage,
        below,
        above,
        dual,
        capped,
    )
