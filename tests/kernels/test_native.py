"""The C++ row operations against the float64 reference, for every instruction set that runs here."""

import math
import mmap

import pytest
import torch

from headrace.kernels import PolicySpec, reference
from headrace.kernels.dispatch import available
from headrace.kernels.policy_spec import KINDS, KL_KINDS, TokenStreams
from headrace.kernels.rows import TARGET, entropies_of, kls_of, logprobs_of

if not available("native"):
    pytest.skip("the C++ kernels are not built here", allow_module_level=True)

from headrace.kernels import _native, native

SIZES = [1, 3, 15, 16, 17, 31, 32, 33, 1023, 1024, 1025, 2047, 2048, 2049, 5003]


@pytest.fixture(params=_native.instruction_sets(), autouse=True)
def _instruction_set(request):
    before = _native.instruction_set()
    _native.use_instruction_set(request.param)
    yield
    _native.use_instruction_set(before)


def rows(columns, count=5, scale=4.0, banned=True):
    logits = torch.randn(count, columns) * scale
    if banned and columns > 2:
        logits[:, torch.randperm(columns)[: columns // 7]] = -math.inf
        logits[0, 1:] = -math.inf  # all but one
        logits[0, 0] = 3
    targets = torch.randint(0, columns, (count,))
    return logits, targets, 1 / (torch.rand(count) + 0.5)


def wide(*tensors):
    return [tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors]


def test_exponential_and_logarithm_keep_their_stated_error():
    x = torch.cat([torch.linspace(-87, 2, 400_001), -torch.rand(100_000) * 1e-3, torch.tensor([0.0, -87.0])])
    got = x.clone()
    _native.exponential(got.data_ptr(), len(got))
    exact = x.double().exp()
    assert (((got.double() - exact) / exact).abs() < 2e-7 + 8e-8 * x.abs()).all()
    assert got[x == 0].eq(1).all()
    special = torch.tensor([-110.0, -1e30, -math.inf, math.nan])
    _native.exponential(special.data_ptr(), 4)
    assert special[:3].tolist() == [0, 0, 0]
    assert special[3].isnan()
    y = torch.cat([torch.rand(400_000) * 3 + 1e-6, torch.logspace(-37, 38, 100_000)])
    got = y.clone()
    _native.logarithm(got.data_ptr(), len(got))
    exact = y.double().log()
    assert ((got.double() - exact).abs() / exact.abs().clamp_min(1e-30)).max() < 2e-7
    assert ((got.double() - exact).abs() / exact.abs().clamp_min(0.5)).max() < 1.5e-7


@pytest.mark.parametrize("columns", SIZES)
def test_statistics(columns):
    logits, targets, heat = rows(columns)
    state = native.statistics(logits, targets, heat)
    exact = reference.statistics(*wide(logits, targets, heat))
    torch.testing.assert_close(logprobs_of(state).double(), logprobs_of(exact), atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(entropies_of(state).double(), entropies_of(exact), atol=1e-5, rtol=0)


@pytest.mark.parametrize("spread", [0.1, 1.0, 10.0, 60.0])
@pytest.mark.parametrize("shift", [0.0, -1000.0, 1000.0])
def test_accuracy_at_a_real_vocabulary(spread, shift):
    """At most 1e-5 nat on given fp32 logits, whatever is added to all of them."""
    logits = torch.randn(3, 151_936) * spread + shift
    logits[1, 70_000] += 12 * spread
    targets, heat = torch.tensor([5, 70_000, 151_935]), torch.ones(3)
    state = native.statistics(logits, targets, heat)
    exact = reference.statistics(*wide(logits, targets, heat))
    scale = logprobs_of(exact).abs().clamp_min(16) / 16  # the last bit of a log-prob of −500 is 3e-5
    assert ((logprobs_of(state).double() - logprobs_of(exact)).abs() / scale).max() < 1e-5
    assert (entropies_of(state).double() - entropies_of(exact)).abs().max() < 1e-5


def test_folding_tiles_equals_one_read():
    logits, targets, heat = rows(3001)
    for width in (64, 1000, 3001):
        state = None
        for start in range(0, 3001, width):
            state = native.statistics(logits[:, start : start + width].contiguous(), targets, heat, state, start)
        torch.testing.assert_close(state, native.statistics(logits, targets, heat), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("columns", SIZES)
def test_gradient_in_place(columns):
    logits, targets, heat = rows(columns)
    by_logprob, by_entropy = torch.randn(5), torch.randn(5)
    by_logprob[3] = by_entropy[3] = 0
    by_entropy[1] = 0
    logits[3] = math.nan
    state = native.statistics(logits, targets, heat)
    exact = reference.gradient(*wide(logits, targets, heat, state, by_logprob, by_entropy))
    out = native.gradient(logits, targets, heat, state, by_logprob, by_entropy)
    assert out.data_ptr() == logits.data_ptr()
    torch.testing.assert_close(out.double(), exact, atol=2e-6, rtol=1e-5)
    assert (out[3] == 0).all()


def test_gradient_of_a_part_of_the_vocabulary():
    """What a rank that holds only some columns computes."""
    logits, targets, heat = rows(99)
    coefficients = torch.randn(5), torch.randn(5)
    state = native.statistics(logits, targets, heat)
    parts = [(0, 40), (40, 99)]
    got = [native.gradient(logits[:, a:b].contiguous(), targets, heat, state, *coefficients, offset=a) for a, b in parts]
    whole = native.gradient(logits, targets, heat, state, *coefficients)
    torch.testing.assert_close(torch.cat(got, dim=1), whole, atol=1e-6, rtol=1e-5)


def test_gradient_compacts_rows_in_place():
    logits, targets, heat = rows(100, count=6, banned=False)
    by_logprob, by_entropy = torch.randn(6), torch.randn(6)
    state = native.statistics(logits, targets, heat)
    order = torch.tensor([0, 5, 2, 4])
    expected = reference.gradient(logits, targets, heat, state, by_logprob, by_entropy, rows=order)
    out = native.gradient(logits, targets, heat, state, by_logprob, by_entropy, rows=order)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("columns", SIZES)
def test_pair_rows(columns):
    logits, targets, heat = rows(columns)
    other = torch.where(logits == -math.inf, logits, logits + 0.5 * torch.randn_like(logits))
    state = native.pair_statistics(logits, other, targets, heat)
    exact = reference.pair_statistics(*wide(logits, other, targets, heat))
    for ours, theirs in zip(kls_of(state), kls_of(exact), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logprobs_of(state[:, 4:]).double(), logprobs_of(exact[:, 4:]), atol=1e-5, rtol=1e-6)
    divergences = native.pair_divergences(logits, other, heat, state)
    for ours, theirs in zip(divergences, reference.pair_divergences(*wide(logits, other, heat), exact), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=2e-6, rtol=1e-5)
    same = native.pair_divergences(logits, logits, heat, native.pair_statistics(logits, logits, targets, heat))
    assert (same[0] < 1e-6).all()
    assert (same[1] == 0).all()


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("columns", [40, 2100])
def test_broken_rows_stay_alone(value, columns):
    logits, targets, heat = rows(columns, banned=False)
    clean = native.statistics(logits, targets, heat)
    logits[2, -1 if math.isnan(value) else slice(None)] = value
    state = native.statistics(logits, targets, heat)
    keep = torch.tensor([0, 1, 3, 4])
    assert torch.equal(state[keep, :TARGET], clean[keep, :TARGET])
    assert logprobs_of(state)[2].isnan()
    other = logits.clone()
    assert kls_of(native.pair_statistics(logits, other, targets, heat))[0][keep].isfinite().all()
    gradient = native.gradient(logits, targets, heat, state, torch.ones(5), torch.ones(5))
    assert gradient[keep].isfinite().all()
    assert gradient[2].isnan().any()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_no_bit(threads):
    logits, targets, heat = rows(40_000, count=23)  # enough for three threads
    once = native.statistics(logits, targets, heat)
    torch.set_num_threads(threads)
    assert torch.equal(native.statistics(logits, targets, heat), once)
    eligible, limit = torch.ones(23, dtype=torch.bool), torch.full((23,), 0.9)
    draw = native.top_token_sample(logits, eligible, limit, torch.arange(23), torch.arange(23), heat)
    torch.set_num_threads(1)
    again = native.top_token_sample(logits, eligible, limit, torch.arange(23), torch.arange(23), heat)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(draw, again, strict=True))


@pytest.mark.parametrize("columns", SIZES)
@pytest.mark.parametrize("heat", [1.0, 0.6, 0.0])
def test_sampler_draws_what_the_reference_draws(columns, heat):
    count = 40
    logits = torch.randn(count, columns) * 3
    logits[::3, columns // 2] += 25
    if columns > 2:
        logits[1::4, 1:] = -math.inf
    arguments = (
        torch.arange(count) % 5 != 0,
        torch.full((count,), 0.9),
        torch.randint(0, 1 << 62, (count,)),
        torch.randint(0, 1 << 50, (count,)),
        torch.full((count,), heat),
        torch.arange(5, 20, 2) if columns > 20 else None,
        torch.arange(columns) % 11 == 3,
    )
    ours = native.top_token_sample(logits, *arguments)
    theirs = reference.top_token_sample(logits, *arguments)
    assert torch.equal(ours.token, theirs.token)
    assert torch.equal(ours.fired, theirs.fired)
    assert torch.equal(ours.top_id, theirs.top_id)
    for name in ("top_prob", "logprob", "raw_logprob"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), atol=2e-5, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kl_kind", KL_KINDS)
def test_token_loss(kind, kl_kind, make_batch):
    s = make_batch(tokens=500).streams
    spec = PolicySpec(
        kind, 0.1, 0.15, None if kind == "cispo" else 1.2, tis_cap=1.1, kl_coef=0.2, kl_kind=kl_kind, entropy_coef=0.1, surprisal_coef=0.05
    )
    logprobs, entropies = s["old_logprobs"] + torch.randn(500), torch.rand(500)
    logprobs[::50] -= 40
    ratios = torch.randn(500) * 0.1 if kind == "gspo" else None
    for streams in (TokenStreams(**s), TokenStreams(s["old_logprobs"], s["advantages"], s["weights"])):
        ours = native.token_loss(logprobs, entropies, streams, spec, ratios)
        exact = TokenStreams(*(each if each is None else wide(each)[0] for each in streams))
        theirs = reference.token_loss(*wide(logprobs, entropies), exact, spec, None if ratios is None else ratios.double())
        for name in ("losses", "grad_logprobs", "grad_entropies"):
            torch.testing.assert_close(getattr(ours, name).double(), getattr(theirs, name), rtol=2e-5, atol=1e-9)
        torch.testing.assert_close(ours.metrics, theirs.metrics, rtol=1e-5, atol=1e-4)


def test_rows_beyond_two_billion_elements():
    """Only two rows of a 12 GB view of untouched memory are read and written."""
    columns, row = 151_936, 20_000
    size = columns * (row + 1) * 4
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    logits = torch.frombuffer(memory, dtype=torch.float32).view(row + 1, columns)
    logits[row] = torch.randn(columns)
    last, target, heat = logits[row:].clone(), torch.tensor([3]), torch.ones(1)
    state = native.statistics(last, target, heat)
    expected = reference.gradient(last, target, heat, state, torch.ones(1), torch.ones(1))
    spread = [values.expand(row + 1, *values.shape[1:]).contiguous() for values in (target, heat, state, torch.ones(1), torch.ones(1))]
    got = native.gradient(logits, *spread, rows=torch.tensor([row]))
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)

    pair = logits[::row]
    pair[0], pair[1] = 0, 0
    pair[1, 9] = 50
    mask = native.top_token(pair, torch.ones(2, dtype=torch.bool), torch.full((2,), 0.9))
    assert mask.fired.tolist() == [False, True]
    assert mask.top_id.tolist() == [0, 9]
    del logits, last, pair, got, spread
