"""The fused loss equals the loss of the head, in value, gradient and metrics, however it is cut."""

import math

import pytest
import torch

from headrace.kernels import Metric, PolicySpec, linear_logprob, linear_policy_loss, policy_loss
from headrace.kernels.linear_policy_loss import pack

SPECS = {
    "plain": PolicySpec(),
    "everything": PolicySpec(dual_clip=1.5, tis_cap=1.1, kl_coef=0.1, kl_kind="k2", entropy_coef=0.05, surprisal_coef=0.02),
    "gspo": PolicySpec("gspo", 0.05, 0.05, kl_coef=0.1),
    "gspo plain": PolicySpec("gspo", 0.3, 0.3),
    "cispo": PolicySpec("cispo", entropy_coef=0.1),
}
CU = torch.tensor([0, 7, 7, 25, 40], dtype=torch.int32)


def fused(b, spec, implementation=None, chunk=None, **changes):
    hidden, weight = b.hidden.clone().requires_grad_(), b.weight.clone().requires_grad_()
    arguments = {"temperature": 0.9, "cu_seqlens": CU, "chunk": chunk, "implementation": implementation} | b.streams | changes
    positional = [arguments.pop(name) for name in ("old_logprobs", "advantages", "weights")]
    out = linear_policy_loss(hidden, weight, b.targets, *positional, spec, **arguments)
    (out.loss * 1.5).backward()
    return out, hidden.grad, weight.grad


def composed(b, spec, implementation=None):
    hidden, weight = b.hidden.clone().requires_grad_(), b.weight.clone().requires_grad_()
    logprobs, entropies = linear_logprob(hidden, weight, b.targets, 0.9, implementation=implementation)
    streams = dict(b.streams)
    streams["mask"] = streams["mask"] & (b.targets != -100)
    positional = [streams.pop(name) for name in ("old_logprobs", "advantages", "weights")]
    out = policy_loss(logprobs, entropies, *positional, spec, cu_seqlens=CU, implementation=implementation, **streams)
    (out.loss * 1.5).backward()
    return out, logprobs, entropies, hidden.grad, weight.grad


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_equals_the_composition(spec, make_batch, implementation):
    dtype = torch.float64 if implementation == "reference" else torch.float32
    b = make_batch(dtype=dtype)
    b.streams["advantages"][::5] = 0
    expected, logprobs, entropies, grad_hidden, grad_weight = composed(b, spec, implementation)
    for chunk in (None, 3, 11):
        out, ours_hidden, ours_weight = fused(b, spec, implementation, chunk)
        torch.testing.assert_close(out.loss, expected.loss)
        torch.testing.assert_close(out.logprobs, logprobs.detach())
        torch.testing.assert_close(out.entropies, entropies.detach())
        torch.testing.assert_close(out.metrics, expected.metrics, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours_hidden, grad_hidden, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(ours_weight, grad_weight, rtol=1e-4, atol=1e-6)
        assert not out.logprobs.requires_grad


@pytest.mark.parametrize("spec", [SPECS["everything"], SPECS["cispo"]], ids=["ppo", "cispo"])
def test_against_the_oracle(spec, make_batch, oracle, implementation):
    dtype = torch.float64 if implementation == "reference" else torch.float32
    b = make_batch(dtype=dtype)
    out, ours_hidden, ours_weight = fused(b, spec, implementation, 13)
    hidden, weight = b.hidden.double().requires_grad_(), b.weight.double().requires_grad_()
    s = {name: value if name == "mask" else value.double() for name, value in b.streams.items()}
    logprobs, entropies = oracle.score(hidden, weight, b.targets, 0.9)
    losses = oracle.token_losses(
        logprobs,
        entropies,
        s["old_logprobs"],
        s["advantages"],
        s["weights"],
        spec,
        s["gates"],
        s["ref_logprobs"],
        s["proximal_logprobs"],
    )
    loss = losses[s["mask"] & (b.targets != -100)].sum()
    (1.5 * loss).backward()
    tolerance = {"rtol": 1e-9, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-5}
    torch.testing.assert_close(out.loss.double(), loss, **tolerance)
    torch.testing.assert_close(ours_hidden.double(), hidden.grad, **tolerance)
    torch.testing.assert_close(ours_weight.double(), weight.grad, **tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_accumulate_in_fp32(dtype, make_batch, implementation):
    """dW relative error at most 2.5e-3 however many chunks add to it."""
    b = make_batch(tokens=200, dtype=dtype)
    _, grad_hidden, grad_weight = fused(b, SPECS["everything"], implementation, 3, cu_seqlens=None)
    b.hidden, b.weight = b.hidden.double(), b.weight.double()
    b.streams = {name: value if name == "mask" else value.double() for name, value in b.streams.items()}
    _, exact_hidden, exact_weight = fused(b, SPECS["everything"], implementation, cu_seqlens=None)
    for ours, theirs in ((grad_hidden, exact_hidden), (grad_weight, exact_weight)):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).norm() / theirs.norm() < 2.5e-3


def test_float64_gradcheck(make_batch):
    b = make_batch(tokens=9, width=3, vocabulary=6, dtype=torch.float64)
    spec = PolicySpec(clip_low=1.0, clip_high=50.0, kl_coef=0.1, entropy_coef=0.1, surprisal_coef=0.1)
    streams = dict(b.streams)
    positional = [streams.pop(name) for name in ("old_logprobs", "advantages", "weights")]
    inputs = b.hidden.requires_grad_(), b.weight.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda h, w: linear_policy_loss(h, w, b.targets, *positional, spec, temperature=0.7, chunk=4, **streams).loss, inputs
    )


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_chunk_size_changes_nothing(spec, make_batch, implementation):
    b = make_batch()
    whole = fused(b, spec, implementation, 1000)
    for chunk in (1, 2, 17):
        parts = fused(b, spec, implementation, chunk)
        torch.testing.assert_close(parts[0].loss, whole[0].loss, rtol=1e-5, atol=1e-7)
        for ours, theirs in zip(parts[1:], whole[1:], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_poisoned_rows_leave_everything_untouched(spec, poison, make_batch, implementation):
    """NaN and ±inf in the streams of ignored and masked rows, and in the hidden states of ignored ones."""
    b = make_batch()
    clean = fused(b, spec, implementation, 8)
    ignored = b.targets == -100
    dead = ignored | ~b.streams["mask"]
    b.hidden[ignored] = poison
    for name, value in b.streams.items():
        if name != "mask":
            value[dead] = poison
    b.streams["mask"] |= ignored  # ignored rows do not count, whatever the mask says
    poisoned = fused(b, spec, implementation, 8)
    for ours, theirs in zip((*clean[0], *clean[1:]), (*poisoned[0], *poisoned[1:]), strict=True):
        assert torch.equal(ours, theirs)
    assert (poisoned[1][dead] == 0).all()
    alive = b.streams["mask"] & ~ignored
    assert poisoned[0].metrics[Metric.TOKENS] == alive.sum()
    assert (poisoned[0].logprobs[~ignored] < 0).all()  # masked rows still report


@pytest.mark.parametrize("spec", [SPECS["plain"], SPECS["gspo plain"]], ids=["ppo", "gspo"])
def test_rows_without_gradient_cost_no_product(spec, make_batch, monkeypatch, implementation):
    """Advantage 0, gate 0, masked and clipped rows do not reach the backward products."""
    b = make_batch(tokens=40, ignored=0.1, masked=0.3)
    b.streams["advantages"][7:25] = 0
    seen = []
    from headrace.kernels import gemm

    original = gemm.hidden_gradient
    monkeypatch.setattr(gemm, "hidden_gradient", lambda g, w: seen.append(len(g)) or original(g, w))
    out, grad_hidden, _ = fused(b, spec, implementation, 16, proximal_logprobs=None, ref_logprobs=None)
    assert sum(seen) == int((grad_hidden != 0).any(1).sum())
    if spec.kind == "ppo":
        clipped = out.metrics[[Metric.CLIPPED_LOW, Metric.CLIPPED_HIGH]].sum()
        assert clipped > 0
        nonzero = b.streams["mask"] & (b.targets != -100) & (b.streams["advantages"] != 0)
        assert sum(seen) == int(nonzero.sum() - clipped)


def test_no_gradient_wanted_no_gradient_formed(make_batch, monkeypatch, implementation):
    b = make_batch()
    monkeypatch.setattr("headrace.kernels.head.HeadGradients.__init__", None)
    streams = dict(b.streams)
    positional = [streams.pop(name) for name in ("old_logprobs", "advantages", "weights")]
    frozen = linear_policy_loss(b.hidden, b.weight, b.targets, *positional, SPECS["plain"], implementation=implementation, **streams)
    with torch.no_grad():
        leaves = b.hidden.requires_grad_(), b.weight.requires_grad_()
        quiet = linear_policy_loss(*leaves, b.targets, *positional, SPECS["plain"], implementation=implementation, **streams)
    assert torch.equal(frozen.loss, quiet.loss)
    assert not quiet.loss.requires_grad


@pytest.mark.parametrize("frozen", ["weight", "hidden"])
def test_frozen_side_gets_no_gradient(frozen, make_batch, monkeypatch):
    b = make_batch()
    if frozen == "weight":
        monkeypatch.setattr("headrace.kernels.gemm.add_weight_gradient", None)
    else:
        monkeypatch.setattr("headrace.kernels.gemm.hidden_gradient", None)
    hidden = b.hidden.requires_grad_(frozen != "hidden")
    weight = b.weight.requires_grad_(frozen != "weight")
    streams = dict(b.streams)
    positional = [streams.pop(name) for name in ("old_logprobs", "advantages", "weights")]
    linear_policy_loss(hidden, weight, b.targets, *positional, SPECS["plain"], **streams).loss.backward()
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (frozen == "weight")


def test_works_under_activation_checkpointing(make_batch):
    from torch.utils.checkpoint import checkpoint

    b = make_batch(dtype=torch.float64)
    streams = dict(b.streams)
    positional = [streams.pop(name) for name in ("old_logprobs", "advantages", "weights")]

    def loss(hidden, weight):
        return linear_policy_loss(hidden.tanh(), weight, b.targets, *positional, SPECS["plain"], **streams).loss

    grads = []
    for run in (loss, lambda *leaves: checkpoint(loss, *leaves, use_reentrant=False)):
        leaves = b.hidden.clone().requires_grad_(), b.weight.clone().requires_grad_()
        run(*leaves).backward()
        grads.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(grads[0], grads[1])


def test_backward_can_be_repeated_and_scaled(make_batch):
    b = make_batch()
    streams = dict(b.streams)
    positional = [streams.pop(name) for name in ("old_logprobs", "advantages", "weights")]
    leaves = b.hidden.requires_grad_(), b.weight.requires_grad_()
    out = linear_policy_loss(*leaves, b.targets, *positional, SPECS["plain"], **streams)
    once = torch.autograd.grad(out.loss, leaves, retain_graph=True)
    thrice = torch.autograd.grad(3 * out.loss, leaves, retain_graph=True)
    again = torch.autograd.grad(out.loss, leaves)
    torch.testing.assert_close(thrice, tuple(3 * gradient for gradient in once))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(once, again, strict=True))


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("spec", [SPECS["everything"], SPECS["gspo"]], ids=["ppo", "gspo"])
def test_all_ignored_and_single_rows(tokens, spec, make_batch, implementation):
    b = make_batch(tokens=max(tokens, 1), ignored=0.0 if tokens == 1 else 1.0, masked=0.0)
    if tokens == 0:
        b.hidden, b.targets = b.hidden[:0], b.targets[:0]
        b.streams = {name: value[:0] for name, value in b.streams.items()}
    out, grad_hidden, grad_weight = fused(b, spec, implementation, cu_seqlens=torch.tensor([0, tokens]))
    if tokens != 1:
        assert out.loss == 0
        assert (grad_hidden == 0).all()
        assert (grad_weight == 0).all()
    else:
        assert out.metrics[Metric.TOKENS] == 1
        assert (grad_weight != 0).any()


def test_non_finite_rows_that_count_are_not_hidden(make_batch, implementation):
    b = make_batch(ignored=0.0, masked=0.0)
    b.hidden[3] = math.nan
    out, grad_hidden, _ = fused(b, SPECS["plain"], implementation)
    assert torch.isnan(out.loss)
    assert torch.isnan(grad_hidden[3]).all()
    assert torch.isfinite(grad_hidden[:3]).all()


def test_pack_keeps_sequences_whole():
    assert pack([3, 4, 2, 9, 1, 1], 7) == [slice(0, 7), slice(7, 9), slice(9, 18), slice(18, 20)]
    assert pack([], 7) == []
    assert pack([5], 1) == [slice(0, 5)]
