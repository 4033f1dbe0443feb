"""Log-prob and entropy from hidden states: against the naive form, gradients, and what must not change them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels import linear_logprob
from headrace.kernels.head import Head

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def batch(tokens=33, width=8, vocabulary=70, dtype=torch.float32, scale=1.0):
    hidden = torch.randn(tokens, width, dtype=torch.float64).mul(scale).to(dtype)
    return hidden, torch.randn(vocabulary, width, dtype=torch.float64).to(dtype), torch.randint(0, vocabulary, (tokens,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("grad", [False, True])
def test_against_the_whole_matrix(dtype, grad, oracle, implementation):
    hidden, weight, targets = batch(dtype=dtype, scale=3.0)
    targets[[2, 9]] = -100
    temperature = torch.rand(len(targets)) + 0.5
    banned = [token for token in (3, 40, 41, 69) if token not in targets]
    hidden.requires_grad_(grad)
    weight.requires_grad_(grad)
    got = linear_logprob(hidden, weight, targets, temperature, banned=banned, chunk=10, implementation=implementation)
    expected = oracle.score(hidden.double(), weight.double(), targets, temperature.double(), banned)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, atol=20 * TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("which", ["both", "logprobs", "entropies"])
@pytest.mark.parametrize("frozen", [None, "weight", "hidden"])
def test_gradients(which, frozen, oracle, implementation):
    dtype = torch.float64 if implementation == "reference" else torch.float32
    hidden, weight, targets = batch(dtype=dtype)
    targets[5] = -100
    coefficients = torch.randn(2, len(targets), dtype=dtype)
    if which != "both":
        coefficients[1 if which == "logprobs" else 0] = 0
    coefficients[:, 7:12] = 0
    hidden.requires_grad_(frozen != "hidden")
    weight.requires_grad_(frozen != "weight")
    grads = []
    for form in (
        lambda: linear_logprob(hidden, weight, targets, 0.8, chunk=9, implementation=implementation),
        lambda: oracle.score(hidden, weight, targets, 0.8),
    ):
        hidden.grad = weight.grad = None
        logprobs, entropies = form()
        parts = [(logprobs * coefficients[0]).sum(), (entropies * coefficients[1]).sum()]
        {"both": sum(parts), "logprobs": parts[0], "entropies": parts[1]}[which].backward()
        grads.append((hidden.grad, weight.grad))
    for ours, theirs in zip(*grads, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    if frozen != "hidden":
        assert (grads[0][0][5] == 0).all()
        assert (grads[0][0][7:12] == 0).all()


def test_float64_gradcheck():
    hidden, weight, targets = batch(tokens=5, width=3, vocabulary=7, dtype=torch.float64)
    targets[1] = -100
    hidden.requires_grad_()
    weight.requires_grad_()
    temperature = torch.rand(5, dtype=torch.float64) + 0.5
    banned = [next(token for token in range(7) if token not in targets)]
    assert torch.autograd.gradcheck(lambda h, w: linear_logprob(h, w, targets, temperature, banned=banned, chunk=2), (hidden, weight))


def test_tied_weights_get_both_gradients(oracle):
    """The same tensor as embedding and head."""
    table = torch.randn(11, 4, dtype=torch.float64, requires_grad=True)
    tokens, targets = torch.randint(0, 11, (9,)), torch.randint(0, 11, (9,))
    linear_logprob(table[tokens], table, targets)[0].sum().backward()
    ours, table.grad = table.grad, None
    oracle.score(table[tokens], table, targets)[0].sum().backward()
    torch.testing.assert_close(ours, table.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad", [False, True])
def test_narrow_inputs_keep_fp32_logits(dtype, grad, oracle, implementation, monkeypatch):
    """The log-prob of narrow inputs is as good as that of the same values in fp32."""
    monkeypatch.setattr("headrace.kernels.gemm.WIDEN_ROWS", 16)
    hidden, weight, targets = batch(dtype=dtype, scale=4.0)
    wide = hidden.double().requires_grad_(), weight.double().requires_grad_()
    hidden.requires_grad_(grad)
    weight.requires_grad_(grad)
    got = linear_logprob(hidden, weight, targets, implementation=implementation)
    expected = oracle.score(*wide, targets)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, atol=1e-4, rtol=0)
    if grad:
        got[0].sum().backward()
        expected[0].sum().backward()
        for ours, theirs in ((hidden.grad, wide[0].grad), (weight.grad, wide[1].grad)):
            assert ours.dtype == dtype
            error = (ours.double() - theirs).norm() / theirs.norm()
            assert error <= torch.finfo(dtype).eps / 2  # one rounding at the end


@settings(max_examples=15, deadline=None)
@given(tokens=st.integers(1, 12), vocabulary=st.integers(1, 40), chunk=st.integers(1, 13), seed=st.integers(0, 99))
def test_any_shape_and_chunk(tokens, vocabulary, chunk, seed):
    torch.manual_seed(seed)
    hidden, weight, targets = batch(tokens, 3, vocabulary, torch.float64)
    hidden.requires_grad_()
    weight.requires_grad_()
    logprobs, entropies = linear_logprob(hidden, weight, targets, chunk=chunk)
    logp = (hidden @ weight.t()).log_softmax(1)
    torch.testing.assert_close(logprobs, logp.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropies, -(logp.exp() * logp).sum(1))
    grads = torch.autograd.grad(logprobs.sum() + entropies.sum(), (hidden, weight))
    theirs = torch.autograd.grad(logp.gather(1, targets[:, None]).sum() - (logp.exp() * logp).sum(), (hidden, weight))
    torch.testing.assert_close(grads, theirs)


@pytest.mark.parametrize("columns", [1, 63, 64, 65])
@pytest.mark.parametrize("vocabulary", [1, 63, 64, 65, 127, 128, 129])
def test_tiles_of_the_vocabulary(columns, vocabulary, oracle, implementation, monkeypatch):
    monkeypatch.setattr("headrace.kernels.head.tile_columns", lambda rows, size: min(columns, size))
    monkeypatch.setattr("headrace.kernels.head.TILE_ROWS", 5)
    hidden, weight, targets = batch(tokens=12, vocabulary=vocabulary, scale=3.0)
    banned = [token for token in range(0, vocabulary, 7) if token not in targets]
    got = linear_logprob(hidden, weight, targets, banned=banned, implementation=implementation)
    expected = oracle.score(hidden.double(), weight.double(), targets, banned=banned)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shift", [-3e3, -90.0, 90.0, 3e3])
def test_a_shift_of_all_logits_changes_nothing(shift, implementation):
    """The faults of others: a maximum seeded at 0, padding columns that count as exp(0)."""
    hidden, weight, targets = batch(vocabulary=65)
    # The last width carries the shift, exactly in fp32.
    hidden[:, -1], weight[:, -1] = 1.0, 0.0
    weight = (weight * 256).round() / 256
    hidden = (hidden * 4).round() / 4
    moved = weight.clone()
    moved[:, -1] = shift
    plain = linear_logprob(hidden, weight, targets, implementation=implementation)
    shifted = linear_logprob(hidden, moved, targets, implementation=implementation)
    for ours, theirs in zip(shifted, plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5 if abs(shift) < 100 else 1e-3, rtol=0)


def test_vocabulary_order_does_not_matter(implementation):
    hidden, weight, targets = batch(vocabulary=129)
    order = torch.randperm(129)
    moved = linear_logprob(hidden, weight[order], order.argsort()[targets], implementation=implementation)
    for ours, theirs in zip(linear_logprob(hidden, weight, targets, implementation=implementation), moved, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [0, 3])
def test_all_rows_ignored(tokens, implementation):
    hidden, weight, _ = batch(tokens)
    hidden.fill_(math.nan).requires_grad_()
    weight.requires_grad_()
    targets = torch.full((tokens,), -100)
    logprobs, entropies = linear_logprob(hidden, weight, targets, implementation=implementation)
    (logprobs.sum() + entropies.sum()).backward()
    assert (logprobs == 0).all()
    assert (hidden.grad == 0).all()
    assert (weight.grad == 0).all()


def test_ignored_rows_are_not_read(oracle, implementation):
    hidden, weight, targets = batch(6)
    targets[[0, 4]] = 7_000_000
    temperature = torch.ones(6)
    temperature[[0, 4]] = math.nan
    hidden[[0, 4]] = math.nan
    hidden.requires_grad_()
    logprobs, entropies = linear_logprob(
        hidden, weight.requires_grad_(), targets, temperature, ignore_index=7_000_000, implementation=implementation
    )
    (logprobs.sum() + entropies.sum()).backward()
    assert logprobs[0] == entropies[4] == 0
    assert (hidden.grad[[0, 4]] == 0).all()
    assert torch.isfinite(weight.grad).all()
    assert torch.isfinite(logprobs).all()


def test_strided_inputs_and_gradients(oracle, implementation):
    """Views with odd strides, a broadcast hidden row, and the stride-0 gradient that `sum` sends."""
    wide_hidden, wide_weight, targets = torch.randn(9, 20), torch.randn(30, 20), torch.randint(0, 15, (18,))[::2]
    cases = [
        (wide_hidden[:, ::2], wide_weight[::2, ::2]),
        (wide_hidden.t()[:9, :9].t(), wide_weight.t()[:9, :15].t()),
        (wide_hidden[:1, :10].expand(9, 10), wide_weight[:15, :10]),
    ]
    for hidden, weight in cases:
        leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        linear_logprob(*leaves, targets, implementation=implementation)[0].sum().backward()
        clones = hidden.clone().double().requires_grad_(), weight.clone().double().requires_grad_()
        oracle.score(*clones, targets)[0].sum().backward()
        for ours, theirs in zip(leaves, clones, strict=True):
            torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("label", [-1, -99, 70, 1 << 40])
def test_labels_out_of_range_raise(label, implementation):
    hidden, weight, targets = batch()
    targets[3] = label
    with pytest.raises(ValueError, match=r"targets\[3\]"):
        linear_logprob(hidden, weight, targets, implementation=implementation)


def test_banned_label_raises():
    hidden, weight, targets = batch()
    with pytest.raises(ValueError, match="banned"):
        linear_logprob(hidden, weight, targets, banned=[int(targets[0])])


def test_banned_tokens_are_as_good_as_absent(implementation):
    hidden, weight, _ = batch(vocabulary=70)
    targets = torch.randint(0, 60, (33,))
    with_ban = linear_logprob(hidden, weight, targets, banned=range(60, 70), implementation=implementation)
    without = linear_logprob(hidden, weight[:60], targets, implementation=implementation)
    for ours, theirs in zip(with_ban, without, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


def test_one_token_left():
    """All but one banned: probability 1, entropy 0, no gradient."""
    hidden, weight, _ = batch(4)
    targets = torch.full((4,), 5)
    hidden.requires_grad_()
    logprobs, entropies = linear_logprob(hidden, weight, targets, banned=[token for token in range(70) if token != 5])
    (logprobs.sum() + entropies.sum()).backward()
    assert (logprobs == 0).all()
    assert (entropies == 0).all()
    assert (hidden.grad == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": torch.ones(3)}, "temperature"),
        ({"temperature": -torch.ones(33)}, "temperature"),
        ({"chunk": 0}, "chunk"),
        ({"weight": torch.randn(70, 9)}, "width"),
        ({"weight": torch.randn(70, 8).double()}, "float64"),
        ({"weight": torch.randn(0, 8)}, "empty"),
        ({"targets": torch.zeros(32, dtype=torch.long)}, "targets"),
        ({"targets": torch.zeros(33)}, "integers"),
        ({"hidden": torch.randn(1, 33, 8)}, "hidden"),
        ({"banned": [-1]}, "banned"),
        ({"implementation": "opencl"}, "implementation"),
    ],
)
def test_bad_input_is_named(change, message):
    hidden, weight, targets = batch()
    arguments = {"hidden": hidden, "weight": weight, "targets": targets} | change
    with pytest.raises(ValueError, match=message):
        linear_logprob(**arguments)


def test_no_logits_matrix(monkeypatch):
    """The largest scratch buffer does not grow with T · V."""
    sizes = []
    original = Head.buffer
    monkeypatch.setattr(Head, "buffer", lambda self, elements: sizes.append(elements) or original(self, elements))
    monkeypatch.setattr("headrace.kernels.head.TILE_ROWS", 64)
    monkeypatch.setattr("headrace.kernels.head.TILE_COLUMNS", (256, 512))
    hidden, weight, targets = batch(tokens=300, width=2, vocabulary=3000)
    hidden.requires_grad_()
    linear_logprob(hidden, weight, targets, chunk=16)[0].sum().backward()
    assert max(sizes) <= max(64 * 512, 16 * 3000)


def test_scratch_memory_is_not_shared_between_threads(oracle):
    """A call takes the kept buffer out of reach of others while it runs."""
    from concurrent.futures import ThreadPoolExecutor

    inputs = [batch(tokens=60, vocabulary=4000) for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            for (hidden, weight, targets), got in zip(inputs, pool.map(lambda each: linear_logprob(*each), inputs), strict=True):
                torch.testing.assert_close(got[0], oracle.score(hidden, weight, targets)[0], atol=2e-5, rtol=0)
