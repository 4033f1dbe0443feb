"""Log-prob and entropy statistics of logit rows, and the gradient through them. One program a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.rows import STATE_WIDTH
from headrace.kernels.triton.launch import ROW_BLOCK, ROW_WARPS, on_device_of, options
from headrace.kernels.triton.online import LOWEST, join, row_statistics, target_score, write_gradient, write_zeros


def statistics(logits: Tensor, targets: Tensor, inv_temperature: Tensor, state: Tensor | None = None, offset: int = 0) -> Tensor:
    """Fold columns into `state` [N, 4]."""
    fresh = state is None
    if state is None:
        state = torch.empty(len(logits), STATE_WIDTH, dtype=torch.float32, device=logits.device)
    if len(logits):
        with on_device_of(logits):
            statistics_kernel[(len(logits),)](
                logits,
                logits.stride(0),
                targets,
                inv_temperature,
                state,
                state.stride(0),
                offset,
                logits.shape[1],
                FRESH=fresh,
                BLOCK=ROW_BLOCK,
                **options(ROW_WARPS),
            )
    return state


@triton.jit(do_not_specialize=["state_stride", "offset"])
def statistics_kernel(
    logits, stride, targets, inv_temperatures, states, state_stride, offset, columns, FRESH: tl.constexpr, BLOCK: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    inv_temperature = tl.load(inv_temperatures + index)
    top, total, weighted = row_statistics(row, inv_temperature, columns, BLOCK)
    score = target_score(row, tl.load(targets + index), offset, columns, inv_temperature)
    state = states + index * state_stride
    if not FRESH:
        old_top = tl.maximum(tl.load(state), LOWEST)
        top, total, weighted = join(old_top, tl.load(state + 1), tl.load(state + 2), top, total, weighted)
        # Another tile has a target's score or none has; NaN must win over both.
        score = tl.maximum(score, tl.load(state + 3), propagate_nan=tl.PropagateNan.ALL)
    tl.store(state, tl.where(total == 0, float("-inf"), top))
    tl.store(state + 1, total)
    tl.store(state + 2, weighted)
    tl.store(state + 3, score)


def gradient(
    logits: Tensor,
    targets: Tensor,
    inv_temperature: Tensor,
    state: Tensor,
    grad_logprobs: Tensor,
    grad_entropies: Tensor,
    *,
    rows: Tensor | None = None,
    offset: int = 0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """d loss / d logits, [M, C], over the first M rows of the logits: a narrow result has the row stride of the wide one."""
    count = len(logits) if rows is None else len(rows)
    out = overlay(logits, count, dtype)
    if count:
        with on_device_of(logits):
            gradient_kernel[(count,)](
                logits,
                logits.stride(0),
                out,
                out.stride(0),
                rows,
                targets,
                inv_temperature,
                state,
                state.stride(0),
                grad_logprobs,
                grad_entropies,
                offset,
                logits.shape[1],
                BLOCK=ROW_BLOCK,
                **options(ROW_WARPS),
            )
    return out


def overlay(logits: Tensor, count: int, dtype: torch.dtype | None) -> Tensor:
    """The storage of the first `count` rows as [count, C] of a dtype no wider than the logits'."""
    if dtype is None or dtype == logits.dtype:
        return logits[:count]
    return logits.view(dtype)[:count, : logits.shape[1]]


@triton.jit(do_not_specialize=["state_stride", "offset"])
def gradient_kernel(
    logits,
    stride,
    out,
    out_stride,
    rows,
    targets,
    inv_temperatures,
    states,
    state_stride,
    grad_logprobs,
    grad_entropies,
    offset,
    columns,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    source = index
    if rows is not None:
        source = tl.load(rows + index)
    out += index * out_stride
    grad_logprob = tl.load(grad_logprobs + source)
    grad_entropy = tl.load(grad_entropies + source)
    if (grad_logprob == 0) & (grad_entropy == 0):
        write_zeros(out, columns, BLOCK)
    else:
        state = states + source * state_stride
        write_gradient(
            out,
            logits + source * stride,
            tl.load(targets + source),
            tl.load(inv_temperatures + source),
            tl.load(state),
            tl.load(state + 1),
            tl.load(state + 2),
            grad_logprob,
            grad_entropy,
            offset,
            columns,
            BLOCK,
        )
