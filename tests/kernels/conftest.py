"""Shared pieces of the kernel tests: which implementations run here, and a naive float64 oracle."""

from types import SimpleNamespace

import pytest
import torch

from headrace.kernels.dispatch import available


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["reference", "native"])
def implementation(request):
    """Every implementation that runs on a CPU."""
    if not available(request.param):
        pytest.skip(f"{request.param} kernels are not built here")
    return request.param


def log_softmax(hidden, weight, temperature=1.0, banned=()):
    logits = hidden @ weight.t()
    if isinstance(temperature, torch.Tensor):
        temperature = temperature[:, None]
    logits = logits / temperature
    if len(banned):
        logits = logits.index_fill(1, torch.as_tensor(list(banned)), -torch.inf)
    return logits.log_softmax(1)


def entropy(logp):
    return -torch.where(logp == -torch.inf, 0, logp.exp() * logp.clamp_min(-1e30)).sum(1)


def score(hidden, weight, targets, temperature=1.0, banned=(), ignore_index=-100):
    """Log-prob and entropy, differentiable, with the whole logits matrix."""
    logp = log_softmax(hidden, weight, temperature, banned)
    kept = targets != ignore_index
    own = logp.gather(1, torch.where(kept, targets, 0)[:, None]).squeeze(1)
    return torch.where(kept, own, 0), torch.where(kept, entropy(logp), 0)


def token_losses(logprobs, entropies, old, advantages, weights, spec, gates=None, ref=None, proximal=None):
    """The loss of each token by plain autograd; gspo is left to its own tests."""
    anchor = old if proximal is None else proximal
    gates = torch.ones_like(advantages) if gates is None else gates
    credit = torch.where(advantages > 0, gates * advantages, advantages)
    ratio = (logprobs - anchor).clamp(-20, 20).exp()
    clipped = ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    if spec.kind == "cispo":
        objective = clipped.detach() * credit * logprobs
    else:
        objective = torch.minimum(ratio * credit, clipped * credit)
        if spec.dual_clip is not None:
            objective = torch.where(credit < 0, torch.maximum(objective, spec.dual_clip * credit), objective)
    if proximal is not None:
        importance = (proximal - old).clamp(-20, 20).exp()
        objective = objective * (importance if spec.tis_cap is None else importance.clamp_max(spec.tis_cap))
    loss = -objective - spec.entropy_coef * entropies - spec.surprisal_coef * logprobs
    if ref is not None:
        d = (ref - logprobs).clamp(-20, 20)
        kl = {"k1": -d, "k2": d**2 / 2, "k3": (d.exp() - d - 1).clamp_max(10)}[spec.kl_kind]
        loss = loss + spec.kl_coef * kl
    return weights * loss


@pytest.fixture
def oracle():
    return SimpleNamespace(log_softmax=log_softmax, score=score, token_losses=token_losses, entropy=entropy)


@pytest.fixture
def make_batch():
    """Random inputs of a policy loss over a head, some rows ignored and some masked."""

    def make(tokens=40, width=12, vocabulary=67, dtype=torch.float32, ignored=0.2, masked=0.2, seed=0, sharp=1.0):
        g = torch.Generator().manual_seed(seed)
        hidden = torch.randn(tokens, width, generator=g, dtype=torch.float64)
        weight = torch.randn(vocabulary, width, generator=g, dtype=torch.float64) * sharp
        targets = torch.randint(0, vocabulary, (tokens,), generator=g)
        logprobs, _ = score(hidden.to(dtype).double(), weight.to(dtype).double(), targets)
        near = lambda spread: logprobs + spread * torch.randn(tokens, generator=g, dtype=torch.float64)  # noqa: E731
        streams = {
            "old_logprobs": near(0.3),
            "advantages": torch.randn(tokens, generator=g, dtype=torch.float64),
            "weights": torch.rand(tokens, generator=g, dtype=torch.float64) / tokens,
            "gates": torch.rand(tokens, generator=g, dtype=torch.float64),
            "ref_logprobs": near(0.5),
            "proximal_logprobs": near(0.3),
        }
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        streams = {name: value.to(wide) for name, value in streams.items()}
        streams["mask"] = torch.rand(tokens, generator=g) >= masked
        targets = torch.where(torch.rand(tokens, generator=g) < ignored, -100, targets)
        return SimpleNamespace(hidden=hidden.to(dtype), weight=weight.to(dtype), targets=targets, streams=streams)

    return make
