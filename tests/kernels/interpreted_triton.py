"""The Triton row operations in Triton's interpreter against the reference. Run by `test_triton.py`, in a process of its own."""

import math

import pytest
import torch

from headrace.kernels import (
    PolicySpec,
    counterfactual_score,
    linear_logprob,
    linear_policy_loss,
    reference,
    top_token_mask,
    triton,
)
from headrace.kernels.policy_spec import Metric, TokenStreams
from headrace.kernels.rows import SUM, TARGET, compacting_rows, entropies_of, kls_of, logprobs_of
from headrace.kernels.triton.launch import ROW_BLOCK

WIDTHS = [1, 5, ROW_BLOCK - 1, ROW_BLOCK, ROW_BLOCK + 1, 2 * ROW_BLOCK + 3]
INF = math.inf


def rows_of(rows: int, columns: int, spread: float = 3.0):
    return torch.randn(rows, columns) * spread, torch.randint(0, columns, (rows,)), torch.rand(rows) + 0.5


def near(actual, expected, atol=1e-5):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=atol, equal_nan=True)


def same_scores(actual, expected, atol=1e-5):
    near(logprobs_of(actual), logprobs_of(expected), atol)
    near(entropies_of(actual), entropies_of(expected), atol)


@pytest.mark.parametrize("columns", WIDTHS)
def test_statistics_at_the_edges_of_a_block(columns):
    logits, targets, heat = rows_of(3, columns)
    ours = triton.statistics(logits, targets, heat)
    near(ours, reference.statistics(logits, targets, heat), 1e-4)
    same_scores(ours, reference.statistics(logits.double(), targets, heat.double()).float())


@pytest.mark.parametrize("tile", [1, 700, ROW_BLOCK + 1])
def test_statistics_of_tiles_are_those_of_the_row(tile):
    logits, targets, heat = rows_of(4, 2100)
    logits[0, :1500] = -INF  # the first tiles hold nothing
    logits[1, 1500:] = -INF
    whole = triton.statistics(logits, targets, heat)
    width = 2100 if tile > 1 else 40
    state = None
    for start in range(0, width, tile):
        block = logits[:, start : min(start + tile, width)]
        state = triton.statistics(block, targets, heat, state, start)
    if width == 2100:
        near(state, whole, 1e-4)
    else:
        near(state[:, :3], reference.statistics(logits[:, :width], targets, heat)[:, :3], 1e-4)


def test_rows_that_are_not_finite_keep_to_themselves():
    logits, targets, heat = rows_of(6, 300)
    clean = triton.statistics(logits, targets, heat)
    logits[1] = -INF
    logits[2, 7] = torch.nan
    logits[3, :] = -INF
    logits[3, targets[3]] = 4.0
    logits[4, targets[4]] = -INF
    state = triton.statistics(logits, targets, heat)
    assert torch.equal(state[[0, 5]], clean[[0, 5]])
    assert state[1].tolist() == [-INF, 0, 0, -INF]
    logprobs, entropies = logprobs_of(state), entropies_of(state)
    assert logprobs[2].isnan()
    assert entropies[2].isnan()
    assert logprobs[3:5].tolist() == [0, -INF]
    assert entropies[3] == 0
    assert entropies[4] > 0


@pytest.mark.parametrize("shift", [-3000.0, 900.0])
def test_a_shift_of_all_logits_changes_nothing(shift):
    logits, targets, _ = rows_of(3, 500)
    logits = (logits * 64).round() / 64  # exact under the shift
    heat = torch.ones(3)
    same_scores(triton.statistics(logits + shift, targets, heat), triton.statistics(logits, targets, heat), 1e-6)
    other = ((logits + torch.randn_like(logits)) * 64).round() / 64
    plain = kls_of(triton.pair_statistics(logits, other, targets, heat))
    shifted = kls_of(triton.pair_statistics(logits + shift, other - shift, targets, heat))
    near(torch.stack(shifted), torch.stack(plain), 1e-5)


def test_the_order_of_the_vocabulary_changes_nothing():
    logits, targets, heat = rows_of(3, 3000)
    order = torch.randperm(3000)
    same_scores(triton.statistics(logits[:, order].contiguous(), order.argsort()[targets], heat), triton.statistics(logits, targets, heat))


@pytest.mark.parametrize("label", [-100, -1, 50, 2**40])
def test_a_label_outside_the_columns_has_no_score(label):
    logits, targets, heat = rows_of(2, 50)
    targets[0] = label
    state = triton.statistics(logits, targets, heat)
    assert state[0, TARGET] == -INF
    assert state[1, TARGET] > -INF
    assert (state[:, SUM] > 0).all()
    ones = torch.ones(2)
    got = triton.gradient(logits.clone(), targets, heat, state, ones, ones)
    near(got, reference.gradient(logits, targets, heat, state, ones, ones))


def test_strided_rows_and_poison_beyond_them():
    storage = torch.full((3, 800), torch.nan)
    logits, targets, heat = rows_of(3, 500)
    storage[:, :500] = logits
    near(triton.statistics(storage[:, :500], targets, heat), triton.statistics(logits, targets, heat), 0)


def test_a_row_depends_on_no_other_and_repeats_bit_for_bit():
    logits, targets, heat = rows_of(5, 2500)
    all_rows = triton.statistics(logits, targets, heat)
    assert torch.equal(all_rows, triton.statistics(logits, targets, heat))
    assert torch.equal(all_rows[3:4], triton.statistics(logits[3:4], targets[3:4], heat[3:4]))


def test_rows_beyond_two_to_the_31_elements():
    stride = 2**31 + 64
    # Reserved, not touched: only the pages of the two rows become memory.
    storage = torch.empty(stride + 64, dtype=torch.float32)
    logits = storage.as_strided((2, 40), (stride, 1))
    values, targets, heat = rows_of(2, 40)
    logits.copy_(values)
    state = triton.statistics(logits, targets, heat)
    near(state, triton.statistics(values, targets, heat), 0)
    eligible, threshold = torch.ones(2, dtype=torch.bool), torch.full((2,), 0.1)
    assert torch.equal(triton.top_token(logits, eligible, threshold).top_id, values.argmax(1))
    g = torch.randn(2)
    expected = reference.gradient(values, targets, heat, state, g, g)
    triton.gradient(logits, targets, heat, state, g, g)
    near(logits, expected)


@pytest.mark.parametrize("columns", [5, ROW_BLOCK + 1])
def test_gradient_equals_autograd(columns):
    logits, targets, heat = rows_of(4, columns)
    g, h = torch.randn(4), torch.randn(4)
    g[2] = h[2] = 0
    leaf = logits.double().requires_grad_()
    logp = (leaf * heat.double()[:, None]).log_softmax(1)
    entropies = -(logp.exp() * logp).sum(1)
    (g.double() @ logp.gather(1, targets[:, None]).squeeze(1) + h.double() @ entropies).backward()
    state = triton.statistics(logits, targets, heat)
    logits[2] = torch.nan  # coefficients of zero: never read
    got = triton.gradient(logits, targets, heat, state, g, h)
    assert got.data_ptr() == logits.data_ptr()
    near(got, leaf.grad.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradient_compacts_and_narrows_in_place(dtype):
    logits, targets, heat = rows_of(7, ROW_BLOCK + 9)
    state = triton.statistics(logits, targets, heat)
    g, h = torch.randn(7), torch.randn(7)
    active = torch.tensor([False, True, True, False, False, True, True])
    rows = compacting_rows(active)
    expected = reference.gradient(logits, targets, heat, state, g, h, rows=rows)
    buffer = logits.clone()
    got = triton.gradient(buffer, targets, heat, state, g, h, rows=rows, dtype=dtype)
    assert got.shape == (4, ROW_BLOCK + 9)
    assert got.dtype == dtype
    assert got.stride(1) == 1
    assert got.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    torch.testing.assert_close(got.float(), expected, rtol=1e-3, atol=1e-5 if dtype == torch.float32 else 2e-4)


def streams_of(tokens, poison=False):
    mask = torch.rand(tokens) > 0.3
    streams = [torch.randn(tokens) * 0.4 for _ in range(2)] + [torch.rand(tokens), torch.rand(tokens), mask]
    streams += [torch.randn(tokens) * 0.4 for _ in range(2)]
    if poison:
        for stream, value in zip((streams[0], streams[1], streams[3], streams[5], streams[6]), (INF, torch.nan) * 3, strict=False):
            stream[~mask] = value
    return TokenStreams(*streams)


SPECS = {
    "plain": (PolicySpec(), ()),
    "gspo": (PolicySpec("gspo", 0.1, 0.1), ()),
    "everything": (PolicySpec(dual_clip=1.4, tis_cap=1.1, kl_coef=0.1, entropy_coef=0.05, surprisal_coef=0.02), ()),
    "k1 without proximal": (PolicySpec(kl_coef=0.3, kl_kind="k1"), ("proximal_logprobs",)),
    "k2 without gates and mask": (PolicySpec(kl_coef=0.3, kl_kind="k2", tis_cap=2.0), ("gates", "mask")),
    "cispo": (PolicySpec("cispo", entropy_coef=0.1), ("ref_logprobs",)),
}


@pytest.mark.parametrize("tokens", [1, 700, 1300])
@pytest.mark.parametrize("case", SPECS)
def test_token_loss(case, tokens):
    spec, absent = SPECS[case]
    streams = streams_of(tokens, poison="mask" not in absent)._replace(**dict.fromkeys(absent))
    logprobs, entropies = torch.randn(tokens) * 0.4, torch.rand(tokens)
    logprobs[::50] += 30.0  # beyond the limit of log-ratios
    if streams.mask is not None:
        logprobs[~streams.mask] = torch.nan
    ratios = torch.randn(tokens) if spec.kind == "gspo" else None
    ours = triton.token_loss(logprobs, entropies, streams, spec, ratios)
    theirs = reference.token_loss(logprobs, entropies, streams, spec, ratios)
    for name, actual, expected in zip(ours._fields, ours, theirs, strict=True):
        scale = 1e-5 if name != "metrics" else 1e-3
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=scale, msg=lambda text, name=name: f"{name}: {text}")
        assert actual.isfinite().all() or (name == "metrics" and theirs.metrics[Metric.TOKENS] == 0)
    assert torch.equal(ours.metrics, triton.token_loss(logprobs, entropies, streams, spec, ratios).metrics)


def test_token_loss_of_no_tokens_and_of_none_that_count():
    nothing = triton.token_loss(torch.empty(0), torch.empty(0), streams_of(0), PolicySpec())
    assert nothing.metrics[Metric.RATIO_MIN] == INF
    streams = streams_of(9)._replace(mask=torch.zeros(9, dtype=torch.bool))
    none = triton.token_loss(torch.full((9,), torch.nan), torch.full((9,), torch.nan), streams, PolicySpec(kl_coef=1.0))
    assert none.losses.tolist() == none.grad_logprobs.tolist() == [0.0] * 9
    assert none.metrics.tolist() == [0.0] * 14 + [INF, -INF]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", [name for name in SPECS if name != "gspo"])
def test_fused_loss_gradient_is_the_three_steps(case, dtype):
    spec, absent = SPECS[case]
    logits, targets, heat = rows_of(6, ROW_BLOCK + 7)
    state = reference.statistics(logits, targets, heat)
    streams = streams_of(6, poison="mask" not in absent)._replace(**dict.fromkeys(absent))
    for name in {"old_logprobs", "ref_logprobs", "proximal_logprobs"} - set(absent):
        streams = streams._replace(**{name: logprobs_of(state) + torch.randn(6) * 0.3})
    token = reference.token_loss(logprobs_of(state), entropies_of(state), streams, spec)
    expected = reference.gradient(logits, targets, heat, state, token.grad_logprobs, token.grad_entropies)
    got_state, got = triton.loss_gradient(logits.clone(), targets, heat, streams, spec, dtype=dtype)
    near(got_state, state, 1e-4)
    torch.testing.assert_close(got.float(), expected, rtol=2e-3, atol=1e-6 if dtype == torch.float32 else 2e-4)
    assert (got[token.grad_logprobs == 0].float().abs().sum() == 0) or spec.entropy_coef


@pytest.mark.parametrize("columns", [3, ROW_BLOCK // 2 - 1, ROW_BLOCK // 2 + 1, 2100])
def test_pairs(columns):
    logits, targets, heat = rows_of(4, columns)
    other = logits + torch.randn_like(logits)
    if columns > 3:
        logits[0, :3] = other[0, :3] = -INF  # banned in both
        other[1] = logits[1]
        heat[2] = 1
        logits[2] += 800
    state = triton.pair_statistics(logits, other, targets, heat)
    exact = reference.pair_statistics(logits.double(), other.double(), targets, heat.double())
    near(torch.stack(kls_of(state)), torch.stack(kls_of(exact)).float(), 2e-5)
    same_scores(state[:, :4], exact[:, :4].float(), 2e-4)
    same_scores(state[:, 4:8], exact[:, 4:8].float(), 2e-4)
    divergences = torch.stack(triton.pair_divergences(logits, other, heat, state))
    near(divergences, torch.stack(reference.pair_divergences(logits.double(), other.double(), heat.double(), exact)).float(), 2e-4)
    tiled = None
    for start in range(0, columns, 900):
        end = start + 900
        tiled = triton.pair_statistics(logits[:, start:end], other[:, start:end], targets, heat, tiled, start)
    near(torch.stack(kls_of(tiled)), torch.stack(kls_of(state)), 2e-5)
    if columns > 3:
        assert kls_of(state)[0][1] == 0
        assert divergences[:, 1].tolist() == [0, 0]


def test_pair_with_disjoint_supports():
    logits = torch.tensor([[0.0, 0.0, -INF, -INF]])
    other = torch.tensor([[-INF, -INF, 0.0, 0.0]])
    one, target = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    state = triton.pair_statistics(logits, other, target, one)
    assert kls_of(state)[0].item() == INF
    js, tv = triton.pair_divergences(logits, other, one, state)
    near(js, torch.tensor([math.log(2)]))
    near(tv, torch.ones(1))


@pytest.mark.parametrize(
    "spec", [PolicySpec(dual_clip=2.0, kl_coef=0.1, entropy_coef=0.05), PolicySpec("gspo", 0.1, 0.1)], ids=["ppo", "gspo"]
)
def test_the_fused_loss_over_these_rows(spec):
    hidden, weight = torch.randn(11, 6), torch.randn(43, 6)
    targets = torch.randint(0, 43, (11,))
    targets[4] = -100
    streams = streams_of(11)
    old = linear_logprob(hidden, weight, targets, implementation="reference")[0].detach() + torch.randn(11) * 0.2
    results = []
    for implementation in ("reference", "triton"):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        out = linear_policy_loss(
            *leaves,
            targets,
            old,
            streams.advantages,
            streams.weights,
            spec,
            gates=streams.gates,
            mask=streams.mask,
            ref_logprobs=old if spec.kl_coef else None,
            cu_seqlens=torch.tensor([0, 5, 11]),
            banned=[7, 9],
            chunk=6,
            implementation=implementation,
        )
        out.loss.backward()
        results.append([out.loss.detach(), out.metrics, out.logprobs, out.entropies, *(leaf.grad for leaf in leaves)])
    for theirs, ours in zip(*results, strict=True):
        near(ours, theirs, 1e-4)


def test_the_scoring_operations_over_these_rows():
    hidden, other, weight = torch.randn(7, 6), torch.randn(7, 6), torch.randn(43, 6)
    targets = torch.randint(0, 43, (7,))
    heat = torch.rand(7) + 0.5
    everything = ("kl", "reverse_kl", "js", "tv")
    for call in (
        lambda name: linear_logprob(hidden, weight, targets, heat, implementation=name),
        lambda name: counterfactual_score(hidden, other, weight, targets, heat, everything, implementation=name),
    ):
        for ours, theirs in zip(call("triton"), call("reference"), strict=True):
            near(ours, theirs, 1e-5)
    logits, copy = hidden @ weight.t() * 5, hidden @ weight.t() * 5
    eligible = torch.ones(7, dtype=torch.bool)
    top_token_mask(logits, eligible, 0.4, banned=[1], implementation="triton")
    top_token_mask(copy, eligible, 0.4, banned=[1], implementation="reference")
    assert torch.equal(logits, copy)
