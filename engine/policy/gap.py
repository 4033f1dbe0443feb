"""The gap between the engine that sampled and the learner that trains: one policy in two implementations, or two versions of it.

The gap of a token is |log p(learner) − log p(engine)| in nats, over the tokens of the loss's numerator. ``proximal`` are the
learner's log-probs before the batch's first step.
"""

from dataclasses import replace

import numpy as np

from headrace.config import LossConfig
from headrace.records import Array, StepBatch


def needs_proximal(loss: LossConfig) -> bool:
    """Whether a pass without gradients comes before the update."""
    return loss.tis_cap is not None or loss.max_gap is not None


def gap_metrics(batch: StepBatch, logprobs: Array, among: Array | None = None) -> dict[str, float]:
    """Mean, 99th percentile and maximum of the gap of ``logprobs`` [N]; of the rows ``among`` [B] bool. Empty without a token."""
    mask = batch.loss_mask if among is None else batch.loss_mask & np.repeat(among, np.diff(batch.cu_seqlens))
    gap = np.abs(logprobs - batch.old_logprobs)[mask]
    if not len(gap):
        return {}
    return {"gap/mean": float(gap.mean(dtype=np.float64)), "gap/p99": float(np.quantile(gap, 0.99)), "gap/max": float(gap.max())}


def corrected(batch: StepBatch, proximal: Array, loss: LossConfig) -> tuple[StepBatch, dict[str, float]]:
    """The batch with the configured corrections, and what they did.

    Tokens with a gap above ``loss.max_gap`` leave the numerator. With ``loss.tis_cap`` the ratio is against ``proximal`` and
    min(exp(proximal − old), cap) weighs each token, so a stale or mismatched token is neither clipped away nor overcounted
    (truncated importance sampling).

    Args:
        proximal: [N] nats.
    """
    metrics = gap_metrics(batch, proximal)
    if loss.max_gap is not None:
        kept = np.abs(proximal - batch.old_logprobs) <= loss.max_gap
        before = int(batch.loss_mask.sum())
        batch = replace(batch, loss_mask=batch.loss_mask & kept)
        dropped = before - int(batch.loss_mask.sum())
        metrics |= {"gap/dropped": dropped / max(1, before), "learner/dropped_tokens": float(dropped)}
    if loss.tis_cap is not None:
        batch = replace(batch, proximal_logprobs=proximal)
        capped = np.exp(proximal - batch.old_logprobs)[batch.loss_mask] > loss.tis_cap
        metrics["gap/capped"] = float(capped.mean()) if len(capped) else 0.0
    return batch, metrics


def update_masses(batch: StepBatch, logprobs: Array, clip_high: float) -> dict[str, float]:
    """For each of ``batch.watched``: positive credit, gate included, of its tokens that the clip let through, per response token.

    Args:
        logprobs: [N] nats, before the step.
    """
    old = batch.old_logprobs if batch.proximal_logprobs is None else batch.proximal_logprobs
    credit = batch.gates * batch.advantages
    moving = batch.loss_mask & (credit > 0) & (logprobs - old <= np.log1p(clip_high))
    tokens = max(1, int(batch.response_mask.sum()))
    return {name: float(credit[moving & watched].sum(dtype=np.float64)) / tokens for name, watched in batch.watched.items()}
