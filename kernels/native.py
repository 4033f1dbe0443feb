"""The row operations in C++ for CPUs (csrc/cpu): SIMD chosen at run time, threads as many as torch uses.

Importing this raises ImportError where the extension was not built; `dispatch` then falls back to the reference.
`headrace.kernels.rows` describes the interface.
"""

import math

import torch
from torch import Tensor

from headrace.kernels import _native
from headrace.kernels.policy_spec import KL_KINDS, Metric, PolicySpec, TokenStreams
from headrace.kernels.rows import PAIR_STATE_WIDTH, TokenLoss, new_state
from headrace.kernels.top_token_records import TopTokenMask, TopTokenSample


def statistics(logits: Tensor, targets: Tensor, inv_temperature: Tensor, state: Tensor | None = None, offset: int = 0) -> Tensor:
    """Fold columns into `state` [N, 4]."""
    if state is None:
        state = new_state(len(logits), logits)
    _native.statistics(*addresses(logits, targets, inv_temperature, state), *logits.shape, offset, torch.get_num_threads())
    return state


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
    """d loss / d logits [M, C] in the storage of the logits."""
    count, columns = len(logits) if rows is None else len(rows), logits.shape[1]
    inputs = addresses(logits, targets, inv_temperature, state, grad_logprobs, grad_entropies, rows)
    _native.gradient(*inputs, count, columns, offset, torch.get_num_threads())
    return logits[:count] if dtype is None else logits[:count].to(dtype)


def pair_statistics(
    logits: Tensor,
    logits_cf: Tensor,
    targets: Tensor,
    inv_temperature: Tensor,
    state: Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    """Fold columns of both into `state` [N, 10]."""
    if state is None:
        state = new_state(len(logits), logits, PAIR_STATE_WIDTH)
    inputs = addresses(logits, logits_cf, targets, inv_temperature, state)
    _native.pair_statistics(*inputs, *logits.shape, offset, torch.get_num_threads())
    return state


def pair_divergences(logits: Tensor, logits_cf: Tensor, inv_temperature: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """JS and TV, [N] each."""
    js, tv = torch.empty_like(inv_temperature), torch.empty_like(inv_temperature)
    inputs = addresses(logits, logits_cf, inv_temperature, state, js, tv)
    _native.pair_divergences(*inputs, *logits.shape, torch.get_num_threads())
    return js, tv


def token_loss(
    logprobs: Tensor,
    entropies: Tensor,
    streams: TokenStreams,
    spec: PolicySpec,
    log_ratios: Tensor | None = None,
) -> TokenLoss:
    """Loss and derivatives of N tokens."""
    outputs = torch.empty(3, len(logprobs))
    metrics = torch.empty(len(Metric))
    inputs = addresses(
        logprobs,
        entropies,
        streams.old_logprobs,
        streams.advantages,
        streams.weights,
        streams.gates,
        streams.mask,
        streams.ref_logprobs,
        streams.proximal_logprobs,
        log_ratios,
        *outputs,
        metrics,
    )
    _native.token_loss(
        *inputs,
        len(logprobs),
        int(spec.kind == "cispo"),
        KL_KINDS.index(spec.kl_kind),
        spec.clip_low,
        spec.clip_high,
        math.inf if spec.dual_clip is None else spec.dual_clip,
        math.inf if spec.tis_cap is None else spec.tis_cap,
        spec.kl_coef,
        spec.entropy_coef,
        spec.surprisal_coef,
    )
    return TokenLoss(*outputs, metrics)


def top_token(
    logits: Tensor,
    eligible: Tensor,
    threshold: Tensor,
    banned: Tensor | None = None,
    spared: Tensor | None = None,
) -> TopTokenMask:
    """Which rows lose their top token."""
    scores = logits.float()
    rows, columns = scores.shape
    result = TopTokenMask(
        torch.empty(rows, dtype=torch.bool),
        torch.empty(rows, dtype=torch.int64),
        *torch.empty(3, rows),
    )
    _native.top_token(
        scores.data_ptr(),
        scores.stride(0),
        rows,
        columns,
        *addresses(eligible.contiguous(), threshold, banned),
        0 if banned is None else len(banned),
        *addresses(None if spared is None else spared.contiguous(), *result),
        torch.get_num_threads(),
    )
    return result


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
    scores = logits.float()
    rows, columns = scores.shape
    top_prob, logprob, raw_logprob = torch.empty(3, rows)
    token, top_id = torch.empty(2, rows, dtype=torch.int64)
    result = TopTokenSample(token, torch.empty(rows, dtype=torch.bool), top_id, top_prob, logprob, raw_logprob)
    _native.top_token_sample(
        scores.data_ptr(),
        scores.stride(0),
        rows,
        columns,
        *addresses(eligible.contiguous(), threshold, seeds, positions, temperature, banned),
        0 if banned is None else len(banned),
        *addresses(None if spared is None else spared.contiguous(), *result),
        torch.get_num_threads(),
    )
    return result


def addresses(*tensors: Tensor | None) -> list[int]:
    """Data pointers, 0 for None."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
