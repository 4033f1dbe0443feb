"""What gated credit did in a step: the training metrics of paper 003."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.config import PACGConfig
from headrace.credit.responses import spans
from headrace.records import Array, CounterfactualScores, StepBatch


@dataclass(frozen=True, slots=True)
class Judged:
    """What the rule found out about the claims of one response."""

    span: slice
    """The response in the flat arrays."""
    delta: Array  # [K] nats, NaN where invalid
    gates: Array  # [K]
    claims: tuple[Array, ...]
    """Token positions in the response."""


def measure(
    batch: StepBatch, scores: CounterfactualScores, judged: Sequence[Judged], gates: Array, concerned: Array, config: PACGConfig
) -> dict[str, float]:
    """Metrics of a step; those over nothing are left out.

    Args:
        batch: before the gates.
        judged: the responses whose claims were judged.
        gates: [N] the gate of every token.
        concerned: [B] bool, responses whose advantages a gate could change; with ``positive_only`` those with a positive one.
    """
    in_claim = claim_tokens(batch, judged) & scores.own
    metrics = _responses(batch, judged, concerned)
    metrics["pacg/positive_routed_tokens"] = _share(in_claim & (batch.advantages > 0), batch.response_mask)
    if judged:
        metrics |= _claims(scores, judged, config)
    routed = in_claim & ((batch.advantages > 0) if config.positive_only else (batch.advantages != 0))
    if routed.any():
        values, credit = gates[routed], np.abs(batch.advantages[routed], dtype=np.float64)
        metrics["pacg/attenuated_share"] = float((values < 1).mean())
        metrics["pacg/floor_share"] = float((values <= config.floor + 1e-9).mean()) if config.floor < 1 else 0.0
        metrics["pacg/token_multiplier"] = float(values.mean())
        metrics["pacg/retention"] = float((values * credit).sum() / credit.sum())
        metrics |= _overlap(batch, scores, routed & (gates < 1))
    return metrics


def _responses(batch: StepBatch, judged: Sequence[Judged], concerned: Array) -> dict[str, float]:
    """Shares among the responses that a gate could concern."""
    count = int(concerned.sum())
    if not count:
        return {}
    answered = [row for row in np.flatnonzero(concerned) if batch.claims and batch.claims[row] is not None]
    valid = sum(bool(np.isfinite(row.delta).any()) for row in judged)
    metrics = {"pacg/routed_rollouts": len(answered) / count, "pacg/intervention_valid": valid / count}
    if answered:
        every = spans(batch)
        covered = sum(len({place for claim in batch.claims[row] or () for place in range(*claim)}) for row in answered)
        metrics["pacg/direct_tokens"] = covered / sum(every[row].stop - every[row].start for row in answered)
        metrics["pacg/claims_per_rollout"] = sum(len(batch.claims[row] or ()) for row in answered) / len(answered)
    return metrics


def _claims(scores: CounterfactualScores, judged: Sequence[Judged], config: PACGConfig) -> dict[str, float]:
    """Means over claims."""
    delta = np.concatenate([row.delta for row in judged])
    valid = np.isfinite(delta)
    metrics = {"pacg/span_gate": float(np.concatenate([row.gates for row in judged]).mean())}
    if valid.any():
        metrics["pacg/delta_mean"] = float(delta[valid].mean())
        metrics["pacg/delta_p90"] = float(np.quantile(delta[valid], 0.9))
        metrics["pacg/margin_violations"] = float((delta[valid] > -config.margin).mean())
        own = [[row.span.start + claim[scores.own[row.span.start + claim]] for claim in row.claims] for row in judged]
        every = np.array([scores.kl[claim].mean() if len(claim) else np.nan for claims in own for claim in claims])
        metrics["pacg/efs"] = float(every[valid].mean())
    return metrics


def _overlap(batch: StepBatch, scores: CounterfactualScores, attenuated: Array) -> dict[str, float]:
    """How far the tokens that an earlier rule selected are those whose credit was reduced; nothing where none selected."""
    own = scores.own & np.repeat(scores.rows, np.diff(batch.cu_seqlens))
    selected = batch.loss_mask & own
    if not (own & ~batch.loss_mask).any() or not attenuated.any():
        return {}
    both = int((selected & attenuated).sum())
    return {
        "pacg/selection_jaccard": both / int((selected | attenuated).sum()),
        "pacg/attenuated_selected": both / int(attenuated.sum()),
    }


def claim_tokens(batch: StepBatch, judged: Sequence[Judged]) -> Array:
    """[N] bool: in a claim."""
    marked = np.zeros(len(batch.token_ids), dtype=bool)
    for row in judged:
        for claim in row.claims:
            marked[row.span.start + claim] = True
    return marked


def _share(part: Array, whole: Array) -> float:
    return float(part.sum() / max(1, whole.sum()))
