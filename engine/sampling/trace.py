"""Records of what the mask removed (paper 000, Table 9 and Figure 8)."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.records import Array, MaskTrace

RANKED = 8
"""Ranks told apart; a drawn token beyond has rank `RANKED` + 1."""


@dataclass(frozen=True, slots=True)
class _Step:
    """The masked positions of one step, N of them."""

    rows: Array
    position: int
    removed: Array
    probs: Array
    drawn: Array
    statistics: Tensor  # [3, N] on the device: runner-up probability, rank, entropy


class TraceRecorder:
    """Collects masked positions step by step and sorts them by response at the end."""

    def __init__(self, limit: int) -> None:
        """Args:
        limit: records kept; later ones are dropped.
        """
        self.room = limit
        self._steps: list[_Step] = []

    def record(self, logits: Tensor, places: Array, rows: Array, position: int, removed: Array, probs: Array, drawn: Array) -> None:
        """Note the rows where the mask fired; nothing is synchronised.

        Args:
            logits: [B, V] before the mask, banned ids at −inf.
            places: [N] rows of `logits`.
            rows: [N] responses they belong to.
            position: of the token in the response.
            removed, probs, drawn: [N] top token, its probability, drawn token.
        """
        kept = min(len(places), self.room)
        if kept == 0:
            return
        self.room -= kept
        index = torch.from_numpy(places[:kept]).to(logits.device)
        statistics = mask_statistics(logits[index], torch.from_numpy(drawn[:kept]).to(logits.device, torch.int64))
        self._steps.append(_Step(rows[:kept], position, removed[:kept], probs[:kept], drawn[:kept], statistics))

    def traces(self, count: int) -> list[MaskTrace | None]:
        """The trace of each of `count` responses; None where nothing was recorded."""
        if not self._steps:
            return [None] * count
        rows = np.concatenate([step.rows for step in self._steps])
        positions = np.concatenate([np.full(len(step.rows), step.position) for step in self._steps])
        removed, probs, drawn = (np.concatenate([getattr(step, name) for step in self._steps]) for name in ("removed", "probs", "drawn"))
        runner_up, ranks, entropies = torch.cat([step.statistics for step in self._steps], dim=1).cpu().numpy()
        found: list[MaskTrace | None] = []
        for row in range(count):
            mine = np.flatnonzero(rows == row)  # steps are in order, so positions ascend
            found.append(
                MaskTrace(
                    positions=positions[mine].astype(np.int32),
                    removed_ids=removed[mine].astype(np.int32),
                    removed_probs=probs[mine].astype(np.float32),
                    runner_up_probs=runner_up[mine].astype(np.float32),
                    drawn_ids=drawn[mine].astype(np.int32),
                    drawn_ranks=ranks[mine].astype(np.int32),
                    entropies=entropies[mine].astype(np.float32),
                )
                if len(mine)
                else None
            )
        return found


def mask_statistics(logits: Tensor, drawn: Tensor) -> Tensor:
    """[3, N]: second probability, rank of the drawn token (1 is the top; beyond `RANKED`: `RANKED` + 1), entropy in nats.

    Args:
        logits: [N, V] before the mask.
        drawn: [N] tokens.
    """
    logprobs = logits.log_softmax(1)
    runner_up = logprobs.topk(2, dim=1).values[:, 1].exp()
    rank = (logprobs > logprobs.gather(1, drawn[:, None])).sum(1) + 1
    entropy = -(logprobs.exp() * logprobs.clamp(min=torch.finfo(logprobs.dtype).min)).sum(1)
    return torch.stack((runner_up, rank.clamp(max=RANKED + 1).to(runner_up.dtype), entropy))
