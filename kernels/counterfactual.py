"""`counterfactual_score`: how the same tokens fare under two hidden streams, without either logits matrix."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels.dispatch import choose
from headrace.kernels.head import Head, blocks
from headrace.kernels.inputs import Banned, check_chunk, check_head, inverse_temperature, kept_rows
from headrace.kernels.labels import check_labels
from headrace.kernels.linear_logprob import spread
from headrace.kernels.rows import PAIR_STATE_WIDTH, STATE_WIDTH, entropies_of, kls_of, logprobs_of

DIVERGENCES = ("kl", "reverse_kl", "js", "tv")


class CounterfactualScore(NamedTuple):
    """Per token, [T] fp32 (float64 for float64 inputs), nats; p is the distribution under `hidden`, q under `hidden_cf`."""

    logprobs: Tensor
    """log p of the target: serves as the old log-prob pass."""
    logprobs_cf: Tensor
    """log q of the target."""
    entropies: Tensor
    entropies_cf: Tensor
    kl: Tensor | None
    """KL(p ‖ q) over the whole vocabulary; None if not asked for, as the next three."""
    reverse_kl: Tensor | None
    """KL(q ‖ p)."""
    js: Tensor | None
    """Jensen-Shannon divergence, ½ KL(p ‖ m) + ½ KL(q ‖ m) with m = (p + q)/2; at most log 2."""
    tv: Tensor | None
    """Total variation, ½ Σ |p − q|; at most 1."""


@torch.no_grad()
def counterfactual_score(
    hidden: Tensor,
    hidden_cf: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    divergences: Sequence[str] = ("kl", "reverse_kl"),
    *,
    ignore_index: int = -100,
    banned: Banned = None,
    chunk: int | None = None,
    implementation: str | None = None,
) -> CounterfactualScore:
    """Score the same targets under the original and the counterfactual input (paper 003).

    Args:
        hidden, hidden_cf: [T, D]; row t of each predicts targets[t].
        weight: [V, D]; targets: [T]; temperature, ignore_index, banned, chunk, implementation: as in `linear_logprob`.
        divergences: any of `kl`, `reverse_kl`, `js`, `tv`. Both KLs come from one read of the logits; `js` or `tv` need a second,
            since each wants both normalisers first.

    No gradients. Ignored rows are 0 in every field.

    Raises:
        ValueError: inputs that do not fit, an unknown divergence, a bad label (see `linear_logprob`).
    """
    check_head(hidden, weight, targets)
    check_chunk(chunk)
    if hidden_cf.shape != hidden.shape or hidden_cf.dtype != hidden.dtype or hidden_cf.device != hidden.device:
        raise ValueError(
            f"hidden_cf must match hidden ({list(hidden.shape)} {hidden.dtype} on {hidden.device}), "
            f"got {list(hidden_cf.shape)} {hidden_cf.dtype} on {hidden_cf.device}"
        )
    unknown = [name for name in divergences if name not in DIVERGENCES]
    if unknown or isinstance(divergences, str):
        raise ValueError(f"divergences must be a sequence of {', '.join(DIVERGENCES)}, got {unknown or divergences!r}")
    rows = kept_rows(targets, ignore_index)
    inv_temperature = inverse_temperature(temperature, rows, hidden)
    head = Head(weight, choose(hidden.device, hidden.dtype, implementation), banned=banned, chunk=chunk)
    check_labels(targets, head.vocabulary, ignore_index, head.banned)
    kept = slice(None) if rows is None else rows
    pair = (hidden[kept], hidden_cf[kept], targets[kept].long(), inv_temperature)
    second_read = "js" in divergences or "tv" in divergences
    scores = (_score_twice if second_read or weight.device.type != "cpu" else _score_tiles)(head, *pair, second_read)
    head.release()
    return CounterfactualScore(
        *(spread(values, rows, len(hidden)) for values in scores[:4]),
        *(spread(values, rows, len(hidden)) if name in divergences else None for name, values in zip(DIVERGENCES, scores[4:], strict=True)),
    )


def _score_tiles(head: Head, hidden: Tensor, hidden_cf: Tensor, targets: Tensor, inv_temperature: Tensor, _) -> list:
    """What one read gives, by vocabulary tiles."""
    states = [torch.empty(0, PAIR_STATE_WIDTH, dtype=head.dtype)]
    for block in blocks(len(hidden), max(head.scoring_rows // 2, 1)):
        both = torch.cat([hidden[block], hidden_cf[block]])  # one product for the two of them
        state: Tensor | None = None
        rows = len(both) // 2
        for start, tile in head.tiles(both):
            state = head.rows.pair_statistics(tile[:rows], tile[rows:], targets[block], inv_temperature[block], state, start)
        assert state is not None, "a head has columns"
        states.append(state)
    return [*_read(torch.cat(states)), None, None]


def _score_twice(head: Head, hidden: Tensor, hidden_cf: Tensor, targets: Tensor, inv_temperature: Tensor, second: bool) -> list:
    """By token chunks, whose logits can be read again."""
    states = [torch.empty(0, PAIR_STATE_WIDTH, dtype=head.dtype, device=hidden.device)]
    js, tv = [states[0][:, 0]], [states[0][:, 0]]
    for block in blocks(len(hidden), max(head.chunk // 2, 1)):
        logits, logits_cf = head.logits(torch.cat([hidden[block], hidden_cf[block]])).chunk(2)
        if second and hasattr(head.rows, "pair_scores"):
            state, found = head.rows.pair_scores(logits, logits_cf, targets[block], inv_temperature[block])
        else:
            state = head.rows.pair_statistics(logits, logits_cf, targets[block], inv_temperature[block])
            found = head.rows.pair_divergences(logits, logits_cf, inv_temperature[block], state) if second else None
        states.append(state)
        if found is not None:
            js.append(found[0])
            tv.append(found[1])
    return [*_read(torch.cat(states)), torch.cat(js), torch.cat(tv)]


def _read(state: Tensor) -> tuple[Tensor, ...]:
    """Log-probs, entropies and KLs of a complete pair state."""
    second = state[:, STATE_WIDTH:]
    return logprobs_of(state), logprobs_of(second), entropies_of(state), entropies_of(second), *kls_of(state)
