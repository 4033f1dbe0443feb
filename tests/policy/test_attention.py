"""Packed attention equals attention row by row, forward and backward, whatever the lengths and the order."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from headrace.policy.attention import attention_forward, row_buckets, varlen_attention

LENGTHS = (
    pytest.param((5, 5, 5), id="equal"),
    pytest.param((1, 40, 3, 17, 2), id="mixed"),
    pytest.param((64,), id="single"),
    pytest.param((3, 0, 4), id="empty row"),
)


def make(lengths, heads=4, kv_heads=2, width=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    q, k, v = (torch.randn(total, h, width, generator=generator, dtype=torch.float64) for h in (heads, kv_heads, kv_heads))
    cu_seqlens = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)
    return [x.requires_grad_() for x in (q, k, v)], cu_seqlens


def plain(q, k, v, cu_seqlens, scale):
    """Softmax attention written out, one row at a time."""
    outputs = []
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        groups = q.shape[1] // k.shape[1]
        qr, kr, vr = q[start:end], k[start:end].repeat_interleave(groups, 1), v[start:end].repeat_interleave(groups, 1)
        scores = torch.einsum("ihd,jhd->hij", qr, kr) * scale
        scores = scores.masked_fill(torch.ones(end - start, end - start).triu(1).bool(), float("-inf"))
        outputs.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), vr))
    return torch.cat(outputs)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_packed_equals_row_by_row(lengths, kv_heads):
    inputs, cu_seqlens = make(lengths, kv_heads=kv_heads)
    weight = torch.randn(sum(lengths), 4, 8, dtype=torch.float64)
    got = varlen_attention(*inputs, cu_seqlens, max(lengths), scale=0.3)
    want = plain(*inputs, cu_seqlens, 0.3)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    for a, b in zip(torch.autograd.grad((got * weight).sum(), inputs), torch.autograd.grad((want * weight).sum(), inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_poisoned_row_does_not_reach_its_neighbours():
    """0 x NaN is NaN: neighbours stay finite only if rows never share an accumulation, not even with weight zero."""
    inputs, cu_seqlens = make((6, 7, 5))
    with torch.no_grad():
        for x in inputs:
            x[6:13] = float("nan")
    output = varlen_attention(*inputs, cu_seqlens, 7, scale=0.3)
    assert output[:6].isfinite().all()
    assert output[13:].isfinite().all()
    assert output[6:13].isnan().all()
    weight = torch.ones_like(output)
    weight[6:13] = 0
    grads = torch.autograd.grad(output, inputs, weight)
    assert all(grad[:6].isfinite().all() and grad[13:].isfinite().all() for grad in grads)


def test_pads_are_zero_and_dropped(monkeypatch):
    """Whatever attention writes into pads, even NaN, is not gathered and its gradient is not scattered back."""
    inputs, cu_seqlens = make((6, 5, 6))
    real = F.scaled_dot_product_attention

    def poisoned(q, k, v, **options):
        assert all((x.transpose(1, 2)[2, 5:] == 0).all() for x in (q, k, v))  # the shortest row is last
        output = real(q, k, v, **options).clone()
        output.transpose(1, 2)[2, 5:] = float("nan")
        return output

    monkeypatch.setattr(F, "scaled_dot_product_attention", poisoned)
    output = varlen_attention(*inputs, cu_seqlens, 6, scale=0.3)
    assert output.isfinite().all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(output.sum(), inputs))


def test_one_long_row_does_not_blow_up_the_batch():
    """64 rows of 16 tokens beside one of 2,048: padding everything to the longest would hold 133,120 slots."""
    lengths = torch.tensor([16] * 64 + [2048])
    buckets = row_buckets(torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))
    assert sum(bucket.rows * bucket.length for bucket in buckets) == 16 * 64 + 2048


def test_buckets_cover_every_token_once():
    lengths = torch.randint(0, 300, (50,), generator=torch.Generator().manual_seed(1))
    buckets = row_buckets(torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))
    pads = [torch.zeros(bucket.rows * bucket.length, dtype=torch.bool) for bucket in buckets]
    for padded, bucket in zip(pads, buckets, strict=True):
        padded[[] if bucket.pads is None else bucket.pads] = True
    source, real = torch.cat([bucket.source for bucket in buckets]), ~torch.cat(pads)
    assert source[real].sort().values.tolist() == list(range(int(lengths.sum())))
    assert source[buckets.slots].tolist() == list(range(int(lengths.sum())))
    assert real[buckets.slots].all()


class Layer(torch.nn.Module):
    is_causal = True


def test_without_rows_the_callers_mask_decides():
    """Left-padded batch with grouped heads: pads are masked by the caller, one new query attends to the whole cache."""
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    mask = torch.ones(2, 1, 3, 5, dtype=torch.bool).tril(2)
    mask[0, :, :, :2] = False
    output, _ = attention_forward(Layer(), q, k, v, mask, scaling=0.5)
    scores = (q @ k.repeat_interleave(2, 1).transpose(2, 3) * 0.5).masked_fill(~mask, float("-inf"))
    torch.testing.assert_close(output, (scores.softmax(-1) @ v.repeat_interleave(2, 1)).transpose(1, 2))
    last, _ = attention_forward(Layer(), q[:, :, -1:], k, v, None, scaling=0.5)
    scores = q[:, :, -1:] @ k.repeat_interleave(2, 1).transpose(2, 3) * 0.5
    torch.testing.assert_close(last, (scores.softmax(-1) @ v.repeat_interleave(2, 1)).transpose(1, 2))


@pytest.mark.parametrize("options", [{"sliding_window": 4}, {"softcap": 30.0}, {"s_aux": torch.zeros(4)}])
def test_variants_it_would_compute_wrongly_are_refused(options):
    q = torch.randn(1, 4, 5, 8)
    with pytest.raises(ValueError, match="not supported"):
        attention_forward(Layer(), q, q, q, None, cu_seqlens=torch.tensor([0, 5]), max_length=5, **options)
    with pytest.raises(ValueError, match="not supported"):
        attention_forward(Layer(), q, q, q, None, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_equals_cpu(dtype):
    """The flash kernel (half precision) and the buckets (fp32) on a GPU against float64 on the CPU, forward and backward."""
    inputs, cu_seqlens = make((1, 40, 3, 17, 200), width=32)
    weight = torch.randn(261, 4, 32, dtype=torch.float64)
    want = plain(*inputs, cu_seqlens, 0.3)
    want_grads = torch.autograd.grad((want * weight).sum(), inputs)
    on_gpu = [x.detach().to("cuda", dtype).requires_grad_() for x in inputs]
    got = varlen_attention(*on_gpu, cu_seqlens.cuda(), 200, scale=0.3)
    got_grads = torch.autograd.grad((got.double() * weight.cuda()).sum(), on_gpu)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for a, b in zip((got, *got_grads), (want, *want_grads), strict=True):
        assert (a.cpu().double() - b).abs().max() <= tolerance * b.abs().max()
