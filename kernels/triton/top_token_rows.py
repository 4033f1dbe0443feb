"""The top-token mask and the sampler: slices of a row are summarised in one read, then one program a row decides.

The slices have a fixed width. More programs for smaller batches would be faster still, but then a row's last digit would
depend on how many other rows came with it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.top_token_records import TopTokenMask, TopTokenSample
from headrace.kernels.triton.launch import DRAW_BLOCK, ROW_BLOCK, ROW_WARPS, banned_flags, on_device_of, options
from headrace.kernels.triton.noise import gumbel_of, random_bits
from headrace.kernels.triton.online import LOWEST
from headrace.kernels.triton.race import NO_ID, fold_race, fold_rest, fold_rest_heated, join_parts, join_races

SLICE = 4 * ROW_BLOCK
"""Columns of one program: 19 slices of a vocabulary of 151,936 keep an H100 busy from 7 rows on."""

SUMS, IDS = 6, 3
"""Numbers per slice: top, rest top, rest sum, heated sum, first, second; and the ids of top, first and second."""


def top_token(
    logits: Tensor,
    eligible: Tensor,
    threshold: Tensor,
    banned: Tensor | None = None,
    spared: Tensor | None = None,
) -> TopTokenMask:
    """Which rows lose their top token."""
    decision = run(logits, eligible, threshold, None, None, None, banned, spared)
    return TopTokenMask(decision.fired, decision.top_id, decision.top_prob, decision.raw, decision.masked)


def top_token_sample(
    logits: Tensor,
    eligible: Tensor,
    threshold: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    banned: Tensor | None = None,
    spared: Tensor | None = None,
) -> TopTokenSample:
    """A draw from each row, after the mask."""
    decision = run(logits, eligible, threshold, seeds, positions, temperature, banned, spared)
    assert decision.token is not None
    return TopTokenSample(decision.token, decision.fired, decision.top_id, decision.top_prob, decision.masked, decision.raw)


class Decision:
    """Results of the deciding kernel; `raw` and `masked` are the row's log-sum-exps, or the draw's log-probs."""

    def __init__(self, rows: int, device: torch.device, draws: bool):
        self.fired = torch.empty(rows, dtype=torch.bool, device=device)
        self.top_id = torch.empty(rows, dtype=torch.int64, device=device)
        self.top_prob, self.raw, self.masked = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(3))
        self.token = torch.empty(rows, dtype=torch.int64, device=device) if draws else None


def run(
    logits: Tensor,
    eligible: Tensor,
    threshold: Tensor,
    seeds: Tensor | None,
    positions: Tensor | None,
    temperature: Tensor | None,
    banned: Tensor | None,
    spared: Tensor | None,
) -> Decision:
    rows, columns = logits.shape
    decision = Decision(rows, logits.device, seeds is not None)
    if rows == 0:
        return decision
    slices = triton.cdiv(columns, SLICE)
    sums = torch.empty(rows, SUMS, slices, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, IDS, slices, dtype=torch.int32, device=logits.device)
    with on_device_of(logits):
        slice_kernel[(rows, slices)](
            logits,
            logits.stride(0),
            seeds,
            positions,
            temperature,
            banned_flags(banned, columns),
            sums,
            ids,
            columns,
            SLICE=SLICE,
            BLOCK=ROW_BLOCK if seeds is None else DRAW_BLOCK,
            **options(ROW_WARPS),
        )
        decide_kernel[(rows,)](
            logits,
            logits.stride(0),
            eligible.contiguous().view(torch.uint8),
            None if spared is None else spared.contiguous().view(torch.uint8),
            threshold,
            temperature,
            sums,
            ids,
            slices,
            decision.fired.view(torch.uint8),
            decision.top_id,
            decision.top_prob,
            decision.raw,
            decision.masked,
            decision.token,
            LANES=max(triton.next_power_of_2(slices), 32),
            **options(1),
        )
    return decision


@triton.jit
def heat_of(temperatures, index):
    """1 / T of a row, 1 where it is greedy, and the factor of its noise."""
    temperature = tl.load(temperatures + index)
    greedy = temperature == 0
    return 1.0 / tl.where(greedy, 1.0, temperature), tl.where(greedy, 0.0, 1.0)


@triton.jit
def slice_kernel(
    logits,
    stride,
    seeds,
    positions,
    temperatures,
    banned,
    sums,
    ids,
    columns,
    SLICE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Summarise one slice of one row."""
    index = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = logits + index * stride
    lanes = tl.arange(0, BLOCK)
    begin = part * SLICE

    top = tl.full([BLOCK], float("-inf"), tl.float32)
    top_id = begin + lanes
    rest_top = tl.full([BLOCK], LOWEST, tl.float32)
    rest_sum = tl.zeros([BLOCK], tl.float32)
    heated_sum = tl.zeros([BLOCK], tl.float32)
    first = tl.full([BLOCK], float("-inf"), tl.float32)
    second = tl.full([BLOCK], float("-inf"), tl.float32)
    first_id = begin + lanes
    second_id = tl.full([BLOCK], NO_ID, tl.int32)
    inv_temperature = 1.0
    if seeds is not None:
        inv_temperature, loudness = heat_of(temperatures, index)
        seed = tl.load(seeds + index)
        position = tl.load(positions + index)

    for start in range(begin, min(begin + SLICE, columns), BLOCK):
        column = start + lanes
        inside = column < columns
        z = tl.load(row + column, mask=inside, other=float("-inf")).to(tl.float32)
        if banned is not None:
            z = tl.where(tl.load(banned + column, mask=inside, other=0) != 0, float("-inf"), z)
        rises = z > top
        loser = tl.where(rises, top, z)
        top_id = tl.where(rises, column, top_id)
        top = tl.where(rises, z, top)
        if seeds is None:
            rest_top, rest_sum = fold_rest(rest_top, rest_sum, loser)
        else:
            rest_top, rest_sum, heated_sum = fold_rest_heated(rest_top, rest_sum, heated_sum, loser, inv_temperature)
            score = z * inv_temperature + loudness * gumbel_of(random_bits(seed, position, start, BLOCK))
            first, first_id, second, second_id = fold_race(first, first_id, second, second_id, score, column)

    best, best_id, rest, total, heated = join_parts(top, top_id, rest_top, rest_sum, heated_sum, inv_temperature)
    slices = tl.num_programs(1)
    out = sums + index * (6 * slices) + part
    out_ids = ids + index * (3 * slices) + part
    tl.store(out, best)
    tl.store(out + slices, rest)
    tl.store(out + 2 * slices, total)
    tl.store(out_ids, best_id)
    if seeds is not None:
        winner, winner_id, runner, runner_id = join_races(first, first_id, second, second_id)
        tl.store(out + 3 * slices, heated)
        tl.store(out + 4 * slices, winner)
        tl.store(out + 5 * slices, runner)
        tl.store(out_ids + slices, winner_id)
        tl.store(out_ids + 2 * slices, runner_id)


@triton.jit
def log1p_of(x):
    """log(1 + x) for x ≥ 0: the rounding of 1 + x cancels."""
    rounded = 1.0 + x
    return tl.where(rounded == 1.0, x, tl.where(x < 1e30, tl.log(rounded) * x / (rounded - 1.0), tl.log(rounded)))


@triton.jit(do_not_specialize=["slices"])
def decide_kernel(
    logits,
    stride,
    eligible,
    spared,
    thresholds,
    temperatures,
    sums,
    ids,
    slices,
    fired_out,
    top_id_out,
    top_prob_out,
    raw_out,
    masked_out,
    token_out,
    LANES: tl.constexpr,
):
    """Join the slices of one row and decide."""
    index = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, LANES)
    inside = part < slices
    place = sums + index * (6 * slices) + part
    place_ids = ids + index * (3 * slices) + part
    top = tl.load(place, mask=inside, other=float("-inf"))
    top_id = tl.load(place_ids, mask=inside, other=NO_ID)
    rest_top = tl.load(place + slices, mask=inside, other=LOWEST)
    rest_sum = tl.load(place + 2 * slices, mask=inside, other=0.0)
    heated_sum = rest_sum
    inv_temperature = 1.0
    if token_out is not None:
        inv_temperature, loudness = heat_of(temperatures, index)
        heated_sum = tl.load(place + 3 * slices, mask=inside, other=0.0)
    best, best_id, rest, total, heated = join_parts(top, top_id, rest_top, rest_sum, heated_sum, inv_temperature)

    empty = best == float("-inf")
    # log Σ over the rest, from −inf if it is empty, minus the top.
    trail = (rest - best) + tl.log(total)
    odds = tl.exp(trail)
    top_prob = tl.where(empty, 0.0, 1.0 / (1.0 + odds))
    # The order of the products is the reference's: an odds of NaN or of a lone +inf must not look like certainty.
    top_prob = tl.where(best == float("inf"), float("nan"), top_prob)
    raw = tl.where(empty, best, best + log1p_of(odds))
    fired = (tl.load(eligible + index) != 0) & (top_prob > tl.load(thresholds + index)) & (total > 0)
    if spared is not None:
        fired = fired & (tl.load(spared + best_id) == 0)
    tl.store(fired_out + index, fired.to(tl.uint8))
    tl.store(top_id_out + index, best_id.to(tl.int64))
    tl.store(top_prob_out + index, top_prob)
    if token_out is None:
        tl.store(raw_out + index, raw)
        tl.store(masked_out + index, tl.where(fired, rest + tl.log(total), raw))
    else:
        first = tl.load(place + 4 * slices, mask=inside, other=float("-inf"))
        second = tl.load(place + 5 * slices, mask=inside, other=float("-inf"))
        first_id = tl.load(place_ids + slices, mask=inside, other=NO_ID)
        second_id = tl.load(place_ids + 2 * slices, mask=inside, other=NO_ID)
        _, winner, _, runner = join_races(first, first_id, second, second_id)
        token = tl.where(fired & (winner == best_id), runner, winner)
        # The chosen logit against the maximum of each set: shifting all logits changes nothing.
        lost = empty | (raw != raw)
        chosen = tl.load(logits + index * stride + token, mask=lost == 0, other=0.0).to(tl.float32)
        ahead = (rest - best) * inv_temperature
        whole = log1p_of(tl.exp(ahead + tl.log(heated)))
        raw_logprob = (chosen - best) * inv_temperature - whole
        open_logprob = tl.where(fired, (chosen - rest) * inv_temperature - tl.log(heated), raw_logprob)
        logprob = tl.where(loudness == 0, 0.0, open_logprob)
        tl.store(token_out + index, tl.where(lost, -1, token.to(tl.int64)))
        tl.store(masked_out + index, tl.where(lost, float("nan"), logprob))
        tl.store(raw_out + index, tl.where(lost, float("nan"), raw_logprob))
