"""Errors against float64, on some rows and columns of the very results that are timed.

The reference is written out here with nothing of the kernels in it. It costs little at any size: row-wise results are checked on
``ROWS`` rows, the gradient of the weight on ``COLUMNS`` vocabulary entries over all tokens.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from headrace.bench.cases import SPEC, THRESHOLD, Inputs, Rows

ROWS = 48
COLUMNS = 64
TILE = 8192
"""Rows of the weight that are widened to float64 at a time."""


class WrongResultError(ValueError):
    """A result is further from float64 than its tolerance; nothing of it is timed."""


def gate(what: str, found: Mapping[str, float], dtype: torch.dtype) -> None:
    """Raise unless every error is small enough: 1e-4 nat, 1e-5 on given logits; gradients 1e-4 relative, 1e-2 from bf16 products."""
    for name, error in found.items():
        relative = 1e-4 if dtype == torch.float32 else 1e-2
        tolerance = relative if name.startswith("grad_") else 1e-5 if name in ("top_prob", "logprob") else 1e-4
        if not error <= tolerance:
            raise WrongResultError(f"{what}: {name} is off by {error:.2e}, more than {tolerance:.0e}; not timed")


def errors(made: Inputs | Rows, run: Callable[[], Mapping[str, Tensor]]) -> dict[str, float]:
    """Run once. By name: the greatest absolute error in nats, or the relative one of a gradient. Only names that ``run`` returns."""
    if isinstance(made, Rows):
        rows = _spread(made.size.tokens, ROWS, made.device)
        before = made.logits[rows].double()  # the mask works in place
        results = run()
        expected = {name: (value, rows) for name, value in _expected_rows(before, rows, results).items()}
    else:
        results = run()
        expected = _expected(made, results)
    found = {}
    for name, (value, rows) in expected.items():
        if name not in results:
            continue
        own = results[name].detach().double().index_select(0, rows)
        if name.startswith("grad_"):
            found[name] = float((own - value).norm() / value.norm())
        else:
            found[name] = float((own - value).abs().max())
    return found


def _spread(count: int, chosen: int, device: torch.device) -> Tensor:
    """Indices from first to last, evenly."""
    return torch.linspace(0, count - 1, min(chosen, count), device=device, dtype=torch.float64).round().long()


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([hidden @ tile.double().t() for tile in weight.split(TILE)], dim=1)


def _expected(inputs: Inputs, results: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    rows = _spread(inputs.size.tokens, ROWS, inputs.device)
    targets = inputs.targets[rows]
    p_log = _logits(inputs.hidden[rows].double(), inputs.weight).log_softmax(1)
    p = p_log.exp()
    own = p_log.gather(1, targets[:, None]).squeeze(1)
    values = {"logprobs": own, "entropies": -(p * p_log).sum(1)}
    if "kl" in results:
        values |= _divergences(inputs, rows, p_log, p)
    expected = {name: (value, rows) for name, value in values.items()}
    if "grad_hidden" in results:
        coefficients = _coefficients(inputs, own, rows)
        grad_logits = (torch.zeros_like(p).scatter_(1, targets[:, None], 1.0) - p) * coefficients[:, None]
        tiles = zip(grad_logits.split(TILE, dim=1), inputs.weight.split(TILE), strict=True)
        expected["grad_hidden"] = (torch.stack([part @ tile.double() for part, tile in tiles]).sum(0), rows)
        if "logprobs" in results:
            expected["grad_weight"] = _weight_gradient(inputs, results["logprobs"].double())
    return expected


def _divergences(inputs: Inputs, rows: Tensor, p_log: Tensor, p: Tensor) -> dict[str, Tensor]:
    q_log = _logits(inputs.hidden_cf[rows].double(), inputs.weight).log_softmax(1)
    q = q_log.exp()
    mean_log = ((p + q) / 2).log()
    return {
        "logprobs_cf": q_log.gather(1, inputs.targets[rows][:, None]).squeeze(1),
        "entropies_cf": -(q * q_log).sum(1),
        "kl": (p * (p_log - q_log)).sum(1),
        "reverse_kl": (q * (q_log - p_log)).sum(1),
        "js": (p * (p_log - mean_log) + q * (q_log - mean_log)).sum(1) / 2,
        "tv": (p - q).abs().sum(1) / 2,
    }


def _coefficients(inputs: Inputs, logprobs: Tensor, rows: Tensor) -> Tensor:
    """d loss / d log-prob of the timed loss by autograd, [rows]."""
    leaf = logprobs.clone().requires_grad_()
    advantages = inputs.advantages[rows].double()
    ratio = (leaf - inputs.old_logprobs[rows].double()).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - SPEC.clip_low, 1 + SPEC.clip_high) * advantages)
    (-surrogate * inputs.loss_weights[rows].double()).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def _weight_gradient(inputs: Inputs, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of some rows of the weight from all tokens, and which rows.

    The tokens' normalisers follow from the log-probs under test, which have their own check.
    """
    everything = torch.arange(inputs.size.tokens, device=inputs.device)
    columns = torch.unique(torch.cat([_spread(inputs.size.vocabulary, COLUMNS // 2, inputs.device), inputs.targets[: COLUMNS // 2]]))
    coefficients = _coefficients(inputs, logprobs, everything)
    total = torch.zeros(len(columns), inputs.size.width, dtype=torch.float64, device=inputs.device)
    for part in everything.split(4096):
        hidden, targets = inputs.hidden[part].double(), inputs.targets[part]
        own = (hidden * inputs.weight[targets].double()).sum(1)
        p = (hidden @ inputs.weight[columns].double().t() - (own - logprobs[part])[:, None]).exp()
        onehot = (targets[:, None] == columns).double()
        total += ((onehot - p) * coefficients[part][:, None]).t() @ hidden
    return total, columns


def _expected_rows(z: Tensor, rows: Tensor, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """From float64 logits of the checked rows."""
    top = z.argmax(1, keepdim=True)
    lse = z.logsumexp(1)
    fired = (z.gather(1, top).squeeze(1) - lse).exp() > THRESHOLD
    masked = torch.where(fired[:, None], z.scatter(1, top, -torch.inf), z).logsumexp(1)
    values = {"fired": fired.double(), "top_prob": (z.gather(1, top).squeeze(1) - lse).exp(), "raw_lse": lse, "masked_lse": masked}
    if "token" in results:
        values["logprob"] = z.gather(1, results["token"][rows][:, None]).squeeze(1) - masked
    return values
