"""Every row operation of a GPU on a GPU, against the reference in float64 on the same device."""

import pytest
import torch

from headrace.kernels import Metric, PolicySpec, choose, linear_logprob, linear_policy_loss, reference
from headrace.kernels.dispatch import available
from headrace.kernels.policy_spec import TokenStreams
from headrace.kernels.rows import compacting_rows, entropies_of, kls_of, logprobs_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

VOCABULARIES = [151936, 32000, 50257, 130]
SPEC = PolicySpec(dual_clip=2.0, tis_cap=1.5, kl_coef=0.1, entropy_coef=0.02, surprisal_coef=0.01)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=["triton", "cuda"])
def rows(request):
    """The module of row operations under test."""
    if not available(request.param):
        pytest.skip(f"{request.param} kernels are not available here")
    return choose(torch.device("cuda"), torch.float32, request.param)


def logits_of(count, vocabulary, spread=4.0):
    logits = torch.randn(count, vocabulary, device="cuda") * spread
    targets = torch.randint(0, vocabulary, (count,), device="cuda")
    return logits, targets, torch.rand(count, device="cuda") + 0.5


def near(actual, expected, atol=1e-5, rtol=1e-5):
    torch.testing.assert_close(actual.double(), expected.double(), rtol=rtol, atol=atol, equal_nan=True)


def streams_near(logprobs):
    count = len(logprobs)
    other = lambda spread: logprobs + spread * torch.randn_like(logprobs)  # noqa: E731
    uniform = lambda: torch.rand(count, device="cuda")  # noqa: E731
    mask = uniform() > 0.2
    streams = TokenStreams(other(0.3), torch.randn(count, device="cuda"), uniform() / count, uniform(), mask, other(0.5), other(0.3))
    for poisoned in (streams.old_logprobs, streams.advantages, streams.gates, streams.ref_logprobs, streams.proximal_logprobs):
        poisoned[~mask] = torch.nan
    return streams


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_statistics(rows, vocabulary):
    logits, targets, heat = logits_of(65, vocabulary)
    logits[1] += 3000
    heat[1] = 1
    logits[2, : vocabulary // 2] = -torch.inf
    logits[3] = -torch.inf
    logits[4, 5] = torch.nan
    state = rows.statistics(logits, targets, heat)
    exact = reference.statistics(logits.double(), targets, heat.double())
    near(logprobs_of(state), logprobs_of(exact))
    near(entropies_of(state), entropies_of(exact))
    tiled = None
    for start in range(0, vocabulary, 8192):
        tiled = rows.statistics(logits[:, start : start + 8192].contiguous(), targets, heat, tiled, start)
    near(logprobs_of(tiled), logprobs_of(exact))


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compacted", [False, True])
def test_gradient(rows, vocabulary, dtype, compacted):
    logits, targets, heat = logits_of(130, vocabulary)
    state = rows.statistics(logits, targets, heat)
    g, h = torch.randn(130, device="cuda"), torch.randn(130, device="cuda")
    g[::7] = h[::7] = 0
    chosen = compacting_rows((g != 0) | (h != 0)) if compacted else None
    wide = [each.double() for each in (heat, state, g, h)]
    expected = reference.gradient(logits.double(), targets, *wide, rows=chosen)
    got = rows.gradient(logits, targets, heat, state, g, h, rows=chosen, dtype=dtype)
    assert got.dtype == dtype
    if dtype == torch.float32:
        near(got, expected, 2e-6, 2e-5)
    else:
        near(got, expected, 1e-6, 2**-8)


@pytest.mark.parametrize("tokens", [1, 513, 21504])
def test_token_loss(rows, tokens):
    logprobs, entropies = -torch.rand(tokens, device="cuda") * 3, torch.rand(tokens, device="cuda")
    streams = streams_near(logprobs)
    ours = rows.token_loss(logprobs, entropies, streams, SPEC)
    wide = TokenStreams(*(each if each is None or each.dtype == torch.bool else each.double() for each in streams))
    theirs = reference.token_loss(logprobs.double(), entropies.double(), wide, SPEC)
    for actual, expected in zip(ours[:3], theirs[:3], strict=True):
        near(actual, expected, 1e-7, 1e-5)
    torch.testing.assert_close(ours.metrics, theirs.metrics, rtol=1e-4, atol=1e-3)
    assert ours.metrics[Metric.TOKENS] == streams.mask.sum()


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [SPEC, PolicySpec(), PolicySpec("cispo", entropy_coef=0.1)], ids=["everything", "plain", "cispo"])
def test_loss_gradient(rows, vocabulary, dtype, spec):
    logits, targets, heat = logits_of(150, vocabulary)
    exact = reference.statistics(logits.double(), targets, heat.double())
    streams = streams_near(logprobs_of(exact).float())
    wide = TokenStreams(*(each if each is None or each.dtype == torch.bool else each.double() for each in streams))
    token = reference.token_loss(logprobs_of(exact), entropies_of(exact), wide, spec)
    expected = reference.gradient(logits.double(), targets, heat.double(), exact, token.grad_logprobs, token.grad_entropies)
    state, got = rows.loss_gradient(logits, targets, heat, streams, spec, dtype=dtype)
    near(logprobs_of(state), logprobs_of(exact))
    near(got, expected, 1e-7, 1e-4 if dtype == torch.float32 else 2**-8)
    assert got[~streams.mask].abs().sum() == 0


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_pairs(rows, vocabulary):
    logits, targets, heat = logits_of(64, vocabulary)
    other = logits + torch.randn_like(logits)
    other[1] = logits[1]
    logits[2, :9] = other[2, :9] = -torch.inf
    state = rows.pair_statistics(logits, other, targets, heat)
    exact = reference.pair_statistics(logits.double(), other.double(), targets, heat.double())
    for actual, expected in zip(kls_of(state), kls_of(exact), strict=True):
        near(actual, expected, 1e-5)
    divergences = rows.pair_divergences(logits, other, heat, state)
    if hasattr(rows, "pair_scores"):
        fused, together = rows.pair_scores(logits, other, targets, heat)
        for actual, expected in zip((*kls_of(fused), *together), (*kls_of(state), *divergences), strict=True):
            near(actual, expected, 1e-5)
    for actual, expected in zip(
        divergences, reference.pair_divergences(logits.double(), other.double(), heat.double(), exact), strict=True
    ):
        near(actual, expected, 1e-5)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", [1, 300])
def test_top_token(rows, vocabulary, dtype, batch):
    logits, _, _ = logits_of(batch, vocabulary)
    logits[0, 7] = 90.0
    logits[batch // 2, 9] = 25.0
    logits = logits.to(dtype)
    eligible = torch.rand(batch, device="cuda") > 0.1
    threshold = torch.full((batch,), 0.6, device="cuda")
    banned = torch.tensor([3, vocabulary - 1], device="cuda")
    spared = torch.zeros(vocabulary, dtype=torch.bool, device="cuda")
    spared[9] = True
    ours = rows.top_token(logits, eligible, threshold, banned, spared)
    theirs = reference.top_token(logits.double(), eligible, threshold.double(), banned, spared)
    assert torch.equal(ours.top_id, theirs.top_id)
    assert torch.equal(ours.fired, theirs.fired)
    for name in ("top_prob", "raw_lse", "masked_lse"):
        near(getattr(ours, name), getattr(theirs, name), 2e-5)
    seeds = torch.randint(0, 2**62, (batch,), device="cuda")
    positions = torch.randint(0, 2**40, (batch,), device="cuda")
    heat = torch.rand(batch, device="cuda") * 1.5
    heat[0] = 0
    ours = rows.top_token_sample(logits, eligible, threshold, seeds, positions, heat, banned, spared)
    theirs = reference.top_token_sample(logits.float(), eligible, threshold, seeds, positions, heat, banned, spared)
    same = ours.token == theirs.token
    assert (~same).sum() <= batch // 100, "fp32 noise may only settle near ties differently"
    near(ours.logprob[same], theirs.logprob[same], 1e-4)
    near(ours.raw_logprob[same], theirs.raw_logprob[same], 1e-4)
    alone = rows.top_token_sample(logits[:1], eligible[:1], threshold[:1], seeds[:1], positions[:1], heat[:1], banned, spared)
    assert all(torch.equal(many[:1], one) for many, one in zip(ours, alone, strict=True))


def test_draws_follow_the_distribution(rows):
    """χ² over tokens whose expected count is down to five, far into the tail."""
    draws, vocabulary = 400_000, 64
    logits = torch.linspace(0, -9, vocabulary, device="cuda")
    expected = logits.softmax(0) * draws
    many = logits.expand(draws, vocabulary)
    off, limit = torch.zeros(draws, dtype=torch.bool, device="cuda"), torch.ones(draws, device="cuda")
    positions = torch.arange(draws, device="cuda")
    sample = rows.top_token_sample(many, off, limit, torch.full_like(positions, 11), positions, limit)
    counts = torch.bincount(sample.token, minlength=vocabulary)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert expected.min() > 5
    assert statistic < 63 + 5 * (2 * 63) ** 0.5


def test_rows_beyond_two_to_the_31_elements(rows):
    count, vocabulary = 14200, 151936
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of device memory")
    logits = torch.zeros(count, vocabulary, device="cuda")
    logits[-1].normal_()
    targets, heat = torch.full((count,), 17, device="cuda"), torch.ones(count, device="cuda")
    state = rows.statistics(logits, targets, heat)
    alone = rows.statistics(logits[-1:].clone(), targets[:1], heat[:1])
    assert torch.equal(state[-1:], alone)
    g = torch.ones(count, device="cuda")
    expected = rows.gradient(logits[-1:].clone(), targets[:1], heat[:1], alone, g[:1], g[:1])
    got = rows.gradient(logits, targets, heat, state, g, g)
    assert torch.equal(got[-1:], expected)


def test_repeats_bit_for_bit_without_a_host_sync_in_a_graph(rows):
    logits, targets, heat = logits_of(64, 32000)
    streams = streams_near(torch.full((64,), -9.0, device="cuda"))
    eligible, limit = torch.ones(64, dtype=torch.bool, device="cuda"), torch.full((64,), 0.2, device="cuda")
    seeds = torch.arange(64, device="cuda")

    def everything():
        state, gradient = rows.loss_gradient(logits.clone(), targets, heat, streams, SPEC, dtype=torch.bfloat16)
        token = rows.token_loss(logprobs_of(state), entropies_of(state), streams, SPEC)
        sample = rows.top_token_sample(logits, eligible, limit, seeds, seeds, heat)
        pair = rows.pair_statistics(logits, logits, targets, heat)
        return [state, gradient, *token, *sample, pair, *rows.pair_divergences(logits, logits, heat, pair)]

    first = everything()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = everything()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for one, two, three in zip(first, again, captured, strict=True):
        assert torch.equal(one.nan_to_num(), two.nan_to_num())
        assert torch.equal(one.nan_to_num(), three.nan_to_num())


@pytest.mark.parametrize("implementation", ["triton", "cuda"])
def test_the_fused_head_in_bfloat16(implementation):
    if not available(implementation):
        pytest.skip(f"{implementation} kernels are not available here")
    tokens, width, vocabulary = 700, 512, 32000
    hidden = torch.randn(tokens, width, device="cuda").bfloat16()
    weight = (torch.randn(vocabulary, width, device="cuda") / width**0.5 * 3).bfloat16()
    targets = torch.randint(0, vocabulary, (tokens,), device="cuda")
    exact_hidden, exact_weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    exact, _ = linear_logprob(exact_hidden, exact_weight, targets, 0.9)
    streams = streams_near(exact.detach().float())
    arguments = {name: value for name, value in streams._asdict().items() if name not in ("old_logprobs", "advantages", "weights")}

    def loss_of(h, w):
        base = (streams.old_logprobs, streams.advantages, streams.weights)
        return linear_policy_loss(h, w, targets, *base, SPEC, temperature=0.9, chunk=256, implementation=implementation, **arguments)

    expected = loss_of(exact_hidden, exact_weight)
    expected.loss.backward()
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    out = loss_of(*leaves)
    out.loss.backward()
    near(out.logprobs, exact, 1e-4)
    near(out.loss, expected.loss, 1e-5, 1e-4)
    for leaf, wanted in zip(leaves, (exact_hidden.grad, exact_weight.grad), strict=True):
        error = (leaf.grad.double() - wanted).norm() / wanted.norm()
        assert error < 5e-3, f"relative error {error:.1e}"
