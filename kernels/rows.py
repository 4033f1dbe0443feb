"""The row operations: what an implementation of the kernels provides, and the arithmetic on `[N]` vectors they share.

An implementation is a module with the functions below. `headrace.kernels.reference` is the definition (any float dtype),
`headrace.kernels.native` is C++ for CPUs, `headrace.kernels.triton` serves GPUs. Everything around them (validation,
compaction, GEMMs, autograd, collectives) is shared code and calls them with checked arguments:

* `logits [N, C]` fp32 (reference: also float64), contiguous, not yet divided by the temperature; its columns are the
  vocabulary ids `offset … offset + C − 1`. Banned ids already hold −inf. `targets [N]` int64 are global vocabulary ids;
  a target outside these columns belongs to another tile or rank. `inv_temperature [N]` is 1 / T, in the dtype of the logits.
  Below, z = logits · inv_temperature.
* Nothing may assume a finite row: −inf means probability 0 (and 0 · log 0 = 0); NaN in a row must come out as NaN of
  that row alone. Rows past 2^31 elements are normal: row offsets are 64 bit.
* Nothing synchronises with the host, and a result does not depend on the other rows of the call.

    statistics(logits, targets, inv_temperature, state=None, offset=0) -> state [N, 4]
        Fold the columns into running statistics (`MAX`, `SUM`, `WEIGHTED`, `TARGET`). `state=None` starts anew; a given
        state is updated in place and returned. One read of the logits.

    gradient(logits, targets, inv_temperature, state, grad_logprobs, grad_entropies, *, rows=None, offset=0, dtype=None)
            -> [M, C]
        d loss / d logits of the rows, from complete statistics and the two coefficients `[N]` per row:
            (g · (1[j = target] − p_j) − h · p_j (log p_j + H)) · inv_temperature
        The logits are consumed: the result may share their storage. `rows [M]` int64 compacts: row k of the result is
        that of logits row rows[k], where always rows[k] == k or rows[k] >= M, so that writing row k in place never
        destroys a source. None means all N in order. Rows with both coefficients 0 are written as zeros, unread.
        `dtype` of the result: that of the logits unless given (GPUs ask for the dtype of the next GEMM).

    token_loss(logprobs, entropies, streams, spec, log_ratios=None) -> TokenLoss
        The gated clipped loss of N tokens and its derivatives (`TokenLoss` says what each is; `policy_loss.py` has the formulas).
        `streams` as in `TokenStreams`. Rows with mask False: nothing of them is read into arithmetic. `log_ratios [N]`
        replaces log π − anchor where the ratio is not the token's own (gspo).

    loss_gradient(logits, targets, inv_temperature, streams, spec, *, dtype=None) -> (state [N, 4], gradient [N, C])
        Optional, for implementations that gain by it: statistics, the loss coefficients of each row and their gradient in one
        call. The columns are the whole vocabulary and the loss is not gspo. The logits are consumed as by `gradient`.

    pair_statistics(logits, logits_cf, targets, inv_temperature, state=None, offset=0) -> state [N, 10]
        Both rows' four statistics, then `CROSS` and `CROSS_CF`. One read of each.

    pair_divergences(logits, logits_cf, inv_temperature, state) -> (js [N], tv [N])
        Second read, given complete pair statistics. JS through the mixture in log space, never log of a sum of probabilities.

    pair_scores(logits, logits_cf, targets, inv_temperature) -> (state [N, 10], (js [N], tv [N]))
        Optional: both of the above from one read. The columns are the whole vocabulary.

    top_token(logits, eligible, threshold, banned=None, spared=None) -> TopTokenMask
        `logits [B, V]` in any float dtype, any row stride, unit column stride; not written. `threshold [B]` fp32,
        `banned` sorted distinct int64 ids (contiguous) or None: treated as −inf. `spared [V]` bool or None: top ids that are never
        removed. `top_token.py` has the semantics.

    top_token_sample(logits, eligible, threshold, seeds, positions, temperature, banned=None, spared=None)
            -> TopTokenSample
        As above, with a draw. `temperature [B]` fp32, 0 = greedy. Noise: `reference/noise.py`. A row without a finite
        logit, or with NaN, yields token −1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MAX, SUM, WEIGHTED, TARGET = range(4)
"""Columns of a state: m = max z, Σ e^(z−m), Σ e^(z−m) (z−m), and z of the target (−inf until its column was seen).

The weighted sum is relative to the maximum, so neither it nor the entropy loses digits when all logits are shifted."""

CROSS, CROSS_CF = 8, 9
"""Columns of a pair state after the two times four: Σ e^(z−m) ((z−m) − (z'−m')) and the same with the roles swapped."""

STATE_WIDTH, PAIR_STATE_WIDTH = 4, 10


class TokenLoss(NamedTuple):
    """The policy loss of N tokens."""

    losses: Tensor
    """[N] weighted loss of each token; their sum is the loss."""
    grad_logprobs: Tensor
    """[N] derivative of the loss by each log-prob."""
    grad_entropies: Tensor
    """[N] derivative by each entropy."""
    metrics: Tensor
    """[len(Metric)] fp32."""


def new_state(rows: int, like: Tensor, width: int = STATE_WIDTH) -> Tensor:
    """Statistics of no columns."""
    state = torch.zeros(rows, width, dtype=like.dtype, device=like.device)
    for start in range(0, width // STATE_WIDTH * STATE_WIDTH, STATE_WIDTH):
        state[:, start + MAX] = -torch.inf
        state[:, start + TARGET] = -torch.inf
    return state


def logprobs_of(state: Tensor) -> Tensor:
    """log p of the target, [N]. Of a pair state: of the first distribution."""
    return state[:, TARGET] - state[:, MAX] - state[:, SUM].log()


def entropies_of(state: Tensor) -> Tensor:
    """Entropy in nats, [N]."""
    return (state[:, SUM].log() - state[:, WEIGHTED] / state[:, SUM]).clamp_min(0)


def kls_of(state: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p ‖ p') and KL(p' ‖ p) of a pair state, [N] each."""
    log_sum, log_sum_cf = state[:, SUM].log(), state[:, STATE_WIDTH + SUM].log()
    forward = state[:, CROSS] / state[:, SUM] - log_sum + log_sum_cf
    reverse = state[:, CROSS_CF] / state[:, STATE_WIDTH + SUM] - log_sum_cf + log_sum
    return forward.clamp_min(0), reverse.clamp_min(0)


def merge_states(states: Tensor) -> Tensor:
    """Statistics over all columns from those of disjoint parts, [P, N, 4] → [N, 4]; the result ignores the order up to rounding."""
    top = states[:, :, MAX].amax(0)
    # A part that holds no finite logit has maximum −inf and sums 0; its shift must not become inf − inf.
    shift = torch.where(states[:, :, SUM] > 0, states[:, :, MAX] - top, 0)
    scale = torch.where(states[:, :, SUM] > 0, shift.exp(), states[:, :, SUM])
    total = (states[:, :, SUM] * scale).sum(0)
    weighted = ((states[:, :, WEIGHTED] + states[:, :, SUM] * shift) * scale).sum(0)
    return torch.stack([top, total, weighted, states[:, :, TARGET].amax(0)], dim=1)


def compacting_rows(active: Tensor) -> Tensor:
    """The source row of each row of a compacted chunk, as `gradient` wants it: int64 [M] from bool [N].

    Active rows among the first M stay; the holes are filled, in order, with the active rows from behind M.
    """
    count = int(active.sum())
    rows = torch.arange(count, device=active.device)
    rows[~active[:count]] = count + active[count:].nonzero().squeeze(1)
    return rows
