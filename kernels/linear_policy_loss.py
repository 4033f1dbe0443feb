"""`linear_policy_loss`: head and policy loss in one, forward and backward for three matrix products."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.kernels import gemm
from headrace.kernels.dispatch import choose
from headrace.kernels.head import Head, HeadGradients, blocks
from headrace.kernels.inputs import Banned, check_chunk, check_head, inverse_temperature, kept_rows
from headrace.kernels.labels import check_labels
from headrace.kernels.linear_logprob import spread
from headrace.kernels.policy_loss import PolicyLoss, evaluate, renumber, sequence_ids
from headrace.kernels.policy_spec import PolicySpec, TokenStreams
from headrace.kernels.rows import entropies_of, logprobs_of


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    spec: PolicySpec,
    *,
    gates: Tensor | None = None,
    mask: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    proximal_logprobs: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    banned: Banned = None,
    chunk: int | None = None,
    group: "dist.ProcessGroup | None" = None,
    offset: int | None = None,
    implementation: str | None = None,
) -> PolicyLoss:
    """`policy_loss` of `linear_logprob`, differentiable in `hidden` and `weight`.

    The coefficient of a token follows from its own log-prob and entropy (gspo: from those of its sequence), so the gradient is
    formed while the logits of the chunk are there: nothing is computed twice. Arguments, formulas and errors are those of
    `linear_logprob` and `policy_loss`. Besides:

    * Ignored rows are dropped before the head. Rows whose coefficient is zero (mask False, advantage 0, clipped, gate 0) still
      get log-prob and entropy, but take no part in the two products of the backward pass.
    * gspo keeps a sequence in one chunk. A sequence longer than `chunk` has its logits formed a second time.
    * The weight's gradient is accumulated in fp32 over chunks and cast once.
    * Gradients are formed in the forward, unless none is wanted; the backward hands them over.

    Returns:
        PolicyLoss(loss, metrics, logprobs, entropies), the last three detached.
    """
    check_head(hidden, weight, targets)
    check_chunk(chunk)
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    streams = TokenStreams(old_logprobs, advantages, weights, gates, mask, ref_logprobs, proximal_logprobs)
    streams = streams.prepare(len(hidden), hidden.device, dtype)
    spec.check_streams(streams, cu_seqlens is not None)
    sequences = sequence_ids(cu_seqlens, len(hidden), hidden.device) if spec.kind == "gspo" else None

    rows = kept_rows(targets, ignore_index)
    inv_temperature = inverse_temperature(temperature, rows, hidden)
    head = Head(
        weight,
        choose(hidden.device, hidden.dtype, implementation),
        banned=banned,
        chunk=chunk,
        group=group,
        offset=offset,
    )
    if group is None:
        check_labels(targets, head.vocabulary, ignore_index, head.banned)
    kept = slice(None) if rows is None else rows
    batch = _Batch(
        head=head,
        spec=spec,
        targets=targets[kept].long(),
        inv_temperature=inv_temperature,
        streams=streams.select(rows),
        sequences=None if sequences is None else renumber(sequences[kept]),
        rows=rows,
    )
    return PolicyLoss(*_LinearPolicyLoss.apply(hidden, weight, batch, torch.is_grad_enabled()))


@dataclass
class _Batch:
    """The kept rows of one call, N of T."""

    head: Head
    spec: PolicySpec
    targets: Tensor
    inv_temperature: Tensor
    streams: TokenStreams
    sequences: Tensor | None
    rows: Tensor | None


class _LinearPolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, batch: _Batch, grad_enabled: bool):
        values = hidden.detach()
        wanted = [grad_enabled and needed for needed in ctx.needs_input_grad[:2]]
        if any(wanted):
            state, gradients = _score_and_differentiate(batch, values, *wanted)
            ctx.save_for_backward(*gradients)
            ctx.dtypes = hidden.dtype, weight.dtype
        else:
            kept = values if batch.rows is None else values[batch.rows]
            state = batch.head.score(kept, batch.targets, batch.inv_temperature)
            batch.head.release()
        logprobs, entropies = logprobs_of(state), entropies_of(state)
        # Loss and metrics are summed once over all rows, so that they do not depend on the chunks.
        token = evaluate(batch.head.rows, logprobs, entropies, batch.streams, batch.spec, batch.sequences)
        logprobs, entropies = (spread(each, batch.rows, len(hidden)) for each in (logprobs, entropies))
        ctx.mark_non_differentiable(token.metrics, logprobs, entropies)
        ctx.set_materialize_grads(False)
        return token.losses.sum(), token.metrics, logprobs, entropies

    @staticmethod
    def backward(ctx, grad_loss, *_):
        if grad_loss is None:
            return None, None, None, None
        gradients = (
            None if gradient is None else scale(gradient, grad_loss, dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return *gradients, None, None


def scale(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient · factor in the dtype of its parameter. On a CPU, where looking is free, the usual factor of one costs nothing."""
    if factor.device.type == "cpu" and factor.item() == 1.0:
        return gradient.to(dtype)
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))


def _score_and_differentiate(batch: _Batch, hidden: Tensor, wants_hidden: bool, wants_weight: bool):
    """Statistics [N, 4] of all kept rows and the gradients (hidden, weight)."""
    head = batch.head
    gradients = HeadGradients(head, hidden, wants_hidden, wants_weight)
    state = torch.empty(len(batch.targets), 4, dtype=head.dtype, device=hidden.device)
    order, units = plan(batch)
    for unit in units:
        _differentiate_unit(batch, hidden, order, unit, state, gradients)
    rest = order[units[-1].stop if units else 0 :]
    if len(rest):
        at = rest if batch.rows is None else batch.rows[rest]
        state[rest] = head.score(hidden[at], batch.targets[rest], batch.inv_temperature[rest])
    head.release()
    return state, gradients.finish()


def plan(batch: _Batch) -> tuple[Tensor, list[slice]]:
    """An order of the kept rows, those that may have a gradient first, and its division into units.

    The coefficients of a unit depend on its own rows alone: a chunk, or for gspo as many whole sequences as fit into one.
    """
    alive = batch.streams.may_have_gradient(batch.spec)
    if batch.sequences is not None:
        flags = torch.zeros_like(alive).index_fill_(0, batch.sequences[alive], True)
        alive = flags[batch.sequences]
    head = alive.nonzero().squeeze(1)
    order = torch.cat([head, (~alive).nonzero().squeeze(1)])
    if batch.sequences is None:
        return order, list(blocks(len(head), batch.head.chunk))
    lengths = torch.unique_consecutive(batch.sequences[head], return_counts=True)[1].tolist()
    return order, pack(lengths, batch.head.chunk)


def pack(lengths: list[int], size: int) -> list[slice]:
    """Consecutive sequences into units of at most `size` rows; a longer sequence is a unit of its own."""
    units, start, stop = [], 0, 0
    for length in lengths:
        if stop > start and stop + length - start > size:
            units.append(slice(start, stop))
            start = stop
        stop += length
    return [*units, slice(start, stop)] if stop > start else units


def fuses(batch: _Batch) -> bool:
    """Whether one row operation can go from logits to gradient: a token's coefficients follow from that row alone."""
    head = batch.head
    return hasattr(head.rows, "loss_gradient") and head.group is None and head.offset == 0 and batch.sequences is None


def _differentiate_unit(batch: _Batch, hidden: Tensor, order: Tensor, unit: slice, state: Tensor, gradients: HeadGradients):
    head = batch.head
    chosen = order[unit]
    index = chosen if batch.rows is None else batch.rows[chosen]
    targets, inv_temperature = batch.targets[chosen], batch.inv_temperature[chosen]
    if fuses(batch):
        rows = hidden[index]
        state[chosen], gradient = head.rows.loss_gradient(
            head.logits(rows), targets, inv_temperature, batch.streams.select(chosen), batch.spec, dtype=gemm.gradient_dtype(rows)
        )
        return gradients.accumulate(gradient, rows, index)
    parts = list(blocks(len(chosen), head.chunk))
    local = []
    for part in parts:
        rows = hidden[index[part]]
        logits = head.logits(rows)
        local.append(head.rows.statistics(logits, targets[part], inv_temperature[part], None, head.offset))
    complete = head.complete(torch.cat(local))
    state[chosen] = complete
    sequences = None if batch.sequences is None else batch.sequences[chosen]
    token = evaluate(head.rows, logprobs_of(complete), entropies_of(complete), batch.streams.select(chosen), batch.spec, sequences)
    for part in parts:
        if len(parts) > 1:
            rows = hidden[index[part]]
            logits = head.logits(rows)
        gradients.add(
            logits,
            rows,
            index[part],
            targets[part],
            inv_temperature[part],
            complete[part],
            token.grad_logprobs[part],
            token.grad_entropies[part],
        )
