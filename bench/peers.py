"""The same work by others: whatever of them can be imported, each called as its own documentation says.

None is a dependency. A separate folder on PYTHONPATH keeps their requirements out of the environment that is measured:

    pip install --no-deps --target peers liger-kernel cut-cross-entropy trl verl
    PYTHONPATH=peers python -m headrace.bench kernels
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace import torchvision_ops
from headrace.bench.cases import SPEC, THRESHOLD, Inputs, Rows
from headrace.bench.operations import Results

Work = Callable[[], Results]


@dataclass(frozen=True)
class Peer:
    """One way to do an operation."""

    name: str
    operation: str
    build: Callable[[Any], Work]
    """From inputs or rows. Raises whatever says that the peer does not run here."""
    note: str = ""
    """Where it computes less or something else than our contract."""
    matrices: int = 1
    """Logits-sized fp32 matrices it holds at once, about."""
    compiles: bool = False
    """Spends tens of seconds in torch.compile first."""


# --------------------------------------------------------------------------------------------------- torch itself


def score_logits(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies as most code writes them."""
    log_p = logits.float().log_softmax(1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1)


def score_head(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return score_logits(hidden @ weight.t(), targets)


def clipped_loss(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """The loss that `linear_policy_loss` is timed with, on log-probs."""
    advantages = torch.where(inputs.advantages > 0, inputs.advantages * inputs.gates, inputs.advantages)
    ratio = (logprobs - inputs.old_logprobs).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - SPEC.clip_low, 1 + SPEC.clip_high) * advantages)
    return -(surrogate * inputs.loss_weights).sum()


def divergences(hidden: Tensor, hidden_cf: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    p_log, q_log = (each.float().log_softmax(1) for each in (hidden @ weight.t(), hidden_cf @ weight.t()))
    p, q = p_log.exp(), q_log.exp()
    own, own_cf = (each.gather(1, targets[:, None]).squeeze(1) for each in (p_log, q_log))
    return own, own_cf, -(p * p_log).sum(1), -(q * q_log).sum(1), (p * (p_log - q_log)).sum(1), (q * (q_log - p_log)).sum(1)


def all_divergences(hidden: Tensor, hidden_cf: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    p_log, q_log = (each.float().log_softmax(1) for each in (hidden @ weight.t(), hidden_cf @ weight.t()))
    p, q = p_log.exp(), q_log.exp()
    own, own_cf = (each.gather(1, targets[:, None]).squeeze(1) for each in (p_log, q_log))
    kls = (p * (p_log - q_log)).sum(1), (q * (q_log - p_log)).sum(1)
    mean_log = torch.logaddexp(p_log, q_log) - 0.6931471805599453
    js = (p * (p_log - mean_log) + q * (q_log - mean_log)).sum(1) / 2
    return own, own_cf, -(p * p_log).sum(1), -(q * q_log).sum(1), *kls, js, (p - q).abs().sum(1) / 2


def mask_rows(logits: Tensor) -> tuple[Tensor, ...]:
    top = logits.max(1)
    lse = logits.logsumexp(1)
    top_prob = (top.values - lse).exp()
    fired = top_prob > THRESHOLD
    logits.scatter_(1, top.indices[:, None], torch.where(fired, -torch.inf, top.values)[:, None])
    return fired, top_prob, lse, logits.logsumexp(1)


NAMES = ("logprobs", "logprobs_cf", "entropies", "entropies_cf", "kl", "reverse_kl", "js", "tv")


def _forward(
    function: Callable[..., tuple[Tensor, ...]], arguments: Callable[[Any], tuple], names: tuple[str, ...]
) -> Callable[[Any], Work]:
    """A peer without gradients."""

    def build(made: Any) -> Work:
        @torch.no_grad()
        def run() -> Results:
            return dict(zip(names, function(*arguments(made)), strict=False))

        return run

    return build


def _trained(score: Callable[[Tensor, Tensor, Inputs], tuple[Tensor, Results]]) -> Callable[[Inputs], Work]:
    """A peer with gradients: ``score(hidden, weight, inputs)`` gives the loss and what else is known."""

    def build(inputs: Inputs) -> Work:
        def run() -> Results:
            hidden, weight = inputs.hidden.detach().requires_grad_(), inputs.weight.detach().requires_grad_()
            loss, known = score(hidden, weight, inputs)
            loss.backward()
            prefix = "grad" if known else "result"  # of another loss there is nothing to compare
            gradients = {f"{prefix}_hidden": hidden.grad, f"{prefix}_weight": weight.grad}
            return {**known, **{name: tensor for name, tensor in gradients.items() if tensor is not None}}

        return run

    return build


def _by_head(
    score: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
) -> Callable[[Tensor, Tensor, Inputs], tuple[Tensor, Results]]:
    """The clipped loss on a head's log-probs; the entropy is measured, not trained."""

    def train(hidden: Tensor, weight: Tensor, inputs: Inputs) -> tuple[Tensor, Results]:
        logprobs, entropies = score(hidden, weight, inputs.targets)
        return clipped_loss(logprobs, inputs), {"logprobs": logprobs.detach(), "entropies": entropies.detach()}

    return train


def _head(inputs: Inputs) -> tuple[Tensor, ...]:
    return inputs.hidden, inputs.weight, inputs.targets


def _pair(inputs: Inputs) -> tuple[Tensor, ...]:
    return inputs.hidden, inputs.hidden_cf, inputs.weight, inputs.targets


def _rows(rows: Rows) -> tuple[Tensor]:
    return (rows.logits,)


MASK_NAMES = ("fired", "top_prob", "raw_lse", "masked_lse")


def _eager_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs with a graph, entropies without."""
    log_p = (hidden @ weight.t()).float().log_softmax(1)
    with torch.no_grad():
        entropies = -(log_p.exp() * log_p).sum(1)
    return log_p.gather(1, targets[:, None]).squeeze(1), entropies


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


# ---------------------------------------------------------------------------------------- torch's own fused head


TORCH_CHUNK = (512, 4096)
"""Rows on a CPU and on a GPU, as ours; by itself it takes far smaller chunks and several times as long."""


def _torch_nll(inputs: Inputs) -> Work:
    function, options = _torch_head(inputs.device.type == "cuda")

    @torch.no_grad()
    def run() -> Results:
        return {"logprobs": -function(inputs.hidden, inputs.weight, inputs.targets, reduction="none", options=options).float()}

    return run


def _torch_cross_entropy(hidden: Tensor, weight: Tensor, inputs: Inputs) -> tuple[Tensor, Results]:
    function, options = _torch_head(hidden.is_cuda)
    return function(hidden, weight, inputs.targets, options=options), {}


def _torch_head(on_gpu: bool) -> tuple[Callable[..., Tensor], Any]:
    if not hasattr(torch.nn.functional, "linear_cross_entropy") or not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise ImportError(f"torch {torch.__version__} has no linear_cross_entropy")
    return torch.nn.functional.linear_cross_entropy, torch.nn.LinearCrossEntropyOptions(batch_chunk_size=TORCH_CHUNK[on_gpu])


# ------------------------------------------------------------------------------------------------------- packages


def _module(name: str) -> Any:
    torchvision_ops.install()
    return importlib.import_module(name)


def _cce(hidden: Tensor, weight: Tensor, targets: Tensor, reduction: str) -> Tensor:
    package = _module("cut_cross_entropy")
    return package.linear_cross_entropy(hidden, weight, targets, reduction=reduction, impl="cce" if hidden.is_cuda else "torch_compile")


def _cce_nll(inputs: Inputs) -> Work:
    @torch.no_grad()
    def run() -> Results:
        return {"logprobs": -_cce(inputs.hidden, inputs.weight, inputs.targets, "none").float()}

    return run


def _cce_cross_entropy(hidden: Tensor, weight: Tensor, inputs: Inputs) -> tuple[Tensor, Results]:
    return _cce(hidden, weight, inputs.targets, "mean"), {}


def _trl_score(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """As its GRPO trainer does: log-probs with a graph, entropies without."""
    utils = _module("trl.trainer.utils")
    logits = hidden @ weight.t()
    logprobs = utils.selective_log_softmax(logits, targets)
    with torch.no_grad():
        return logprobs, utils.entropy_from_logits(logits)


def _verl_score(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return _module("verl.utils.experimental.torch_functional").FusedLinearForPPO()(hidden, weight, targets)


LIGER_LENGTH = 128
"""Tokens of a sequence in Liger's layout; its advantages belong to sequences."""


def _liger_grpo(hidden: Tensor, weight: Tensor, inputs: Inputs) -> tuple[Tensor, Results]:
    package = _module("liger_kernel.chunked_loss")
    length = min(LIGER_LENGTH, inputs.size.tokens)
    if inputs.size.tokens % length:
        raise ValueError(f"needs a multiple of {length} tokens")
    loss = package.LigerFusedLinearGRPOLoss(
        beta=0.0, compiled=False, use_ref_model=False, epsilon_low=SPEC.clip_low, epsilon_high=SPEC.clip_high, loss_type="bnpo"
    )
    shape = (-1, length)
    result = loss(
        hidden.view(*shape, inputs.size.width),
        weight,
        inputs.targets.view(shape),
        torch.ones_like(inputs.targets).view(shape),
        inputs.advantages.view(shape)[:, 0].contiguous(),
        old_per_token_logps=inputs.old_logprobs.view(shape),
    )
    return result[0], {"loss": result[0].detach()}


def _quack_cross_entropy(hidden: Tensor, weight: Tensor, inputs: Inputs) -> tuple[Tensor, Results]:
    if not hidden.is_cuda:
        raise RuntimeError("needs a GPU")
    return _module("quack.linear_cross_entropy").chunked_linear_cross_entropy(hidden, weight, inputs.targets), {}


PEERS = (
    Peer("torch eager", "linear_logprob", _forward(score_head, _head, ("logprobs", "entropies")), matrices=4),
    Peer("torch.compile", "linear_logprob", _forward(_compiled(score_head), _head, ("logprobs", "entropies")), matrices=2, compiles=True),
    Peer("F.linear_cross_entropy", "linear_logprob", _torch_nll, "no entropy", matrices=2),
    Peer("CCE", "linear_logprob", _cce_nll, "no entropy", matrices=2, compiles=True),
    Peer("TRL", "linear_logprob", _forward(_trl_score, _head, ("logprobs", "entropies")), matrices=2),
    Peer("verl", "linear_logprob", _forward(_verl_score, _head, ("logprobs", "entropies"))),
    Peer("torch eager", "linear_policy_loss", _trained(_by_head(_eager_loss)), matrices=4),
    Peer("torch.compile", "linear_policy_loss", _trained(_by_head(_compiled(_eager_loss))), matrices=3, compiles=True),
    Peer("F.linear_cross_entropy", "linear_policy_loss", _trained(_torch_cross_entropy), "mean cross-entropy", matrices=2),
    Peer("CCE", "linear_policy_loss", _trained(_cce_cross_entropy), "mean cross-entropy", matrices=3, compiles=True),
    Peer("TRL", "linear_policy_loss", _trained(_by_head(_trl_score)), matrices=4),
    Peer("verl", "linear_policy_loss", _trained(_by_head(_verl_score))),
    Peer("Liger", "linear_policy_loss", _trained(_liger_grpo), "no entropy; an advantage per sequence"),
    Peer("QuACK", "linear_policy_loss", _trained(_quack_cross_entropy), "mean cross-entropy"),
    Peer("torch eager", "counterfactual_score", _forward(divergences, _pair, NAMES), matrices=8),
    Peer("torch.compile", "counterfactual_score", _forward(_compiled(divergences), _pair, NAMES), matrices=4, compiles=True),
    Peer("torch eager", "counterfactual_score+js+tv", _forward(all_divergences, _pair, NAMES), matrices=9),
    Peer("torch.compile", "counterfactual_score+js+tv", _forward(_compiled(all_divergences), _pair, NAMES), matrices=4, compiles=True),
    Peer("torch eager", "top_token_mask", _forward(mask_rows, _rows, MASK_NAMES), matrices=2),
    Peer("torch.compile", "top_token_mask", _forward(_compiled(mask_rows), _rows, MASK_NAMES), compiles=True),
)
