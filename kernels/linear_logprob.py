"""`linear_logprob`: log-prob and entropy of tokens straight from hidden states, both differentiable."""

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.kernels.dispatch import choose
from headrace.kernels.head import Head, HeadGradients, blocks
from headrace.kernels.inputs import Banned, check_chunk, check_head, inverse_temperature, kept_rows
from headrace.kernels.labels import check_labels
from headrace.kernels.rows import entropies_of, logprobs_of


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    ignore_index: int = -100,
    banned: Banned = None,
    chunk: int | None = None,
    group: "dist.ProcessGroup | None" = None,
    offset: int | None = None,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution, without a logits matrix.

        z = hidden · weightᵀ / temperature;   log p_y = z_y − log Σ e^z;   H = −Σ p log p

    Args:
        hidden: [T, D] fp32, bf16, fp16 or float64; row t predicts targets[t] (already shifted by the caller).
        weight: [V, D], same dtype. May be a tied embedding; frozen, its gradient is not computed.
        targets: [T] integer ids in [0, V), or `ignore_index`.
        temperature: a number or [T], above 0.
        banned: ids that cannot be drawn; they leave the normalisation. A target may not be banned.
        chunk: tokens whose logits exist at once (default by vocabulary and device).
        group: ranks that hold equal consecutive parts of the vocabulary as `weight`; hidden, targets and the gradients of the
            results are the same on all of them. Costs one gather of four numbers per token; the gradient of hidden is summed.
        offset: with `group`, first id of this rank's part where the parts are not equal.
        implementation: `reference`, `native` or `triton`; default by device, see `dispatch`.

    Returns:
        (logprobs, entropies), [T] each in nats, fp32 (float64 for float64 inputs). Ignored rows are 0, their hidden states are
        not read and get no gradient.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; a label that is out of range or banned (on a GPU this is noted
            and raised by `raise_on_bad_labels`, so that nothing waits for it).

    An arbitrary loss can follow, at four matrix products forward and backward, since logits are formed again for the gradient.
    `linear_policy_loss` does it in three.
    """
    check_head(hidden, weight, targets)
    check_chunk(chunk)
    rows = kept_rows(targets, ignore_index)
    inv_temperature = inverse_temperature(temperature, rows, hidden)
    operations = choose(hidden.device, hidden.dtype, implementation)
    head = Head(weight, operations, banned=banned, chunk=chunk, group=group, offset=offset)
    if group is None:
        check_labels(targets, head.vocabulary, ignore_index, head.banned)
    kept = targets.long() if rows is None else targets[rows].long()
    return _LinearLogprob.apply(hidden, weight, head, kept, inv_temperature, rows)


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, head: Head, targets, inv_temperature, rows):
        ctx.set_materialize_grads(False)
        kept = hidden.detach() if rows is None else hidden.detach()[rows]
        state = head.score(kept, targets, inv_temperature)
        head.release()
        ctx.save_for_backward(hidden, weight, targets, inv_temperature, state, rows)
        ctx.head = head
        return spread(logprobs_of(state), rows, len(hidden)), spread(entropies_of(state), rows, len(hidden))

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropies):
        hidden, weight, targets, inv_temperature, state, rows = ctx.saved_tensors
        if grad_logprobs is None and grad_entropies is None:
            return None, None, None, None, None, None
        hidden = hidden.detach()
        ctx.head.weight = weight.detach()
        coefficients = [kept_gradient(grad, rows, state) for grad in (grad_logprobs, grad_entropies)]
        gradients = HeadGradients(ctx.head, hidden, ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        active = (coefficients[0] != 0) | (coefficients[1] != 0)
        order = active.nonzero().squeeze(1)
        for block in blocks(len(order), ctx.head.chunk):
            chosen = order[block]
            index = chosen if rows is None else rows[chosen]
            part = hidden[index]
            gradients.add(
                ctx.head.logits(part),
                part,
                index,
                targets[chosen],
                inv_temperature[chosen],
                state[chosen],
                coefficients[0][chosen],
                coefficients[1][chosen],
            )
        ctx.head.release()
        return *gradients.finish(), None, None, None, None


def spread(values: Tensor, rows: Tensor | None, tokens: int) -> Tensor:
    """Values of the kept rows at their places among all, 0 elsewhere."""
    return values if rows is None else values.new_zeros(tokens).index_copy_(0, rows, values)


def kept_gradient(gradient: Tensor | None, rows: Tensor | None, state: Tensor) -> Tensor:
    """The upstream gradient of the kept rows, contiguous, in the dtype of the statistics."""
    if gradient is None:
        return state.new_zeros(len(state))
    gradient = gradient if rows is None else gradient[rows]
    return gradient.to(state.dtype).contiguous()
