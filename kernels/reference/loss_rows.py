"""The gated clipped policy loss of single tokens, with its derivatives written out."""

import torch
from torch import Tensor

from headrace.kernels.policy_spec import K3_LIMIT, LOG_RATIO_LIMIT, Metric, PolicySpec, TokenStreams, empty_metrics
from headrace.kernels.rows import TokenLoss


def token_loss(
    logprobs: Tensor,
    entropies: Tensor,
    streams: TokenStreams,
    spec: PolicySpec,
    log_ratios: Tensor | None = None,
) -> TokenLoss:
    """Loss and derivatives of N tokens."""
    counted = streams.mask
    if counted is None:
        counted = torch.ones_like(logprobs, dtype=torch.bool)
    own, entropy, weight, advantage, old = (
        torch.where(counted, stream, 0) for stream in (logprobs, entropies, streams.weights, streams.advantages, streams.old_logprobs)
    )
    proximal, reference, gate = (
        None if stream is None else torch.where(counted, stream, 0)
        for stream in (streams.proximal_logprobs, streams.ref_logprobs, streams.gates)
    )
    anchor = old if proximal is None else proximal
    raw = own - anchor if log_ratios is None else torch.where(counted, log_ratios, 0)
    ratio = raw.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    gated = advantage if gate is None else torch.where(advantage > 0, gate * advantage, advantage)

    surrogate, slope, clipped = surrogate_of(own, ratio, raw, gated, spec)
    importance, capped = importance_of(old, proximal, spec)
    kl, kl_slope = reference_kl(own, reference, spec)
    losses = importance * surrogate + spec.kl_coef * kl - spec.entropy_coef * entropy - spec.surprisal_coef * own
    grad_logprobs = importance * slope + spec.kl_coef * kl_slope - spec.surprisal_coef
    drift = (own - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    sums = {
        Metric.TOKENS: counted,
        Metric.CLIPPED_LOW: clipped[0],
        Metric.CLIPPED_HIGH: clipped[1],
        Metric.CLIPPED_DUAL: clipped[2],
        Metric.K1: -drift,
        Metric.K3: drift.expm1() - drift,
        Metric.REFERENCE_KL: kl,
        Metric.RATIO: ratio,
        Metric.RATIO_SQUARED: ratio.square(),
        Metric.ENTROPY: entropy,
        Metric.SURPRISAL: -own,
        Metric.TIS_CAPPED: capped,
        Metric.POSITIVES: advantage > 0,
        Metric.GATE_ON_POSITIVES: torch.where(advantage > 0, 1 if gate is None else gate, 0),
    }
    return TokenLoss(
        torch.where(counted, weight * losses, 0),
        torch.where(counted, weight * grad_logprobs, 0),
        torch.where(counted, -spec.entropy_coef * weight, 0),
        collect(sums, ratio, counted),
    )


def surrogate_of(
    logprobs: Tensor, ratio: Tensor, log_ratio: Tensor, advantage: Tensor, spec: PolicySpec
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """The surrogate to minimise, its derivative by the log-prob, and which of the low, high and dual clips are active."""
    low, high = 1 - spec.clip_low, 1 + spec.clip_high
    none = torch.zeros_like(ratio, dtype=torch.bool)
    if spec.kind == "cispo":
        slope = -ratio.clamp(low, high) * advantage
        return slope * logprobs, slope, (ratio < low, ratio > high, none)
    below = (advantage < 0) & (ratio < low)
    above = (advantage > 0) & (ratio > high)
    dual = none if spec.dual_clip is None else (advantage < 0) & (ratio > spec.dual_clip)
    effective = torch.where(below, low, torch.where(above, high, ratio))
    if spec.dual_clip is not None:
        effective = torch.where(dual, spec.dual_clip, effective)
    constant = below | above | dual | (log_ratio.abs() > LOG_RATIO_LIMIT)
    return -effective * advantage, torch.where(constant, 0, -ratio * advantage), (below, above, dual)


def importance_of(old: Tensor, proximal: Tensor | None, spec: PolicySpec) -> tuple[Tensor, Tensor]:
    """The truncated importance weight of the proximal policy against the behaviour policy, and where it was cut."""
    if proximal is None:
        return torch.ones_like(old), torch.zeros_like(old, dtype=torch.bool)
    weight = (proximal - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if spec.tis_cap is None:
        return weight, torch.zeros_like(old, dtype=torch.bool)
    return weight.clamp_max(spec.tis_cap), weight > spec.tis_cap


def reference_kl(logprobs: Tensor, reference: Tensor | None, spec: PolicySpec) -> tuple[Tensor, Tensor]:
    """The estimate of KL(π ‖ reference) and its derivative by the log-prob."""
    if reference is None:
        return torch.zeros_like(logprobs), torch.zeros_like(logprobs)
    raw = reference - logprobs
    d = raw.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if spec.kl_kind == "k1":
        value, slope = -d, torch.ones_like(d)
    elif spec.kl_kind == "k2":
        value, slope = d.square() / 2, -d
    else:
        value, slope = d.expm1() - d, -d.expm1()
        slope = torch.where(value > K3_LIMIT, 0, slope)
        value = value.clamp_max(K3_LIMIT)
    return value, torch.where(raw.abs() > LOG_RATIO_LIMIT, 0, slope)


def collect(sums: dict[Metric, Tensor], ratio: Tensor, counted: Tensor) -> Tensor:
    """The metrics vector of rows that count."""
    metrics = empty_metrics(ratio.device)
    for offset, values in sums.items():
        metrics[offset] = torch.where(counted, values, 0).sum(dtype=ratio.dtype)
    if len(ratio):
        metrics[Metric.RATIO_MIN] = torch.where(counted, ratio, torch.inf).amin()
        metrics[Metric.RATIO_MAX] = torch.where(counted, ratio, -torch.inf).amax()
    return metrics
