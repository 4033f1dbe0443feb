"""Running softmax statistics, one set per lane, in registers.

A lane sees every `ROW_BLOCK`-th column, keeps its own maximum, and pays one exponential per column: of e^(top − z) and
e^(z − top) only the one that is below 1 is needed, since the other factor is 1. Lanes meet once, after the last column.

`LOWEST` stands for the maximum of no columns, because −inf would make −inf − (−inf). Its sum is 0, so it never counts.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def step_to(top, z):
    """How a column z changes sums kept against `top`: new top, their factor, the column's mass, and how far the top rose.

    NaN in z gives a NaN mass and leaves the top alone.
    """
    distance = z - top
    small = tl.exp(-tl.abs(distance))
    rises = distance > 0
    keep = tl.where(rises, small, 1.0)
    mass = tl.where(rises, 1.0, small)
    return tl.maximum(top, z), keep, mass, tl.where(rises, distance, 0.0), tl.where(rises, 0.0, distance)


@triton.jit
def scaled_by(value, factor):
    """value · factor, 0 where the factor is 0 whatever the value."""
    return tl.where(factor == 0, 0.0, value * factor)


@triton.jit
def fold(top, total, weighted, z):
    """Add columns to the lanes' maximum, Σ e^(z−m) and Σ e^(z−m) (z−m)."""
    top, keep, mass, rise, below = step_to(top, z)
    weighted = scaled_by(weighted - total * rise, keep) + scaled_by(below, mass)
    return top, total * keep + mass, weighted


@triton.jit
def rebase(top, total, weighted, new_top):
    """The same sums against a higher maximum."""
    shift = top - new_top
    scale = tl.exp(shift)
    return total * scale, scaled_by(weighted + total * shift, scale)


@triton.jit
def join_lanes(top, total, weighted):
    """The statistics of all lanes."""
    best = tl.max(top, 0)
    total, weighted = rebase(top, total, weighted, best)
    return best, tl.sum(total, 0), tl.sum(weighted, 0)


@triton.jit
def join(top, total, weighted, other_top, other_total, other_weighted):
    """The statistics of two disjoint sets of columns."""
    best = tl.maximum(top, other_top)
    total, weighted = rebase(top, total, weighted, best)
    other_total, other_weighted = rebase(other_top, other_total, other_weighted, best)
    return best, total + other_total, weighted + other_weighted


@triton.jit
def row_statistics(row, inv_temperature, columns, BLOCK: tl.constexpr):
    """Maximum, Σ e^(z−m) and Σ e^(z−m) (z−m) of one row of logits."""
    lanes = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + lanes
        z = tl.load(row + column, mask=column < columns, other=float("-inf")) * inv_temperature
        top, total, weighted = fold(top, total, weighted, z)
    return join_lanes(top, total, weighted)


@triton.jit
def target_score(row, target, offset, columns, inv_temperature):
    """z of the target, −inf where it lies outside these columns."""
    local = target - offset
    inside = (local >= 0) & (local < columns)
    return tl.load(row + local, mask=inside, other=float("-inf")) * inv_temperature


@triton.jit
def write_gradient(
    out, row, target, inv_temperature, top, total, weighted, grad_logprob, grad_entropy, offset, columns, BLOCK: tl.constexpr
):
    """d loss / d logits of one row; `out` may overlay the front of `row`.

    A narrower result lands at or before the logits it comes from. The barrier keeps fast warps from overwriting logits that
    slow ones have still to read.
    """
    log_total = tl.log(total)
    entropy = tl.maximum(log_total - weighted / total, 0.0, propagate_nan=tl.PropagateNan.ALL)
    local = target - offset
    # 32 bits for the comparison in the loop; a label of other columns must not wrap into these.
    local = tl.where((local >= 0) & (local < columns), local, -1).to(tl.int32)
    lanes = tl.arange(0, BLOCK)
    for start in range(0, columns, BLOCK):
        column = start + lanes
        inside = column < columns
        z = tl.load(row + column, mask=inside, other=float("-inf")) * inv_temperature
        log_prob = (z - top) - log_total
        prob = tl.exp(log_prob)
        pull = scaled_by(grad_logprob + grad_entropy * (log_prob + entropy), prob)
        value = tl.where(column == local, grad_logprob, 0.0) - pull
        tl.debug_barrier()
        tl.store(out + column, (value * inv_temperature).to(out.dtype.element_ty), mask=inside)


@triton.jit
def write_zeros(out, columns, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    for start in range(0, columns, BLOCK):
        column = start + lanes
        tl.store(out + column, tl.zeros([BLOCK], out.dtype.element_ty), mask=column < columns)
