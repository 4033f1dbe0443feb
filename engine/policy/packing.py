"""From groups to flat rows: streams, the one normalisation weight, and which rows run where.

Pure numpy and deterministic: every rank computes the same plan from the same batch, so no rank has to be told its share.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.config import LossConfig, SamplingConfig
from headrace.records import Array, Group, Prompt, Rollout, StepBatch

ATTENTION_PARITY = 49_152
"""Row length whose attention costs as much as its projections: 12 x width, for a width of 4,096."""


# ------------------------------------------------------------------------------------------------------ batch


def build_batch(groups: Sequence[Group], loss: LossConfig, sampling: SamplingConfig) -> StepBatch:
    """Lay the scored rollouts of ``groups`` out as one optimizer batch.

    ``prompts`` holds positions in ``groups``; a rollout taken in from another question has the position of that question's group, or,
    without one, a number beyond them. Rollouts without a usable score and empty responses get no row, count in no denominator and are
    reported in ``left_out``. CGE-masked tokens leave ``loss_mask`` but stay in the denominator.

    Raises:
        ValueError: a group has no advantages, or a prompt or the streams of a completion do not fit together.
    """
    rows, prompts, left_out = _rows(groups)
    prompt_lengths = np.array([len(prompts[place].token_ids) for place, _, _ in rows], dtype=np.int64)
    lengths = np.array([len(rollout.completion.token_ids) for _, rollout, _ in rows], dtype=np.int64)
    cu_seqlens = np.concatenate(([0], np.cumsum(prompt_lengths + lengths))).astype(np.int32)
    tokens = int(cu_seqlens[-1])
    response_mask = np.zeros(tokens, dtype=bool)
    for end, length in zip(cu_seqlens[1:], lengths, strict=True):
        response_mask[end - length : end] = True

    def stream(values: Sequence[Array], dtype: type) -> Array:
        """Per-token stream [N] with zeros on prompt positions."""
        out: Array = np.zeros(tokens, dtype=dtype)
        if values:
            out[response_mask] = np.concatenate(values)
        return out

    token_ids = np.zeros(tokens, dtype=np.int64)
    if rows:
        token_ids[~response_mask] = np.concatenate([prompts[place].token_ids for place, _, _ in rows])
        token_ids[response_mask] = np.concatenate([rollout.completion.token_ids for _, rollout, _ in rows])
    old_logprobs = stream([rollout.completion.logprobs for _, rollout, _ in rows], np.float32)
    masked = stream([rollout.completion.masked for _, rollout, _ in rows], np.bool_)
    finite = np.isfinite(old_logprobs)
    return StepBatch(
        token_ids=token_ids,
        cu_seqlens=cu_seqlens,
        response_mask=response_mask,
        loss_mask=response_mask & ~masked & finite,
        loss_weight=loss_weights(response_mask, cu_seqlens, loss.normalisation, sampling.max_tokens),
        old_logprobs=np.where(finite, old_logprobs, np.float32(0)),
        advantages=stream([np.repeat(advantage, length) for (_, _, advantage), length in zip(rows, lengths, strict=True)], np.float32),
        gates=np.ones(tokens, dtype=np.float32),
        temperature=sampling.temperature,
        media=tuple(prompts[place].question.media for place, _, _ in rows),
        prompts=np.array([place for place, _, _ in rows], dtype=np.int32),
        questions=tuple(prompts[place].question.id for place, _, _ in rows),
        claims=tuple(rollout.claims for _, rollout, _ in rows) if any(rollout.claims is not None for _, rollout, _ in rows) else (),
        left_out=left_out | {"non_finite": int((~finite).sum())},
    )


def _rows(groups: Sequence[Group]) -> tuple[list[tuple[int, Rollout, float]], list[Prompt], dict[str, int]]:
    """What becomes a row, with the place of its prompt and its advantage; all prompts; and how many rollouts get no row, by reason."""
    rows: list[tuple[int, Rollout, float]] = []
    prompts = [group.prompt for group in groups]
    place_of = {id(prompt): place for place, prompt in enumerate(prompts)}
    left_out = {"unscored": 0, "empty": 0}
    for position, group in enumerate(groups):
        for rollout, advantage in zip(group.rollouts, _group_advantages(group), strict=True):
            if rollout.reward is None or rollout.failure:
                left_out["unscored"] += 1
            elif not len(rollout.completion.token_ids):
                left_out["empty"] += 1
            else:
                own = rollout.prompt
                if own is not None and id(own) not in place_of:
                    place_of[id(own)] = len(prompts)
                    prompts.append(own)
                place = position if own is None else place_of[id(own)]
                rows.append((place, _checked(rollout, group), float(advantage)))
    return rows, prompts, left_out


def _group_advantages(group: Group) -> Array:
    """Advantages [G] of a group, checked."""
    name = group.prompt.question.id
    if group.advantages is None or len(group.advantages) != len(group.rollouts):
        got = "none" if group.advantages is None else str(len(group.advantages))
        raise ValueError(f"question {name}: expected one advantage per rollout ({len(group.rollouts)}), got {got}")
    if not len(group.prompt.token_ids):
        raise ValueError(f"question {name}: the prompt has no token, so nothing predicts the first response token")
    return group.advantages


def _checked(rollout: Rollout, group: Group) -> Rollout:
    """The rollout, once its per-token streams are known to be equally long."""
    completion = rollout.completion
    length = len(completion.token_ids)
    for name in ("logprobs", "masked", "versions"):
        if len(getattr(completion, name)) != length:
            raise ValueError(
                f"question {group.prompt.question.id}, rollout {rollout.index}: {len(getattr(completion, name))} {name} for {length} tokens"
            )
    return rollout


def loss_weights(response_mask: Array, cu_seqlens: Array, normalisation: str, max_tokens: int) -> Array:
    """The per-token weight [N] that makes a plain sum over all ranks the wanted mean; fp32, 0 on prompts.

    ``token_mean``: 1 / response tokens of the step. ``sequence_mean``: 1 / (rows x own length). ``constant``:
    1 / (rows x ``max_tokens``), Dr. GRPO. Every response token counts, masked or not.
    """
    rows = len(cu_seqlens) - 1
    lengths = response_lengths(response_mask, cu_seqlens)
    if normalisation == "token_mean":
        per_row = np.full(rows, 1 / max(1, lengths.sum()))
    elif normalisation == "sequence_mean":
        per_row = 1 / (max(1, rows) * np.maximum(lengths, 1))
    else:
        per_row = np.full(rows, 1 / (max(1, rows) * max_tokens))
    return np.where(response_mask, np.repeat(per_row, np.diff(cu_seqlens)), 0).astype(np.float32)


def response_lengths(response_mask: Array, cu_seqlens: Array) -> Array:
    """Response tokens of every row, [B] int64."""
    before = np.concatenate(([0], np.cumsum(response_mask)))
    return before[cu_seqlens[1:]] - before[cu_seqlens[:-1]]


def take_rows(batch: StepBatch, rows: Sequence[int] | Array) -> StepBatch:
    """The given rows, in that order, with their weights unchanged."""
    chosen = np.asarray(rows, dtype=np.int64)
    if len(chosen) == len(batch.prompts) and np.array_equal(chosen, np.arange(len(chosen))):
        return batch
    starts, lengths = batch.cu_seqlens[chosen].astype(np.int64), np.diff(batch.cu_seqlens)[chosen]
    cu_seqlens = np.concatenate(([0], np.cumsum(lengths)))
    flat = np.arange(cu_seqlens[-1]) + np.repeat(starts - cu_seqlens[:-1], lengths)
    per_token = ("token_ids", "response_mask", "loss_mask", "loss_weight", "old_logprobs", "advantages", "gates")
    return replace(
        batch,
        **{name: getattr(batch, name)[flat] for name in per_token},
        proximal_logprobs=None if batch.proximal_logprobs is None else batch.proximal_logprobs[flat],
        cu_seqlens=cu_seqlens.astype(np.int32),
        media=tuple(batch.media[row] for row in chosen),
        prompts=batch.prompts[chosen],
        questions=tuple(batch.questions[row] for row in chosen) if batch.questions else (),
        claims=tuple(batch.claims[row] for row in chosen) if batch.claims else (),
    )


def split_rows(batch: StepBatch, parts: int) -> list[Array]:
    """Rows of every mini-batch: whole groups, evenly and in order; with fewer groups than ``parts`` there are fewer mini-batches."""
    groups = np.unique(batch.prompts)
    shares = np.array_split(groups, max(1, min(parts, len(groups))))
    return [np.flatnonzero(np.isin(batch.prompts, share)) for share in shares]


def split_batch(batch: StepBatch, parts: int, loss: LossConfig, sampling: SamplingConfig) -> list[StepBatch]:
    """Mini-batches of ``split_rows``, one optimizer step each, every one with its own denominator."""
    if parts == 1:
        return [batch]
    minis = [take_rows(batch, rows) for rows in split_rows(batch, parts)]
    weights = [loss_weights(mini.response_mask, mini.cu_seqlens, loss.normalisation, sampling.max_tokens) for mini in minis]
    return [replace(mini, loss_weight=weight) for mini, weight in zip(minis, weights, strict=True)]


# ------------------------------------------------------------------------------------------------------ plan


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward pass on one rank."""

    rows: tuple[int, ...]
    gradient: bool
    """A backward pass follows; without, the rows only feed the metrics."""
    filler: bool = False
    """Runs so that the collectives of all ranks match, and counts for nothing."""


def rows_with_gradient(batch: StepBatch, every_token: bool) -> Array:
    """Which rows can move the policy, [B] bool: some token has a coefficient that is not zero.

    ``every_token``: a KL or entropy term is on, which acts wherever the weight is not zero.
    """
    coefficients = batch.loss_weight if every_token else batch.loss_weight * batch.loss_mask * batch.advantages
    return response_lengths(coefficients != 0, batch.cu_seqlens) > 0


def deal_rows(batch: StepBatch, world_size: int, rows: Sequence[int] | None = None) -> list[list[int]]:
    """Rows of every rank, balanced by cost (projections plus attention): longest first, each to the idlest rank.

    Rows that share pixels go to one rank as far as that leaves the balance within half a rank's share.
    """
    lengths = np.diff(batch.cu_seqlens).tolist()
    chosen = list(range(len(lengths)) if rows is None else rows)
    shares: list[list[int]] = [[] for _ in range(world_size)]
    load = [0.0] * world_size
    for bundle in _bundles(batch, chosen, sum(lengths[row] for row in chosen) // (2 * world_size)):
        rank = min(range(world_size), key=load.__getitem__)
        shares[rank] += bundle
        load[rank] += sum(lengths[row] * (1 + lengths[row] / ATTENTION_PARITY) for row in bundle)
    return shares


def micro_batches(batch: StepBatch, rows: Sequence[int], budget: int) -> list[list[int]]:
    """First-fit-decreasing packing of ``rows`` into micro-batches of at most ``budget`` tokens.

    A single row above the budget gets a micro-batch of its own. The number of micro-batches comes from the packing,
    their loads are then evened out where the budget allows, which keeps the peak memory of a step low. Rows that share
    pixels stay together where they fit, so that a trained vision tower meets them once.
    """
    lengths = np.diff(batch.cu_seqlens).tolist()
    bundles = _bundles(batch, rows, budget)
    sizes = [sum(lengths[row] for row in bundle) for bundle in bundles]
    bins: list[list[int]] = []
    room: list[int] = []
    for bundle, size in zip(bundles, sizes, strict=True):
        place = next((i for i, free in enumerate(room) if size <= free), None)
        if place is None:
            bins.append([])
            room.append(budget)
            place = len(bins) - 1
        bins[place] += bundle
        room[place] -= size
    evened = _evened(bundles, sizes, len(bins))
    fits = all(0 < sum(lengths[row] for row in chosen) <= budget for chosen in evened)
    return evened if fits else bins


def _bundles(batch: StepBatch, rows: Sequence[int], limit: int) -> list[list[int]]:
    """Rows that are placed as one, longest bundle first: those of one prompt with media, up to ``limit`` tokens; else single rows."""
    lengths = np.diff(batch.cu_seqlens).tolist()
    bundles: list[list[int]] = []
    filled: dict[int, tuple[list[int], int]] = {}
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        prompt = int(batch.prompts[row])
        bundle, size = filled.get(prompt, ([], limit))
        if not batch.media[row] or size + lengths[row] > limit:
            bundle, size = [], 0
            bundles.append(bundle)
        bundle.append(row)
        filled[prompt] = bundle, size + lengths[row]
    return sorted(bundles, key=lambda bundle: (-sum(lengths[row] for row in bundle), bundle))


def _evened(bundles: Sequence[Sequence[int]], sizes: Sequence[int], count: int) -> list[list[int]]:
    """The bundles, longest first, cut into ``count`` runs of about equal load.

    Neighbours in length share a micro-batch, so an attention that pads inside a micro-batch wastes little.
    """
    evened: list[list[int]] = [[] for _ in range(count)]
    total, done = sum(sizes), 0
    for bundle, size in zip(bundles, sizes, strict=True):
        evened[min(count - 1, math.floor((done + size / 2) * count / total))] += bundle
        done += size
    return evened


def schedule(batch: StepBatch, gradient: Array, world_size: int, budget: int) -> list[list[MicroBatch]]:
    """Micro-batches of every rank: equally many with and without gradient on each, those with gradient last.

    ``gradient`` [B] says which rows need a backward pass.
    """
    plans: list[list[MicroBatch]] = [[] for _ in range(world_size)]
    filler_row = int(np.argmin(np.diff(batch.cu_seqlens))) if len(gradient) else 0
    for kind in (False, True):
        shares = deal_rows(batch, world_size, np.flatnonzero(gradient == kind).tolist())
        packed = [micro_batches(batch, share, budget) for share in shares]
        count = max(len(bins) for bins in packed)
        for plan, bins in zip(plans, packed, strict=True):
            bins = _divided(bins, count)
            plan += [MicroBatch(tuple(rows), kind) for rows in bins]
            plan += [MicroBatch((filler_row,), kind, filler=True)] * (count - len(bins))
    return plans


def _divided(bins: list[list[int]], count: int) -> list[list[int]]:
    """Halve the fullest bins until there are ``count``, or only single rows are left."""
    bins = list(bins)
    while len(bins) < count and any(len(rows) > 1 for rows in bins):
        fullest = max(range(len(bins)), key=lambda i: len(bins[i]))
        rows = bins[fullest]
        bins[fullest : fullest + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return bins
