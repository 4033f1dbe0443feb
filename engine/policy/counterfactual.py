"""Responses scored beside themselves: with their media, and with degraded ones in their place (paper 003)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headrace.kernels import CounterfactualScore, counterfactual_score
from headrace.policy.model import PackedRows, Policy
from headrace.policy.packing import schedule, take_rows
from headrace.policy.parallel import Parallel
from headrace.policy.score import IGNORED, packed_rows, place, predicted_targets, score_on_all_ranks
from headrace.policy.sharing import Sharing
from headrace.records import Array, CounterfactualScores, CreditRule, Media, StepBatch


def wanted_media(rules: Sequence[CreditRule], batch: StepBatch) -> list[tuple[Media, ...]]:
    """Per row the degraded media that some rule wants, empty where none does. Rules share the pass, so they want the same ones."""
    wanted: list[tuple[Media, ...]] = [()] * len(batch.media)
    for rule in rules:
        for row, media in enumerate(rule.wanted(batch)):
            assert not media or wanted[row] in ((), media), "two credit rules want different media in one row"
            wanted[row] = wanted[row] or media
    return wanted


@torch.no_grad()
def score_counterfactual(
    policy: Policy, batch: StepBatch, media: Sequence[tuple[Media, ...]], banned: Sequence[int], budget: int, parallel: Parallel
) -> CounterfactualScores:
    """Score the rows that have ``media`` twice, in one pass each: as they are, and with ``media`` in place of their own.

    Rows are dealt out over the ranks, each of which gets the whole result. Collective. A row whose degraded media show just what the
    originals do counts as not scored.

    Args:
        budget: tokens of one forward pass, both versions of a row together.
    """
    chosen = np.array([bool(items) for items in media], dtype=bool)
    found = np.zeros((3, len(batch.token_ids)), dtype=np.float32)  # log-probs, degraded log-probs, KL
    changed = np.zeros(len(media), dtype=np.float32)
    plan = [micro for micro in schedule(batch, chosen, parallel.world_size, max(1, budget // 2))[parallel.rank] if micro.gradient]
    for micro in plan:
        part = take_rows(batch, micro.rows)
        degraded = tuple(media[row] or batch.media[row] for row in micro.rows)
        scores = _forward(policy, part, degraded, banned, parallel.device)
        if micro.filler:  # runs along, since sharded layers are gathered on all ranks
            continue
        for out, values in zip(found, (scores.logprobs, scores.logprobs_cf, scores.kl), strict=True):
            assert values is not None
            place(out, batch, micro.rows, values)
        changed[list(micro.rows)] = [_differ(policy, items) for items in degraded]
    rows = parallel.add_up(changed) > 0
    logprobs, logprobs_cf, kl = parallel.add_up(found) * np.repeat(rows, np.diff(batch.cu_seqlens))
    return CounterfactualScores(rows, batch.loss_mask, logprobs, logprobs_cf, kl)


def all_logprobs(
    policy: Policy, batch: StepBatch, known: CounterfactualScores | None, banned: Sequence[int], budget: int, parallel: Parallel
) -> Array:
    """Log-probs [N] of every response token under the policy as it is; rows in ``known`` are not run again. Collective."""
    if known is None or not known.rows.any():
        return score_on_all_ranks(policy, batch, banned, budget, parallel).logprobs
    missing = np.repeat(~known.rows, np.diff(batch.cu_seqlens))
    logprobs = known.logprobs.copy()
    if missing.any():
        rest = take_rows(batch, np.flatnonzero(~known.rows))
        logprobs[missing] = score_on_all_ranks(policy, rest, banned, budget, parallel).logprobs
    return logprobs


def refined(rules: Sequence[CreditRule], batch: StepBatch, scores: CounterfactualScores) -> StepBatch:
    """The batch after all rules, in their order."""
    for rule in rules:
        batch = rule.refine(batch, scores)
    return batch


def scores_of_rows(scores: CounterfactualScores, batch: StepBatch, rows: Array, mini: StepBatch) -> CounterfactualScores:
    """The scores of ``mini``, the given rows of ``batch``."""
    flat = np.concatenate([np.arange(*batch.cu_seqlens[row : row + 2]) for row in rows])
    return CounterfactualScores(scores.rows[rows], mini.loss_mask, scores.logprobs[flat], scores.logprobs_cf[flat], scores.kl[flat])


def _forward(
    policy: Policy, part: StepBatch, degraded: tuple[tuple[Media, ...], ...], banned: Sequence[int], device: torch.device
) -> CounterfactualScore:
    """Scores [n] at the predicting positions of ``part``: one run of the backbone over its rows and their degraded copies."""
    targets = torch.from_numpy(predicted_targets(part, part.response_mask)).to(device)
    temperature = part.temperature

    def head(hidden: Tensor, weight: Tensor) -> CounterfactualScore:
        plain, other = hidden.chunk(2)
        return counterfactual_score(plain, other, weight, targets, temperature, ("kl",), ignore_index=IGNORED, banned=banned)

    return policy(_doubled(packed_rows(part, device), degraded), head)


def _doubled(rows: PackedRows, degraded: tuple[tuple[Media, ...], ...]) -> PackedRows:
    """The rows, and behind them the same rows with other media; these count as other prompts."""
    assert rows.prompts is not None
    prompts = np.asarray(rows.prompts)
    alike = len(set(zip(prompts.tolist(), degraded, strict=True))) == len(set(prompts.tolist()))  # one degradation per prompt
    return replace(
        rows,
        token_ids=torch.cat([rows.token_ids, rows.token_ids]),
        cu_seqlens=torch.cat([rows.cu_seqlens, rows.cu_seqlens[1:] + rows.cu_seqlens[-1]]),
        media=rows.media + degraded,
        prompts=np.concatenate([prompts, prompts + prompts.max(initial=0) + 1]),
        sharing=rows.sharing.twice() if alike else Sharing(),
    )


def _differ(policy: Policy, media: Sequence[Media]) -> bool:
    """Whether some degradation changed a pixel; the items have just been loaded."""
    assert policy.vision is not None
    return any(not policy.vision.media.load(item).unchanged for item in media)
