"""The top-token mask and the sampler: EX-4.2 to 4.4, 4.7, certainty, noise and its distribution."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels import top_token_mask, top_token_sample
from headrace.kernels.reference.noise import LARGEST, gumbel, random_bits
from headrace.kernels.reference.top_token_rows import exceeds

YES = torch.tensor([True])


def chance(observed, expected=None):
    """Probability that counts drawn from ``expected``, by default equal shares, lie at least this far off: Pearson's chi-square."""
    observed = observed.double()
    expected = torch.full_like(observed, observed.mean()) if expected is None else expected * observed.sum() / expected.sum()
    distance = ((observed - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(observed) - 1) / 2, dtype=torch.float64), distance / 2).item()


def mask(logits, threshold=0.95, eligible=None, **options):
    eligible = torch.ones(len(logits), dtype=torch.bool) if eligible is None else eligible
    return top_token_mask(logits, eligible, threshold, **options)


def sample(logits, threshold=0.95, seed=7, position=0, eligible=None, **options):
    rows = len(logits)
    eligible = torch.ones(rows, dtype=torch.bool) if eligible is None else eligible
    seeds = seed if isinstance(seed, torch.Tensor) else torch.full((rows,), seed)
    positions = position if isinstance(position, torch.Tensor) else torch.full((rows,), position)
    return top_token_sample(logits, eligible, threshold, seeds, positions, **options)


def entropy(p):
    return -(p * p.log())[p > 0].sum().item()


def test_ex_4_2_mask(implementation):
    p = torch.tensor([[0.97, 0.014, 0.008, 0.005, 0.003]])
    logits = p.log()
    result = mask(logits, implementation=implementation)
    assert result.fired.tolist() == [True]
    assert result.top_id.tolist() == [0]
    assert result.top_prob.item() == pytest.approx(0.97, abs=1e-6)
    q = logits.softmax(1)
    assert q[0].tolist() == pytest.approx([0, 0.466667, 0.266667, 0.166667, 0.1], abs=1e-6)
    assert (entropy(p), entropy(q)) == pytest.approx((0.171853, 1.237019), abs=1e-6)
    behaviour, policy = (math.log(0.014) - result.masked_lse.item(), math.log(0.014) - result.raw_lse.item())
    assert (behaviour, policy) == pytest.approx((-0.762140, -4.268698), abs=1e-5)
    assert math.exp(policy - behaviour) == pytest.approx(0.03, abs=1e-6)


def test_ex_4_3_strict_comparison_on_given_probabilities(implementation):
    given_probs = torch.tensor([0.95, 0.9500001], dtype=torch.float64)
    assert exceeds(given_probs, torch.full((2,), 0.95, dtype=torch.float64)).tolist() == [False, True]
    equal = torch.zeros(1, 2)
    assert mask(equal.clone(), 0.5, implementation=implementation).fired.tolist() == [False]  # p* is exactly 1/2
    assert mask(equal.clone(), 0.4999999, implementation=implementation).fired.tolist() == [True]


def test_ex_4_4_masking_can_lower_entropy(implementation):
    p = torch.tensor([[0.96, 0.0399, 0.0001]])
    logits = p.log()
    mask(logits, implementation=implementation)
    assert (entropy(p), entropy(logits.softmax(1))) == pytest.approx((0.168643, 0.017476), abs=1e-6)


def test_section_4_5_entropy_after_the_mask(implementation):
    """H_post = (H + p* ln p*) / (1 − p*) + ln(1 − p*)."""
    logits = torch.randn(1, 300)
    logits[0, 17] = 9.5
    before = entropy(logits.softmax(1))
    result = mask(logits, implementation=implementation)
    p = result.top_prob.item()
    assert 0.95 < p < 0.999
    assert entropy(logits.softmax(1)) == pytest.approx((before + p * math.log(p)) / (1 - p) + math.log(1 - p), abs=2e-3)


@pytest.mark.parametrize("gap", [5.0, 17.0, 60.0, 104.0, 500.0])
def test_nothing_is_lost_towards_certainty(gap, implementation):
    """p* → 1 up to a rest that underflows against the top: the rest keeps its own sum."""
    rest = torch.randn(1, 40)
    logits = torch.cat([rest[:, :20], rest.amax(1, keepdim=True) + gap, rest[:, 20:]], dim=1)
    expected = torch.logsumexp(rest.double(), 1).item()
    drawn = sample(logits, 0.9, implementation=implementation)
    assert drawn.fired.item()
    assert drawn.token.item() != 20
    assert drawn.logprob.item() == pytest.approx(logits[0, drawn.token].item() - expected, abs=1e-5)
    result = mask(logits, 0.9, implementation=implementation)
    assert result.fired.item()
    assert result.masked_lse.item() == pytest.approx(expected, abs=1e-5)
    assert logits[0, 20] == -math.inf


@pytest.mark.parametrize("shift", [-2000.0, -100.0, 0.0, 100.0, 2000.0])
def test_shift_and_permutation(shift, implementation):
    logits = (torch.randn(6, 65) * 16).round() / 16
    logits[:, 3] += torch.linspace(0, 20, 6).round()
    plain = mask(logits.clone(), 0.6, implementation=implementation)
    moved = mask(logits + shift, 0.6, implementation=implementation)
    assert torch.equal(plain.fired, moved.fired)
    torch.testing.assert_close(plain.top_prob, moved.top_prob, atol=1e-6, rtol=1e-6)
    tolerance = 1e-5 + abs(shift) * 1e-7
    torch.testing.assert_close(plain.masked_lse + shift, moved.masked_lse, atol=tolerance, rtol=0)
    order = torch.randperm(65)
    mixed = mask(logits[:, order].contiguous(), 0.6, implementation=implementation)
    assert torch.equal(plain.fired, mixed.fired)
    torch.testing.assert_close(plain.raw_lse, mixed.raw_lse, atol=1e-5, rtol=0)


@pytest.mark.parametrize("vocabulary", [1, 2, 15, 16, 17, 63, 64, 65, 1023, 1024, 1025])
def test_any_vocabulary(vocabulary, implementation):
    logits = torch.randn(3, vocabulary) * 3
    for at in (0, vocabulary - 1):
        row = logits.clone()
        row[:, at] = 25
        result = mask(row.clone(), implementation=implementation)
        assert result.top_id.tolist() == [at] * 3
        assert result.fired.tolist() == [vocabulary > 1] * 3
        torch.testing.assert_close(result.raw_lse, torch.logsumexp(row, 1))
        drawn = sample(row, implementation=implementation)
        if vocabulary > 1:
            assert (drawn.token != at).all()
    plain = sample(logits, 1.0, implementation=implementation)
    expected = logits.log_softmax(1).gather(1, plain.token[:, None])[:, 0]
    torch.testing.assert_close(plain.logprob, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(plain.raw_logprob, expected, atol=1e-5, rtol=0)


def test_guards(implementation):
    """Not eligible, nothing else finite, spared, banned."""
    certain = torch.tensor([[0.0, 30, 1, 2]])
    assert not mask(certain.clone(), eligible=~YES, implementation=implementation).fired
    assert not mask(certain.clone(), 1.0, implementation=implementation).fired  # p* > 1 never holds
    alone = torch.tensor([[-math.inf, 3, -math.inf, -math.inf]])
    result = mask(alone, implementation=implementation)
    assert not result.fired
    assert alone[0, 1] == 3
    assert result.top_prob == 1
    assert sample(alone, implementation=implementation).token == 1
    spared = torch.tensor([False, True, False, False])
    assert not mask(certain.clone(), spared=spared, implementation=implementation).fired
    assert sample(certain, spared=spared, implementation=implementation).token == 1
    row = certain.clone()
    result = mask(row, banned=[1], implementation=implementation)
    assert not result.fired
    assert result.top_id == 3
    assert row[0].tolist() == [0, -math.inf, 1, 2]
    kept = certain.clone()
    drawn = sample(kept, banned=[1], implementation=implementation)
    assert torch.equal(kept, certain)
    assert drawn.top_id == 3
    assert drawn.raw_logprob.item() == pytest.approx((row.log_softmax(1)[0, drawn.token]).item(), abs=1e-6)
    assert not mask(certain.clone(), banned=[0, 2, 3], implementation=implementation).fired  # banned tokens are no alternative


def test_rows_that_cannot_be_sampled(implementation):
    nothing = torch.full((2, 5), -math.inf)
    result = mask(nothing, implementation=implementation)
    assert result.fired.tolist() == [False, False]
    assert result.top_prob.tolist() == [0, 0]
    logits = torch.randn(3, 40)
    logits[1, 33] = math.nan
    result = mask(logits.clone(), 0.01, implementation=implementation)
    assert result.fired.tolist() == [True, False, True]
    assert result.top_prob.isnan().tolist() == [False, True, False]
    for bad in (logits, nothing):
        with pytest.raises(ValueError, match=r"logits\[\d\] cannot be sampled"):
            sample(bad, implementation=implementation)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes_and_strides(dtype, implementation):
    base = (torch.randn(5, 90) * 4).to(dtype)
    base[2, 20] = 40
    for view in (lambda x: x[:, :45], lambda x: x[:, ::2], lambda x: x[::2], lambda x: x.t().contiguous().t()):
        tensor = view(base.clone())
        before = tensor.clone()
        drawn = sample(tensor, 0.9, implementation=implementation)
        assert torch.equal(tensor, before)
        fresh = sample(before, 0.9, implementation=implementation)
        assert torch.equal(drawn.token, fresh.token)
        result = mask(tensor, 0.9, implementation=implementation)
        exact = before.double()
        torch.testing.assert_close(result.raw_lse.double(), torch.logsumexp(exact, 1), atol=1e-5, rtol=0)
        expected = before.clone()
        expected[result.fired, result.top_id[result.fired]] = -math.inf
        assert torch.equal(tensor, expected)
        assert result.fired.any()
    shared = base[:1].expand(4, 90)
    assert sample(shared, 0.9, implementation=implementation).token.unique().numel() == 1
    with pytest.raises(ValueError, match="expanded"):
        mask(shared, implementation=implementation)


def test_temperature_acts_after_the_mask(implementation):
    logits = torch.randn(4, 30)
    logits[:2, 5] = 11
    heat = torch.tensor([0.5, 2.0, 0.5, 2.0])
    drawn = sample(logits, temperature=heat, implementation=implementation)
    assert drawn.fired.tolist() == [True, True, False, False]
    scaled = logits.double() / heat[:, None].double()
    raw = scaled.log_softmax(1)
    scaled[:2, 5] = -math.inf
    at = drawn.token[:, None]
    torch.testing.assert_close(drawn.logprob.double(), scaled.log_softmax(1).gather(1, at)[:, 0], atol=1e-5, rtol=0)
    torch.testing.assert_close(drawn.raw_logprob.double(), raw.gather(1, at)[:, 0], atol=1e-5, rtol=0)


def test_greedy(implementation):
    logits = torch.randn(3, 50)
    logits[0, 9] = 20
    drawn = sample(logits, temperature=0.0, implementation=implementation)
    runner_up = logits.clone()
    runner_up[0, 9] = -math.inf
    assert drawn.token.tolist() == runner_up.argmax(1).tolist()
    assert drawn.logprob.tolist() == [0, 0, 0]
    expected = logits.log_softmax(1).gather(1, drawn.token[:, None])[:, 0]
    torch.testing.assert_close(drawn.raw_logprob, expected, atol=1e-5, rtol=0)


def test_a_draw_does_not_know_its_batch(implementation):
    logits, seeds, positions = torch.randn(12, 77) * 2, torch.randint(0, 1 << 62, (12,)), torch.randint(0, 1 << 40, (12,))
    together = sample(logits, seed=seeds, position=positions, implementation=implementation)
    order = torch.randperm(12)
    mixed = sample(logits[order], seed=seeds[order], position=positions[order], implementation=implementation)
    for whole, part in zip(together, mixed, strict=True):
        assert torch.equal(whole[order], part)
    for row in range(12):
        alone = sample(logits[row : row + 1], seed=seeds[row : row + 1], position=positions[row : row + 1], implementation=implementation)
        assert all(torch.equal(one, whole[row : row + 1]) for one, whole in zip(alone, together, strict=True))


def test_seed_and_position_matter_in_all_their_bits():
    logits = torch.zeros(1, 5000)
    tokens = {
        sample(logits, seed=seed, position=position).token.item()
        for seed in (0, 1, 1 << 31, 1 << 32, 1 << 62)
        for position in (0, 1, 1 << 33)
    }
    assert len(tokens) >= 14


def test_implementations_draw_the_same_tokens(implementation):
    logits = torch.randn(200, 501) * 3
    logits[::3, 44] = 17
    seeds = torch.randint(0, 1 << 62, (200,))
    ours = sample(logits, seed=seeds, implementation=implementation)
    reference = sample(logits, seed=seeds, implementation="reference")
    assert torch.equal(ours.token, reference.token)
    assert torch.equal(ours.fired, reference.fired)
    torch.testing.assert_close(ours.logprob, reference.logprob, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.raw_logprob, reference.raw_logprob, atol=1e-5, rtol=0)


def test_the_mask_only_removes_a_runner(implementation):
    """The draw under the mask is the race without the top token: other tokens keep their noise."""
    logits = torch.randn(64, 30)
    logits[:, 11] = 8
    seeds = torch.arange(64)
    masked = sample(logits, 0.9, seed=seeds, implementation=implementation)
    removed = logits.clone()
    removed[:, 11] = -math.inf
    assert masked.fired.all()
    assert torch.equal(masked.token, sample(removed, 1.0, seed=seeds, implementation=implementation).token)


def test_philox_known_answers():
    """The published vectors of Philox4x32-10, for a counter and key of zeros and of all ones."""
    from headrace.kernels.reference.noise import philox

    for fill, expected in (
        (0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (0xFFFFFFFF, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ):
        word = torch.tensor([fill])
        assert [int(x) for x in philox((word,) * 4, (word, word))] == expected


def test_bits_are_uniform_and_noise_is_bounded():
    bits = random_bits(torch.arange(8), torch.zeros(8, dtype=torch.long), 100_001)
    assert bits.shape == (8, 100_001)
    assert bits.min() >= 0
    assert bits.max() < 1 << 32
    for shift in (0, 24):  # lowest and highest byte
        counts = torch.bincount(((bits >> shift) & 0xFF).flatten(), minlength=256)
        assert chance(counts) > 1e-4
    noise = gumbel(torch.arange(8), torch.zeros(8, dtype=torch.long), 100_001, torch.float64)
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.max() < LARGEST
    smallest = torch.tensor([0.5 * 2.0**-32], dtype=torch.float32)
    assert (-(-(-smallest).log1p()).log()).item() < LARGEST


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tail_tokens_are_drawn_as_often_as_they_should(temperature, implementation):
    """χ² over bins of equal width in log-probability, down to tokens of probability 1e-5."""
    logits = torch.linspace(0, -11, 400)[None]
    draws = 40_000
    tokens = torch.cat(
        [
            sample(
                logits.expand(4000, 400),
                seed=torch.arange(start, start + 4000) * 77_777,
                position=torch.arange(4000),
                temperature=temperature,
                implementation=implementation,
            ).token
            for start in range(0, draws, 4000)
        ]
    )
    probs = (logits[0].double() / temperature).softmax(0)
    observed = torch.bincount(tokens, minlength=400).double().view(20, 20).sum(1)
    expected = probs.view(20, 20).sum(1) * draws
    while expected[-1] < 8:
        observed = torch.cat([observed[:-2], observed[-2:].sum(0, keepdim=True)])
        expected = torch.cat([expected[:-2], expected[-2:].sum(0, keepdim=True)])
    assert len(expected) > 10
    assert chance(observed, expected) > 1e-3


def test_rare_tokens_of_a_near_forced_row(implementation):
    """15 nats below the top: coarse noise would never draw them. The mask gives them their chance."""
    logits = torch.full((20_000, 8), -15.0)
    logits[:, 0] = 0
    seeds = torch.arange(20_000) * 31
    tokens = sample(logits, 0.95, seed=seeds, implementation=implementation).token
    counts = torch.bincount(tokens, minlength=8)
    assert counts[0] == 0
    assert chance(counts[1:]) > 1e-3


@pytest.mark.parametrize(("top_k", "top_p"), [(3, None), (None, 0.7), (5, 0.6), (1, None), (None, 1e-9), (100, 1.0)])
def test_truncation_after_the_mask(top_k, top_p, implementation):
    logits = torch.randn(300, 40) * 2
    logits[::2, 7] = 14
    seeds = torch.arange(300)
    drawn = sample(logits, 0.9, seed=seeds, temperature=0.8, top_k=top_k, top_p=top_p, implementation=implementation)
    left = logits.clone()
    left[drawn.fired, drawn.top_id[drawn.fired]] = -math.inf
    left = left / 0.8
    ranked, order = left.sort(1, descending=True)
    keep = torch.ones_like(left, dtype=torch.bool)
    if top_k is not None:
        keep[:, top_k:] = False
        ranked = ranked.masked_fill(~keep, -math.inf)
    if top_p is not None:
        probs = ranked.softmax(1)
        keep &= (probs.cumsum(1) - probs) < top_p
    allowed = torch.zeros_like(keep).scatter(1, order, keep)
    assert allowed.gather(1, drawn.token[:, None]).all()
    expected = left.masked_fill(~allowed, -math.inf).log_softmax(1).gather(1, drawn.token[:, None])[:, 0]
    torch.testing.assert_close(drawn.logprob, expected, atol=1e-5, rtol=0)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=30), st.floats(0.0, 1.0), st.integers(0, (1 << 63) - 1))
def test_any_row(values, threshold, seed):
    """A fired row never yields its top token, and the two log-sum-exps say what the definition says."""
    logits = torch.tensor([values])
    exact = logits.double()
    drawn = sample(logits, threshold, seed=seed)
    result = mask(logits, threshold)
    assert drawn.fired == result.fired
    assert not (drawn.fired & (drawn.token == drawn.top_id)).any()
    assert result.top_id == exact.argmax()
    torch.testing.assert_close(result.raw_lse.double(), torch.logsumexp(exact, 1), atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(result.masked_lse.double(), torch.logsumexp(logits.double(), 1), atol=1e-5, rtol=1e-6)
    assert drawn.logprob <= 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eligible": torch.ones(2)}, "eligible"),
        ({"eligible": torch.ones(3, dtype=torch.bool)}, "eligible"),
        ({"seeds": torch.zeros(2)}, "seeds"),
        ({"positions": torch.zeros(1, dtype=torch.long)}, "positions"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": torch.ones(3)}, "temperature"),
        ({"logits": torch.zeros(2, 0)}, "logits"),
        ({"logits": torch.zeros(2, 4, dtype=torch.long)}, "logits"),
        ({"spared": torch.zeros(3, dtype=torch.bool)}, "spared"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"banned": [-2]}, "banned"),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = {
        "logits": torch.zeros(2, 4),
        "eligible": torch.ones(2, dtype=torch.bool),
        "threshold": 0.9,
        "seeds": torch.zeros(2, dtype=torch.long),
        "positions": torch.zeros(2, dtype=torch.long),
    } | change
    with pytest.raises(ValueError, match=message):
        top_token_sample(**arguments)
