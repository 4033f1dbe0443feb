"""Divergences between two hidden streams: EX-6.3 and the full-matrix form."""

import math

import pytest
import torch

from headrace.kernels import counterfactual_score, linear_logprob

ALL = ("kl", "reverse_kl", "js", "tv")


def exact(logp, logq):
    p, q = logp.exp(), logq.exp()
    log_mixture = torch.logaddexp(logp, logq) - math.log(2)
    kl = lambda a, b: torch.where(a == -torch.inf, 0, a.exp() * (a - b)).sum(1)  # noqa: E731
    return {
        "kl": kl(logp, logq),
        "reverse_kl": kl(logq, logp),
        "js": (kl(logp, log_mixture) + kl(logq, log_mixture)) / 2,
        "tv": (p - q).abs().sum(1) / 2,
    }


def streams(tokens=30, width=8, vocabulary=70, dtype=torch.float32, scale=2.0, noise=0.3):
    hidden = torch.randn(tokens, width).mul(scale)
    other = hidden + noise * torch.randn(tokens, width)
    return hidden.to(dtype), other.to(dtype), torch.randn(vocabulary, width).to(dtype), torch.randint(0, vocabulary, (tokens,))


def given_probabilities(p, q, implementation):
    """Logits log p through an identity head."""
    p, q = torch.tensor(p), torch.tensor(q)
    return counterfactual_score(
        p.log(), q.log(), torch.eye(p.shape[1]), torch.zeros(len(p), dtype=torch.long), divergences=ALL, implementation=implementation
    )


def test_ex_6_3(implementation):
    score = given_probabilities([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1]], [[0.5, 0.3, 0.2], [0.6, 0.3, 0.1]], implementation)
    assert score.kl.tolist() == pytest.approx([0.085123, 0], abs=1e-6)
    assert score.kl.mean().item() == pytest.approx(0.042561, abs=1e-6)
    assert score.js.mean().item() == pytest.approx(0.010951, abs=1e-6)
    assert score.tv.mean().item() == pytest.approx(0.1, abs=1e-6)


def test_ex_6_3_unsigned(implementation):
    score = given_probabilities([[0.9, 0.1], [0.6, 0.4]], [[0.6, 0.4], [0.9, 0.1]], implementation)
    assert score.kl.tolist() == pytest.approx([0.226289, 0.311239], abs=1e-6)
    assert (score.logprobs_cf - score.logprobs).tolist() == pytest.approx([-0.405465, 0.405465], abs=1e-6)
    assert score.reverse_kl.tolist() == pytest.approx([0.311239, 0.226289], abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("divergences", [("kl", "reverse_kl"), ALL, (), ("tv",)], ids=str)
def test_against_the_whole_matrix(divergences, dtype, oracle, implementation):
    hidden, other, weight, targets = streams(dtype=dtype)
    targets[[1, 8]] = -100
    kept = targets != -100
    temperature = torch.rand(30) + 0.5
    banned = [token for token in (0, 33, 34, 69) if token not in targets]
    score = counterfactual_score(
        hidden, other, weight, targets, temperature, divergences, banned=banned, chunk=9, implementation=implementation
    )
    logs = [oracle.log_softmax(h.double(), weight.double(), temperature.double(), banned) for h in (hidden, other)]
    expected = exact(*logs)
    tolerance = {"atol": 5e-5 if dtype == torch.float32 else 1e-10, "rtol": 0}
    for name in ALL:
        ours = getattr(score, name)
        assert (ours is not None) == (name in divergences)
        if ours is not None:
            torch.testing.assert_close(ours.double(), torch.where(kept, expected[name], 0), **tolerance)
    for ours, logp in ((score.entropies, logs[0]), (score.entropies_cf, logs[1])):
        torch.testing.assert_close(ours.double(), torch.where(kept, oracle.entropy(logp), 0), **tolerance)
    alone = linear_logprob(other, weight, targets, temperature, banned=banned, implementation=implementation)
    torch.testing.assert_close(score.logprobs_cf, alone[0], **tolerance)


def test_the_same_stream_twice_diverges_by_nothing(implementation):
    hidden, _, weight, targets = streams()
    score = counterfactual_score(hidden, hidden, weight, targets, divergences=ALL, implementation=implementation)
    for name in ALL:
        assert (getattr(score, name) == 0).all()


@pytest.mark.parametrize("shift", [-90.0, 90.0])
def test_shifting_one_stream_changes_nothing(shift, implementation):
    """The difference of the two maxima is large, the divergence small: it must not be a difference of large sums."""
    hidden, other, weight, targets = streams(noise=0.05)
    weight[:, -1] = 1.0
    hidden, other, weight = ((tensor * 16).round() / 16 for tensor in (hidden, other, weight))
    moved = other.clone()
    moved[:, -1] += shift
    plain = counterfactual_score(hidden, other, weight, targets, divergences=ALL, implementation=implementation)
    shifted = counterfactual_score(hidden, moved, weight, targets, divergences=ALL, implementation=implementation)
    for ours, theirs in zip(shifted, plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_disjoint_distributions_reach_the_bounds(implementation):
    """Where both tails underflow the mixture must not become log 0."""
    hidden = torch.tensor([[300.0, 0.0]])
    score = counterfactual_score(hidden, hidden.flip(1), torch.eye(2), torch.tensor([0]), divergences=ALL, implementation=implementation)
    assert score.js.item() == pytest.approx(math.log(2), abs=1e-6)
    assert score.tv.item() == pytest.approx(1, abs=1e-6)
    assert score.kl.item() == pytest.approx(300, rel=1e-6)


@pytest.mark.parametrize("vocabulary", [1, 63, 64, 65, 129])
@pytest.mark.parametrize("columns", [1, 64])
def test_tiles_of_the_vocabulary(vocabulary, columns, oracle, implementation, monkeypatch):
    monkeypatch.setattr("headrace.kernels.head.tile_columns", lambda rows, size: min(columns, size))
    monkeypatch.setattr("headrace.kernels.head.TILE_ROWS", 14)
    hidden, other, weight, targets = streams(vocabulary=vocabulary)
    score = counterfactual_score(hidden, other, weight, targets, implementation=implementation)
    expected = exact(*(oracle.log_softmax(h.double(), weight.double()) for h in (hidden, other)))
    torch.testing.assert_close(score.kl.double(), expected["kl"], atol=5e-5, rtol=0)
    torch.testing.assert_close(score.reverse_kl.double(), expected["reverse_kl"], atol=5e-5, rtol=0)


def test_bad_input_is_named():
    hidden, other, weight, targets = streams()
    with pytest.raises(ValueError, match="hidden_cf"):
        counterfactual_score(hidden, other[:5], weight, targets)
    with pytest.raises(ValueError, match="jsd"):
        counterfactual_score(hidden, other, weight, targets, divergences=("jsd",))
    with pytest.raises(ValueError, match="sequence"):
        counterfactual_score(hidden, other, weight, targets, divergences="kl")
