"""Persistence-aware credit gating (paper 003).

A response that got a positive advantage may owe it to claims about the picture that it would have made without looking. The tokens of
each claim are scored with the picture and with a degraded one: a claim whose likelihood does not fall with the picture gone persists, and
less of the advantage flows through it. What falls or rises in the whole response alike is taken off first.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from headrace.config import PACGConfig
from headrace.credit.pacg_metrics import Judged, claim_tokens, measure
from headrace.credit.responses import degraded_media, rows_where, spans
from headrace.pixels import Kind
from headrace.records import Array, CounterfactualScores, Media, StepBatch

SHIFT_LIMIT = 20.0  # nats; clamp of the change of one token, as in VPPO's code

GateForm = Literal["A", "B", "C"]

FORMS: dict[GateForm, Callable[[Array, float], Array]] = {
    "A": lambda fall, floor: np.maximum(floor, np.exp(-fall)),
    "B": lambda fall, floor: floor + (1 - floor) * np.exp(-fall),
    "C": lambda fall, floor: np.maximum(floor, 1 - fall),
}
"""Gate from α max(0, δ + m) and the floor. A is the default: of all forms only it puts about half of the claims below 1 and
a small share on the floor, as the paper reports."""


def shifts(logprobs: Sequence[float] | Array, logprobs_cf: Sequence[float] | Array) -> Array:
    """Δ = log p(token | degraded) - log p(token | original), [T] float64 nats within ± 20."""
    change = np.asarray(logprobs_cf, dtype=np.float64) - np.asarray(logprobs, dtype=np.float64)
    return change.clip(-SHIFT_LIMIT, SHIFT_LIMIT)


def corrected_persistence(
    logprobs: Sequence[float] | Array,
    logprobs_cf: Sequence[float] | Array,
    claims: Sequence[Sequence[int]],
    excluded: Sequence[int] | Array = (),
    *,
    calibrate: bool = True,
) -> tuple[Array, Array]:
    """δ of every claim: mean Δ over its tokens minus mean Δ over the tokens in no claim.

    Args:
        logprobs, logprobs_cf: [T] nats of one response, with the original and the degraded picture.
        claims: K claims as token positions; they may overlap.
        excluded: positions that count neither in a claim nor in the rest: those drawn under a mask.
        calibrate: False takes no mean of the rest off.

    Returns:
        (delta [K] float64 nats, NaN where invalid; valid [K] bool). A claim is invalid when none of its tokens is left, when there is no
        rest to calibrate by, or when a value is not finite.
    """
    change = shifts(logprobs, logprobs_cf)
    own = np.ones(len(change), dtype=bool)
    own[np.asarray(excluded, dtype=np.int64)] = False
    places = [np.asarray(claim, dtype=np.int64) for claim in claims]
    rest = own.copy()
    for claim in places:
        rest[claim] = False
    base = 0.0 if not calibrate else change[rest].mean() if rest.any() else np.nan
    kept = [claim[own[claim]] for claim in places]
    delta = np.array([change[claim].mean() - base if len(claim) else np.nan for claim in kept], dtype=np.float64)
    valid = np.isfinite(delta)
    return np.where(valid, delta, np.nan), valid


def gate(
    delta: float | Sequence[float] | Array, margin: float = 0.05, alpha: float = 10.0, floor: float = 0.30, form: GateForm = "A"
) -> Array:
    """Share of the advantage that a claim with corrected persistence δ passes on: 1 up to -margin, then falling towards the floor.

    Args:
        delta: [...] nats; not finite gives 1.
        margin, alpha, floor: m, α and g_min of the paper; α = 0 or floor = 1 leaves everything open.
        form: of the fall (``FORMS``).
    """
    values = np.asarray(delta, dtype=np.float64)
    finite = np.isfinite(values)
    fall = alpha * np.maximum(0.0, np.where(finite, values, -np.inf) + margin) if alpha else np.zeros_like(values)
    return np.where(finite, FORMS[form](fall, floor), 1.0)


def token_gates(
    delta: Sequence[float] | Array,
    claims: Sequence[Sequence[int]],
    length: int,
    margin: float = 0.05,
    alpha: float = 10.0,
    floor: float = 0.30,
    form: GateForm = "A",
) -> Array:
    """[length] float64: the smallest gate among the claims that cover a token, 1 outside claims."""
    return _smallest(gate(delta, margin, alpha, floor, form), claims, length)


def _smallest(gates: Array, claims: Sequence[Sequence[int] | Array], length: int) -> Array:
    """[length]: the smallest gate of the claims that cover a token."""
    found = np.ones(length)
    for value, claim in zip(gates, claims, strict=True):
        places = np.asarray(claim, dtype=np.int64)
        found[places] = np.minimum(found[places], value)
    return found


class PACG:
    """The credit rule: gates on the positive advantages of claims that persist (``records.CreditRule``).

    Applied by the loss, once and as constants. ``positive_only: false`` multiplies the advantages instead, of both signs.
    """

    def __init__(self, config: PACGConfig, intervention: Kind) -> None:
        self.config, self.intervention = config, intervention

    def wanted(self, batch: StepBatch) -> list[tuple[Media, ...]]:
        """Responses with claims and an advantage that a gate could change."""
        claims = batch.claims or [None] * len(batch.media)
        judged = np.array([self.config.claims == "every_token" or bool(spans) for spans in claims], dtype=bool)
        return degraded_media(batch, judged & self._concerned(batch), self.intervention)

    def refine(self, batch: StepBatch, scores: CounterfactualScores) -> StepBatch:
        """The batch with ``gates``, or with other ``advantages`` where both signs are gated."""
        judged = self._judge(batch, scores)
        gates = np.ones(len(batch.token_ids))
        for row in judged:
            gates[row.span] = _smallest(row.gates, row.claims, row.span.stop - row.span.start)
        measured = measure(batch, scores, judged, gates, self._concerned(batch), self.config)
        watched = {"pacg/positive_update_mass": claim_tokens(batch, judged) & scores.own}
        refined = replace(batch, measured={**batch.measured, **measured}, watched={**batch.watched, **watched})
        if self.config.positive_only:
            return replace(refined, gates=gates.astype(np.float32))
        return replace(refined, advantages=batch.advantages * gates.astype(np.float32))

    def _concerned(self, batch: StepBatch) -> Array:
        """[B] bool: rows whose advantages a gate could change."""
        signed = batch.advantages > 0 if self.config.positive_only else batch.advantages != 0
        return rows_where(batch, batch.response_mask & signed)

    def _judge(self, batch: StepBatch, scores: CounterfactualScores) -> list[Judged]:
        config, found = self.config, []
        concerned = scores.rows & self._concerned(batch)
        for row, span in enumerate(spans(batch)):
            claims = self._claims(batch, row, span)
            if not concerned[row] or not claims:
                continue
            delta, _ = corrected_persistence(
                scores.logprobs[span],
                scores.logprobs_cf[span],
                claims,
                np.flatnonzero(~scores.own[span]),
                calibrate=config.calibrate and config.claims == "routed",
            )
            found.append(Judged(span, delta, gate(delta, config.margin, config.alpha, config.floor, config.form), claims))
        return found

    def _claims(self, batch: StepBatch, row: int, span: slice) -> tuple[Array, ...]:
        """Token positions of each claim of a response."""
        if self.config.claims == "every_token":
            return tuple(np.arange(span.stop - span.start)[:, None])
        return tuple(np.arange(first, last) for first, last in (batch.claims[row] or ())) if batch.claims else ()
