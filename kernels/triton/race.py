"""What a row's top-token decision and draw need of it, for lanes, slices and whole rows alike.

A part of a row is summarised by its largest logit and that token's id, the rest of it as a maximum and two sums (at
temperature 1 and at the sampler's), and the two best runners of the Gumbel race. Parts are joined by the same rule wherever
they come from. The largest token is kept out of the sums, so the rest loses no digits however close p* comes to one.
"""

import triton
import triton.language as tl

from headrace.kernels.triton.online import LOWEST, step_to

NO_ID = tl.constexpr(2147483647)


@triton.jit
def leading(value, ids):
    """The largest value and the lowest id that has it."""
    best = tl.max(value, 0)
    return best, tl.min(tl.where(value == best, ids, NO_ID), 0)


@triton.jit
def fold_rest(rest_top, rest_sum, z):
    """Add columns to the lanes' rest."""
    rest_top, keep, mass, _, _ = step_to(rest_top, z)
    return rest_top, rest_sum * keep + mass


@triton.jit
def fold_rest_heated(rest_top, rest_sum, heated_sum, z, inv_temperature):
    """The same, with the sum at the sampler's temperature beside it."""
    rest_top, keep, mass, rise, below = step_to(rest_top, z)
    heated_keep = tl.exp(-rise * inv_temperature)
    heated_mass = tl.exp(below * inv_temperature)
    return rest_top, rest_sum * keep + mass, heated_sum * heated_keep + heated_mass


@triton.jit
def join_parts(top, top_id, rest_top, rest_sum, heated_sum, inv_temperature):
    """One summary of several parts: all but the winner's largest token are demoted into the rest."""
    best, best_id = leading(top, top_id)
    demoted = tl.where(top_id == best_id, float("-inf"), top)
    new_top = tl.maximum(tl.max(rest_top, 0), tl.max(demoted, 0))
    new_top = tl.maximum(new_top, LOWEST)
    total = tl.sum(rest_sum * tl.exp(rest_top - new_top) + tl.exp(demoted - new_top), 0)
    heated = heated_sum * tl.exp((rest_top - new_top) * inv_temperature) + tl.exp((demoted - new_top) * inv_temperature)
    return best, best_id, new_top, total, tl.sum(heated, 0)


@triton.jit
def fold_race(first, first_id, second, second_id, score, ids):
    """Let columns run against the lanes' two best; ids rise, so an equal score does not overtake."""
    wins = score > first
    places = score > second
    second_id = tl.where(wins, first_id, tl.where(places, ids, second_id))
    second = tl.where(wins, first, tl.where(places, score, second))
    return tl.where(wins, score, first), tl.where(wins, ids, first_id), second, second_id


@triton.jit
def join_races(first, first_id, second, second_id):
    """The two best of several parts."""
    best, best_id = leading(first, first_id)
    won = first_id == best_id
    runner, runner_id = leading(tl.where(won, second, first), tl.where(won, second_id, first_id))
    return best, best_id, runner, runner_id
