"""The Triton sampler in Triton's interpreter against the reference. Run by `test_triton.py`, in a process of its own."""

import math

import pytest
import torch
import triton.language as tl
from triton import jit

from headrace.kernels import reference, triton
from headrace.kernels.reference.noise import random_bits as reference_bits
from headrace.kernels.triton.noise import random_bits
from headrace.kernels.triton.top_token_rows import SLICE

INF = math.inf


def near(actual, expected, atol=1e-5):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=atol, equal_nan=True)


def top_rows(columns):
    logits = torch.randn(9, columns) * 4
    logits[1, 2] = 70.0  # the rest underflows against the top
    logits[2] += 500
    logits[3] = -INF
    logits[3, columns - 1] = 2.0
    logits[4, 1] = torch.nan
    logits[5] = -INF
    logits[6, 3] = logits[6, columns - 1] = 40.0  # a tie
    logits[7, columns // 2] = 30.0
    return logits


@pytest.mark.parametrize(("dtype", "barred"), [(torch.float32, True), (torch.float32, False), (torch.float16, True)])
@pytest.mark.parametrize("columns", [6, SLICE - 1, SLICE + 1])
def test_top_token(columns, dtype, barred):
    logits = top_rows(columns).to(dtype)
    eligible = torch.ones(9, dtype=torch.bool)
    eligible[8] = False
    threshold = torch.full((9,), 0.7)
    banned = torch.tensor([0, columns - 1]) if barred else None
    spared = torch.zeros(columns, dtype=torch.bool)
    spared[columns // 2] = barred
    before = logits.clone()
    ours = triton.top_token(logits, eligible, threshold, banned, spared)
    theirs = reference.top_token(logits.double(), eligible, threshold.double(), banned, spared)
    for name, actual, expected in zip(ours._fields, ours, theirs, strict=True):
        if expected.is_floating_point():
            near(actual, expected.float(), 2e-5)
        else:
            assert actual.tolist() == expected.tolist(), name
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())

    seeds, positions = torch.randint(0, 2**62, (9,)), torch.arange(9) * 2**31
    heat = torch.tensor([1, 1, 0.7, 1, 1, 1, 1.5, 0, 0])
    ours = triton.top_token_sample(logits, eligible, threshold, seeds, positions, heat, banned, spared)
    theirs = reference.top_token_sample(logits.float(), eligible, threshold, seeds, positions, heat, banned, spared)
    for name, actual, expected in zip(ours._fields, ours, theirs, strict=True):
        if expected.is_floating_point():
            near(actual, expected, 2e-4)
        else:
            assert actual.tolist() == expected.tolist(), name
    drawn = ours.token[ours.fired]
    assert (drawn != ours.top_id[ours.fired]).all()


def test_top_token_of_strided_and_expanded_rows():
    storage = torch.full((4, 90), torch.nan)
    storage[:, :50] = torch.randn(4, 50)
    eligible, threshold = torch.ones(4, dtype=torch.bool), torch.full((4,), 0.05)
    strided = triton.top_token(storage[:, :50], eligible, threshold)
    dense = triton.top_token(storage[:, :50].contiguous(), eligible, threshold)
    assert all(torch.equal(a, b) for a, b in zip(strided, dense, strict=True))
    one = triton.top_token(storage[:1, :50].expand(4, 50), eligible, threshold)
    assert one.top_id.tolist() == [dense.top_id[0].item()] * 4


def test_a_draw_depends_on_no_other_row():
    logits = torch.randn(5, SLICE + 100)
    eligible, threshold = torch.ones(5, dtype=torch.bool), torch.full((5,), 0.9)
    seeds, positions, heat = torch.arange(5), torch.arange(5), torch.ones(5)
    many = triton.top_token_sample(logits, eligible, threshold, seeds, positions, heat)
    one = triton.top_token_sample(logits[2:3], eligible[2:3], threshold[2:3], seeds[2:3], positions[2:3], heat[2:3])
    assert all(torch.equal(a[2:3], b) for a, b in zip(many, one, strict=True))


def test_many_draws_are_the_references():
    logits = torch.randn(60, 37) * 2
    eligible, threshold = torch.rand(60) > 0.3, torch.full((60,), 0.4)
    seeds, positions, heat = torch.randint(0, 2**62, (60,)), torch.randint(0, 2**40, (60,)), torch.rand(60) * 2
    ours = triton.top_token_sample(logits, eligible, threshold, seeds, positions, heat)
    theirs = reference.top_token_sample(logits, eligible, threshold, seeds, positions, heat)
    assert torch.equal(ours.token, theirs.token)
    assert torch.equal(ours.fired, theirs.fired)
    near(ours.logprob, theirs.logprob, 1e-4)


@jit
def bits_kernel(seeds, positions, out, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0)
    bits = random_bits(tl.load(seeds + row), tl.load(positions + row), 64, BLOCK)
    tl.store(out + row * BLOCK + tl.arange(0, BLOCK), bits.to(tl.int64))


def test_random_bits_are_the_references():
    seeds = torch.tensor([0, 1, 2**63 - 1, 0x0123456789ABCDEF])
    positions = torch.tensor([0, 2**32 - 1, 2**32, 2**62 + 5])
    out = torch.empty(4, 256, dtype=torch.int64)
    bits_kernel[(4,)](seeds, positions, out, BLOCK=256)
    assert torch.equal(out, reference_bits(seeds, positions, 320)[:, 64:])
