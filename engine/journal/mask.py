"""What the top-token mask did, position by position (paper 000, Table 9, Figure 8, Equations 5 and 6)."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.records import Array, MaskTrace, Rollout

LEAST_REST = 1e-3
"""Probability left beside the top token below which the entropy after the mask is too imprecise to report."""
_BOUNDARY = "Ġ▁ \t"  # markers that tokenizers put at the start of a word
_WHITESPACE = {"\n": "⏎", "\t": "⇥", " ": "␣", "\r": "↵"}


def entropy_bounds(top_prob: float, vocabulary: int) -> tuple[float, float]:
    """Least and largest entropy in nats of a distribution whose largest probability is ``top_prob`` (Eq. 5).

    The least puts all the rest on one token, the largest spreads it evenly over the other ``vocabulary - 1``.
    """
    if not 0 < top_prob <= 1 or vocabulary < 2:
        raise ValueError(f"top_prob = {top_prob}, vocabulary = {vocabulary}: expected a probability in (0, 1] and at least 2 tokens")
    rest = 1 - top_prob
    if rest == 0:
        return 0.0, 0.0
    top = -top_prob * np.log(top_prob)
    return float(top - rest * np.log(rest)), float(top + rest * (np.log(vocabulary - 1) - np.log(rest)))


def entropy_after(entropies: Array, top_probs: Array) -> Array:
    """Entropy in nats once the top token is removed, ``[M]`` (Eq. 6); NaN where too little probability is left."""
    entropies, top_probs = np.asarray(entropies, dtype=np.float64), np.asarray(top_probs, dtype=np.float64)
    rest = 1 - top_probs
    usable = rest > LEAST_REST
    safe = np.where(usable, rest, 1.0)
    with np.errstate(divide="ignore"):
        after = (entropies + top_probs * np.log(top_probs)) / safe + np.log(safe)
    return np.where(usable, after, np.nan)


def mask_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """``mask/*`` over the masked positions of one step; empty when no second wave was masked."""
    masked = [rollout for rollout in rollouts if rollout.arm == "masked"]
    if not masked:
        return {}
    positions = np.concatenate([np.flatnonzero(rollout.completion.masked) for rollout in masked])
    metrics = {
        "mask/responses_n": float(len(masked)),
        "mask/positions_n": float(len(positions)),
        "mask/per_response": len(positions) / len(masked),
        "mask/cap_hits": float(sum(rollout.completion.cap_hit for rollout in masked)),
    }
    if len(positions):
        metrics["mask/position_median"] = float(np.median(positions))
        metrics |= _shares({"first_100": positions < 100, "beyond_400": positions >= 400})
    traces = [_checked(rollout) for rollout in masked if rollout.completion.trace is not None]
    return metrics | _trace_metrics(traces)


def _shares(flags: dict[str, Array]) -> dict[str, float]:
    shares: dict[str, float] = {}
    for name, values in flags.items():
        shares[f"mask/{name}_n"] = float(values.sum())
        shares[f"mask/{name}"] = float(values.mean())
    return shares


def _checked(rollout: Rollout) -> MaskTrace:
    """The trace of a rollout, which may only name positions that leave the loss."""
    completion, trace = rollout.completion, rollout.completion.trace
    assert trace is not None
    assert completion.masked[trace.positions].all(), "the mask trace names a position that is not flagged as masked"
    assert np.array_equal(trace.drawn_ids, completion.token_ids[trace.positions]), "mask trace and response disagree on the drawn token"
    assert not (trace.drawn_ids == trace.removed_ids).any(), "a masked position drew the token that the mask removed"
    return trace


def _trace_metrics(traces: Sequence[MaskTrace]) -> dict[str, float]:
    traced = sum(len(trace.positions) for trace in traces)
    if not traced:
        return {"mask/traced_n": 0.0}
    top = np.concatenate([trace.removed_probs for trace in traces]).astype(np.float64)
    runner_up = np.concatenate([trace.runner_up_probs for trace in traces]).astype(np.float64)
    ranks = np.concatenate([trace.drawn_ranks for trace in traces])
    entropies = np.concatenate([trace.entropies for trace in traces]).astype(np.float64)
    after = entropy_after(entropies, top)
    usable = after[np.isfinite(after)]
    return {
        "mask/traced_n": float(traced),
        "mask/top_prob": float(top.mean()),
        "mask/entropy": float(entropies.mean()),
        **({"mask/entropy_after": float(usable.mean())} if len(usable) else {}),
        "mask/entropy_after_n": float(len(usable)),
        **_shares(
            {
                "top_prob_over_99": top > 0.99,
                "runner_up_majority": runner_up > (1 - top) / 2,
                "drawn_second": ranks == 2,
                "drawn_second_or_third": (ranks == 2) | (ranks == 3),
                "drawn_outside_8": ranks > 8,
            }
        ),
    }


@dataclass(frozen=True)
class MaskCounts:
    """Frequencies behind Figure 8 and the median of Table 9; counts of several steps add up."""

    removed: Counter[str]
    drawn: Counter[str]
    pairs: Counter[tuple[str, str]]
    positions: Counter[int]

    def add(self, other: "MaskCounts") -> None:
        """Count another step in."""
        self.removed.update(other.removed)
        self.drawn.update(other.drawn)
        self.pairs.update(other.pairs)
        self.positions.update(other.positions)

    def median_position(self) -> float:
        """Median of the masked positions; NaN without any."""
        where = np.array(sorted(self.positions), dtype=np.int64)
        return float(np.median(np.repeat(where, [self.positions[position] for position in where.tolist()]))) if len(where) else float("nan")

    def row(self) -> dict[str, Any]:
        """A JSON row, most frequent first."""
        return {
            "removed": _ordered(self.removed),
            "drawn": _ordered(self.drawn),
            "pairs": [[removed, drawn, count] for (removed, drawn), count in _ordered(self.pairs)],
            "positions": sorted(self.positions.items()),
        }

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> "MaskCounts":
        return cls(
            Counter(dict(row.get("removed", []))),
            Counter(dict(row.get("drawn", []))),
            Counter({(removed, drawn): count for removed, drawn, count in row.get("pairs", [])}),
            Counter({int(position): count for position, count in row.get("positions", [])}),
        )

    @classmethod
    def none(cls) -> "MaskCounts":
        return cls(Counter(), Counter(), Counter(), Counter())


def _ordered(counts: Counter) -> list[Any]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def printed_form(text: str) -> str | None:
    """A token as it prints: word-boundary variants fold onto one form, a piece of a character gives None."""
    if "\ufffd" in text:
        return None
    stripped = text.strip().strip(_BOUNDARY)
    if stripped:
        return stripped
    return "".join(_WHITESPACE.get(character, character) for character in text) or None


def mask_counts(rollouts: Iterable[Rollout], token_text: Callable[[int], str]) -> MaskCounts:
    """Removed tokens, drawn tokens and positions of one step, folded on their printed form."""
    removed: Counter[int] = Counter()
    drawn: Counter[int] = Counter()
    pairs: Counter[tuple[int, int]] = Counter()
    positions: Counter[int] = Counter()
    for rollout in rollouts:
        positions.update(np.flatnonzero(rollout.completion.masked).tolist())
        trace = rollout.completion.trace
        if trace is not None:
            removed.update(trace.removed_ids.tolist())
            drawn.update(trace.drawn_ids.tolist())
            pairs.update(zip(trace.removed_ids.tolist(), trace.drawn_ids.tolist(), strict=True))
    form = {token: printed_form(token_text(token)) for token in removed | drawn}
    return MaskCounts(_folded(removed, form), _folded(drawn, form), _folded_pairs(pairs, form), positions)


def _folded(counts: Counter[int], form: dict[int, str | None]) -> Counter[str]:
    folded: Counter[str] = Counter()
    for token, count in counts.items():
        text = form[token]
        if text is not None:
            folded[text] += count
    return folded


def _folded_pairs(counts: Counter[tuple[int, int]], form: dict[int, str | None]) -> Counter[tuple[str, str]]:
    folded: Counter[tuple[str, str]] = Counter()
    for (removed, drawn), count in counts.items():
        before, after = form[removed], form[drawn]
        if before is not None and after is not None:
            folded[before, after] += count
    return folded
