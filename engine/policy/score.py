"""Teacher-forced passes: log-probs and entropies of given responses, without gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from headrace.kernels import linear_logprob
from headrace.policy.model import PackedRows
from headrace.policy.packing import micro_batches, schedule, take_rows
from headrace.policy.parallel import Parallel
from headrace.policy.sharing import share_fronts
from headrace.records import Array, StepBatch

T = TypeVar("T")
IGNORED = -100
"""Target of a position whose next token is not a response token; the head skips it."""


class PackedPolicy(Protocol):
    """What runs packed rows: a policy, or a reference."""

    def __call__(self, rows: PackedRows, head: Callable[[Tensor, Tensor], T], /) -> T:
        """``head(hidden [N, D], head_weight [V, D])``."""
        ...


@dataclass(frozen=True, slots=True)
class Scores:
    """Per-token values of a batch, aligned with its ``token_ids``; zero on prompt positions."""

    logprobs: Array  # [N] fp32, nats
    entropies: Array  # [N] fp32, nats


def packed_rows(batch: StepBatch, device: torch.device) -> PackedRows:
    """What the model reads of a batch."""
    return PackedRows(
        token_ids=torch.from_numpy(batch.token_ids).to(device, non_blocking=True),
        cu_seqlens=torch.from_numpy(batch.cu_seqlens).to(device, non_blocking=True),
        max_length=int(np.diff(batch.cu_seqlens).max(initial=0)),
        media=batch.media,
        prompts=batch.prompts,
        sharing=share_fronts(batch.token_ids, batch.cu_seqlens, list(zip(batch.prompts.tolist(), batch.media, strict=True)), device),
    )


def predicted(values: Array) -> Array:
    """A per-token stream [..., N] moved to the positions that predict the tokens: t - 1 gets the value of t, the last 0."""
    out = np.zeros_like(values)
    out[..., :-1] = values[..., 1:]
    return out


def predicted_targets(batch: StepBatch, chosen: Array) -> Array:
    """Targets [N] int64 of the hidden states: the next token where it is ``chosen`` [N] bool, else ``IGNORED``."""
    return np.where(predicted(chosen), predicted(batch.token_ids), IGNORED)


@torch.no_grad()
def teacher_forced(
    policy: PackedPolicy, rows: PackedRows, targets: Tensor, temperature: float, banned: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [N] of ``targets``, at the predicting positions; 0 where the target is ``IGNORED``."""
    return policy(rows, lambda hidden, weight: linear_logprob(hidden, weight, targets, temperature, ignore_index=IGNORED, banned=banned))


def score_batch(policy: PackedPolicy, batch: StepBatch, banned: Sequence[int], budget: int, device: torch.device) -> Scores:
    """Score every response token of a batch on this rank, in micro-batches of ``budget`` tokens."""
    return _scored(policy, batch, micro_batches(batch, range(len(batch.prompts)), budget), banned, device)


def score_on_all_ranks(policy: PackedPolicy, batch: StepBatch, banned: Sequence[int], budget: int, parallel: Parallel) -> Scores:
    """The same with the rows dealt out over the ranks, each of which gets the whole result. Collective."""
    plan = schedule(batch, np.zeros(len(batch.prompts), dtype=bool), parallel.world_size, budget)[parallel.rank]
    mine = _scored(policy, batch, [micro.rows for micro in plan if not micro.filler], banned, parallel.device)
    _scored(policy, batch, [micro.rows for micro in plan if micro.filler], banned, parallel.device)  # sharded layers gather on all ranks
    return Scores(parallel.add_up(mine.logprobs), parallel.add_up(mine.entropies))


@torch.no_grad()
def score_sequence(policy: PackedPolicy, token_ids: Sequence[int], device: torch.device) -> list[float]:
    """Log-probs [L - 1] in nats of the tokens after the first, at temperature 1 with nothing banned. Collective for a sharded policy."""
    ids = torch.tensor(list(token_ids), device=device)
    rows = PackedRows(ids, torch.tensor([0, len(ids)], dtype=torch.int32, device=device), len(ids))
    targets = torch.cat([ids[1:], ids.new_tensor([IGNORED])])
    logprobs, _ = teacher_forced(policy, rows, targets, 1.0, ())
    found: list[float] = logprobs[:-1].float().tolist()
    return found


def _scored(policy: PackedPolicy, batch: StepBatch, parts: Sequence[Sequence[int]], banned: Sequence[int], device: torch.device) -> Scores:
    """Scores of the rows in ``parts``, a forward pass each; zero elsewhere."""
    logprobs, entropies = (np.zeros(len(batch.token_ids), dtype=np.float32) for _ in range(2))
    for rows in parts:
        part = take_rows(batch, rows)
        targets = torch.from_numpy(predicted_targets(part, part.response_mask)).to(device)
        scored = teacher_forced(policy, packed_rows(part, device), targets, batch.temperature, banned)
        for out, values in zip((logprobs, entropies), scored, strict=True):
            place(out, batch, rows, values)
    return Scores(logprobs, entropies)


def place(out: Array, batch: StepBatch, rows: Sequence[int], values: Tensor) -> None:
    """Write ``values``, at the predicting positions of packed ``rows``, to the tokens of a batch's stream ``out`` [N]."""
    at = np.concatenate([np.arange(batch.cu_seqlens[row], batch.cu_seqlens[row + 1]) for row in rows])
    out[at[1:]] = values[:-1].float().cpu().numpy()
