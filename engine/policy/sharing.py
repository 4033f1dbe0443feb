"""Rows of one prompt run what they have in common once: causal attention makes its states the same in every row.

A group's responses share their prompt, so a packed micro-batch holds the same tokens several times over. All that works on tokens one
by one (projections, feed-forward, norms) runs on the distinct ones. Attention needs whole rows: queries, keys and values are spread out
to all places, and of the outputs one copy goes on. Gradients of the copies add up, in the order of the places, so they repeat bit for
bit. Exact but for rounding: a product over fewer tokens may add up in another order.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from headrace.records import Array


@dataclass(frozen=True, eq=False)
class Sharing:
    """Which of N packed tokens run: U of them, each at its first place; without indices all of them.

    One type for both, so that a compiled layer has one version.
    """

    kept: Tensor | None = None  # [U] int64, ascending places
    source: Tensor | None = None  # [N] int64, which kept token stands at a place

    def spread(self, kept: Tensor) -> Tensor:
        """[U, ...] to [N, ...]."""
        if self.source is None:
            return kept
        # `embedding` and not `index_select`, whose gradient would be added up in any order on a GPU
        return F.embedding(self.source, kept.flatten(1)).view(-1, *kept.shape[1:])

    def pick(self, spread: Tensor) -> Tensor:
        """[N, ...] to [U, ...]: first copies; others get no gradient."""
        return spread if self.kept is None else spread.index_select(0, self.kept)

    def twice(self) -> "Sharing":
        """Of the same rows behind themselves, nothing shared between the two."""
        if self.kept is None or self.source is None:
            return self
        tokens, kept = len(self.source), len(self.kept)
        return Sharing(torch.cat([self.kept, self.kept + tokens]), torch.cat([self.source, self.source + kept]))


def share_fronts(token_ids: Array, cu_seqlens: Array, prompts: Sequence[Hashable], device: torch.device) -> Sharing:
    """Share the longest common beginning of all rows of a prompt.

    Args:
        token_ids: [N] packed tokens.
        cu_seqlens: [B + 1] row boundaries.
        prompts: [B] equal for rows whose common tokens stand for the same, media included.
    """
    rows_of: dict[Hashable, list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows_of.setdefault(prompt, []).append(row)
    lengths = np.diff(cu_seqlens)
    places = np.arange(len(token_ids))
    first = places.copy()
    for rows in rows_of.values():
        offsets = cu_seqlens[rows][:, None] + np.arange(lengths[rows].min())  # [rows, shortest]
        tokens = token_ids[offsets]
        front = int(np.cumprod((tokens == tokens[0]).all(0)).sum())
        first[offsets[:, :front]] = offsets[0, :front]
    kept = np.flatnonzero(first == places)
    if len(kept) == len(places):
        return Sharing()
    source = np.searchsorted(kept, first)
    return Sharing(*(torch.from_numpy(index).to(device, non_blocking=True) for index in (kept, source)))
