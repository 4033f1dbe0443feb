"""`policy_loss`: the gated clipped policy-gradient loss over log-probs that exist already."""

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels.dispatch import choose
from headrace.kernels.policy_spec import LOG_RATIO_LIMIT, PolicySpec, TokenStreams
from headrace.kernels.rows import TokenLoss


class PolicyLoss(NamedTuple):
    """A policy loss and what it measured on the way."""

    loss: Tensor
    """Scalar, Σ_t weight_t · loss_t; differentiable."""
    metrics: Tensor
    """[len(Metric)] fp32 sums, on the device of the inputs; see `Metric`, `combine_metrics`, `summarise_metrics`."""
    logprobs: Tensor | None = None
    """[T] nats, detached; only from `linear_policy_loss`. Ignored rows 0."""
    entropies: Tensor | None = None
    """[T] nats, detached; only from `linear_policy_loss`."""


def policy_loss(
    logprobs: Tensor,
    entropies: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    spec: PolicySpec,
    *,
    gates: Tensor | None = None,
    mask: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    proximal_logprobs: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    implementation: str | None = None,
) -> PolicyLoss:
    """The loss of T tokens, differentiable in `logprobs` and `entropies`.

    With A' = gate · A where A > 0, else A (paper 003); anchor = proximal if given, else old; r = exp(log π − anchor):

        ppo    s = −min(r A', clip(r, 1 − clip_low, 1 + clip_high) A'),  for A < 0 at most −dual_clip · A (paper 000, Eq. 2)
        gspo   the same with r = exp(mean of log π − anchor over the counted tokens of the sequence), and each token's
               gradient r A' ∇log π (the token form: per-token advantages and gates keep their own token)
        cispo  s = −clip(r) A' log π, the clipped ratio held constant
        loss   = Σ weight (min(exp(proximal − old), tis_cap) s + kl_coef · kl − entropy_coef · H − surprisal_coef · log π)

    Args:
        logprobs, entropies: [T] nats under the policy, fp32 or float64.
        old_logprobs: [T] nats under the behaviour policy that sampled.
        advantages: [T].
        weights: [T]; every normalisation is in them already, the loss is a plain sum.
        gates: [T] factors on positive advantages (default 1).
        mask: [T] bool, the tokens that count. Whatever stands in the other rows, NaN included, is never used: they add nothing
            to loss, gradient or metrics. A token whose surrogate alone should go keeps mask True and gets advantage 0.
        ref_logprobs: [T] under the reference policy; with kl_coef 0 only measured.
        proximal_logprobs: [T] under the policy at the start of the update.
        cu_seqlens: [S + 1] integer bounds of the sequences in T, from 0 to T; needed for gspo.

    Log-ratios are clamped to ±20 and k3 to 10; beyond, a term is constant and has no gradient.

    Raises:
        ValueError: shapes that do not fit, an input the spec needs and did not get.
    """
    if logprobs.dim() != 1 or logprobs.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"logprobs must be [T] in fp32 or float64, got {list(logprobs.shape)} {logprobs.dtype}")
    if entropies.shape != logprobs.shape:
        raise ValueError(f"entropies must have shape {list(logprobs.shape)}, got {list(entropies.shape)}")
    streams = TokenStreams(old_logprobs, advantages, weights, gates, mask, ref_logprobs, proximal_logprobs)
    streams = streams.prepare(len(logprobs), logprobs.device, logprobs.dtype)
    spec.check_streams(streams, cu_seqlens is not None)
    sequences = sequence_ids(cu_seqlens, len(logprobs), logprobs.device) if spec.kind == "gspo" and cu_seqlens is not None else None
    operations = choose(logprobs.device, logprobs.dtype, implementation)
    loss, metrics = _PolicyLoss.apply(logprobs, entropies, streams, spec, sequences, operations)
    return PolicyLoss(loss, metrics)


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logprobs, entropies, streams, spec, sequences, operations):
        token = evaluate(operations, logprobs.detach(), entropies.detach(), streams, spec, sequences)
        ctx.save_for_backward(token.grad_logprobs, token.grad_entropies)
        ctx.mark_non_differentiable(token.metrics)
        return token.losses.sum(), token.metrics

    @staticmethod
    def backward(ctx, grad_loss, _):
        grad_logprobs, grad_entropies = ctx.saved_tensors
        return grad_loss * grad_logprobs, grad_loss * grad_entropies, None, None, None, None


def evaluate(operations, logprobs, entropies, streams: TokenStreams, spec: PolicySpec, sequences=None) -> TokenLoss:
    """The loss of tokens of whole sequences."""
    ratios = None if sequences is None else sequence_log_ratios(logprobs, streams, sequences)
    return operations.token_loss(logprobs.contiguous(), entropies.contiguous(), streams, spec, ratios)


def sequence_log_ratios(logprobs: Tensor, streams: TokenStreams, sequences: Tensor) -> Tensor:
    """The mean log-ratio of each token's sequence, [N], over the tokens that count."""
    anchor = streams.old_logprobs if streams.proximal_logprobs is None else streams.proximal_logprobs
    ratios = (logprobs - anchor).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    counted = torch.ones_like(ratios, dtype=torch.bool) if streams.mask is None else streams.mask
    own = renumber(sequences)
    totals = torch.zeros_like(ratios).index_add_(0, own, torch.where(counted, ratios, 0))
    counts = torch.zeros_like(ratios).index_add_(0, own, counted.to(ratios.dtype))
    return (totals / counts.clamp_min(1))[own]


def renumber(sequences: Tensor) -> Tensor:
    """Consecutive numbers from 0 for runs of equal ids, so that they are below the number of tokens."""
    return torch.cat([sequences.new_zeros(1), (sequences.diff() != 0).long()])[: len(sequences)].cumsum(0)


def sequence_ids(cu_seqlens: Tensor, tokens: int, device: torch.device) -> Tensor:
    """An id of each token's sequence, rising along T, [T] int64."""
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.is_floating_point():
        raise ValueError(f"cu_seqlens must be [S + 1] integers, got {list(cu_seqlens.shape)} {cu_seqlens.dtype}")
    bounds = cu_seqlens.to(device=device, dtype=torch.int64)
    if bounds.device.type == "cpu" and (bounds[0] != 0 or bounds[-1] != tokens or (bounds.diff() < 0).any()):
        raise ValueError(f"cu_seqlens must rise from 0 to {tokens}, got {bounds.tolist()[:8]} …")
    starts = torch.zeros(tokens + 1, dtype=torch.int64, device=device).index_fill_(0, bounds[1:], 1)[:tokens]
    return starts.cumsum(0)
