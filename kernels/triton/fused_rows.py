"""Statistics, loss coefficients and gradient of a chunk of logits in one launch.

The coefficients of a token's loss follow from that token's own log-prob and from what was known before the pass, so the
program that has read a row can go on to its gradient: no vector of statistics or coefficients goes to memory and back
between the two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.policy_spec import PolicySpec, TokenStreams
from headrace.kernels.rows import STATE_WIDTH
from headrace.kernels.triton.head_rows import overlay
from headrace.kernels.triton.launch import ROW_BLOCK, ROW_WARPS, on_device_of, options
from headrace.kernels.triton.loss_rows import loss_arguments
from headrace.kernels.triton.loss_terms import token_terms
from headrace.kernels.triton.online import row_statistics, target_score, write_gradient, write_zeros


def loss_gradient(
    logits: Tensor,
    targets: Tensor,
    inv_temperature: Tensor,
    streams: TokenStreams,
    spec: PolicySpec,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Statistics [N, 4] and d loss / d logits [N, C] of rows that hold the whole vocabulary; the logits are consumed."""
    count = len(logits)
    state = torch.empty(count, STATE_WIDTH, dtype=torch.float32, device=logits.device)
    out = overlay(logits, count, dtype)
    if count:
        with on_device_of(logits):
            loss_gradient_kernel[(count,)](
                logits,
                logits.stride(0),
                out,
                out.stride(0),
                targets,
                inv_temperature,
                state,
                logits.shape[1],
                **loss_arguments(streams, spec),
                BLOCK=ROW_BLOCK,
                **options(ROW_WARPS),
            )
    return state, out


@triton.jit
def loss_gradient_kernel(
    logits,
    stride,
    out,
    out_stride,
    targets,
    inv_temperatures,
    states,
    columns,
    old_logprobs,
    advantages,
    weights,
    gates,
    mask,
    ref_logprobs,
    proximal_logprobs,
    clip_low,
    clip_high,
    dual_clip,
    tis_cap,
    kl_coef,
    entropy_coef,
    surprisal_coef,
    CISPO: tl.constexpr,
    KL_KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    target = tl.load(targets + index)
    inv_temperature = tl.load(inv_temperatures + index)
    score = target_score(row, target, 0, columns, inv_temperature)
    top, total, weighted = row_statistics(row, inv_temperature, columns, BLOCK)
    state = states + index * 4
    tl.store(state, tl.where(total == 0, float("-inf"), top))
    tl.store(state + 1, total)
    tl.store(state + 2, weighted)
    tl.store(state + 3, score)

    counted = target == target
    if mask is not None:
        counted = tl.load(mask + index) != 0
    log_total = tl.log(total)
    logprob = tl.where(counted, (score - top) - log_total, 0.0)
    entropy = tl.where(counted, tl.maximum(log_total - weighted / total, 0.0, propagate_nan=tl.PropagateNan.ALL), 0.0)
    _, grad_logprob, grad_entropy, _, _, _, _, _, _, _, _, _ = token_terms(
        logprob,
        entropy,
        None,
        old_logprobs,
        advantages,
        weights,
        gates,
        ref_logprobs,
        proximal_logprobs,
        index,
        counted,
        clip_low,
        clip_high,
        dual_clip,
        tis_cap,
        kl_coef,
        entropy_coef,
        surprisal_coef,
        CISPO,
        KL_KIND,
    )
    out += index * out_stride
    if (grad_logprob == 0) & (grad_entropy == 0):
        write_zeros(out, columns, BLOCK)
    else:
        write_gradient(out, row, target, inv_temperature, top, total, weighted, grad_logprob, grad_entropy, 0, columns, BLOCK)
