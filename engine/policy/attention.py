"""Attention over packed rows: rows of different length lie end to end in one flat sequence, without padding.

Registered with transformers under the name ``headrace``. transformers builds no mask for an implementation it does not know, so no
``[N, N]`` mask ever exists; a 4-D mask that the caller passes (the sampler's left-padded batches) arrives here unchanged.

On CUDA in half precision the rows go to torch's variable-length flash attention. Elsewhere they are copied into right-padded buckets of
rows of similar length and given to scaled dot-product attention with ``is_causal``: no mask, no query sees a pad, pads are dropped.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import AttentionInterface

from headrace.policy.sharing import Sharing

NAME = "headrace"
# A bucket takes rows down to this share of its longest row. Attention is quadratic in length, so 0.75 wastes at most 1 - 0.75² = 44 % of
# one bucket's score matrix and a few per cent in practice, while lengths from 1 to 32k still make fewer than 40 buckets.
BUCKET_SPREAD = 0.75


@dataclass(frozen=True)
class Bucket:
    """Rows of similar length, padded on the right to the longest."""

    rows: int
    length: int
    source: Tensor  # [rows x length] int64, position in the packed sequence; a pad repeats its row's first token
    pads: Tensor | None  # [n] int64, slots that are pads; None if there are none


@dataclass(frozen=True, slots=True)
class Buckets:
    """All rows of a packed sequence. A type of its own and no tuple, whose length a compiled layer would be specialised to."""

    parts: tuple[Bucket, ...]
    slots: Tensor  # [N] int64, where each packed token is among the slots of all buckets

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self.parts)


def row_buckets(cu_seqlens: Tensor) -> Buckets:
    """Group packed rows into buckets, longest first; empty rows belong to none.

    Args:
        cu_seqlens: [B + 1] row boundaries.
    """
    bounds = cu_seqlens.to("cpu", torch.int64)
    starts, lengths = bounds[:-1], bounds.diff()
    order = torch.argsort(lengths, descending=True, stable=True)
    order = order[lengths[order] > 0]
    buckets: list[Bucket] = []
    slots, before = torch.zeros(int(bounds[-1]), dtype=torch.int64), 0
    device = cu_seqlens.device
    while len(order):
        longest = int(lengths[order[0]])
        taken = int((lengths[order] >= BUCKET_SPREAD * longest).sum())
        rows, order = order[:taken], order[taken:]
        offsets = torch.arange(longest)
        real = (offsets < lengths[rows, None]).flatten()  # [rows x length]
        source = (starts[rows, None] + offsets).flatten().where(real, starts[rows].repeat_interleave(longest))
        slots[source[real]] = before + real.nonzero().squeeze(1)
        pads = None if bool(real.all()) else (~real).nonzero().squeeze(1).to(device)
        buckets.append(Bucket(taken, longest, source.to(device), pads))
        before += len(source)
    return Buckets(tuple(buckets), slots.to(device))


def is_fused(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether rows go to the flash kernel; elsewhere they go through buckets."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


def _scatter(packed: Tensor, bucket: Bucket) -> Tensor:
    """[N, H, d] -> [rows, length, H, d], pads zero."""
    padded = packed.index_select(0, bucket.source)
    if bucket.pads is not None:
        padded.index_fill_(0, bucket.pads, 0)
    return padded.unflatten(0, (bucket.rows, bucket.length))


def _gather(padded: Sequence[Tensor], buckets: Buckets) -> Tensor:
    """Inverse of scattering into every bucket: [N, H, d]; pads are never read."""
    flat = [rows.flatten(0, 1) for rows in padded]
    return (flat[0] if len(flat) == 1 else torch.cat(flat)).index_select(0, buckets.slots)


class _Pad(torch.autograd.Function):
    """Packed to buckets. The indices are a bijection, so the backward pass copies instead of adding up (and is deterministic)."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, buckets: Buckets) -> tuple[Tensor, ...]:
        ctx.buckets = buckets
        return tuple(_scatter(packed, bucket) for bucket in buckets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gather(grads, ctx.buckets), None


class _Unpad(torch.autograd.Function):
    """Buckets to packed."""

    @staticmethod
    def forward(ctx: Any, buckets: Buckets, *padded: Tensor) -> Tensor:
        ctx.buckets = buckets
        return _gather(padded, buckets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(_scatter(grad, bucket) for bucket in ctx.buckets)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    *,
    scale: float,
    buckets: Buckets | None = None,
) -> Tensor:
    """Causal attention inside each packed row.

    Args:
        q: [N, H, d] queries.
        k, v: [N, Hkv, d] keys and values; H is a multiple of Hkv.
        cu_seqlens: [B + 1] int32 row boundaries, first 0, last N.
        max_length: longest row.
        scale: factor on the scores.
        buckets: ``row_buckets(cu_seqlens)`` if the caller has it already.

    Returns:
        [N, H, d]
    """
    grouped = q.shape[1] != k.shape[1]
    if is_fused(q.device, q.dtype):
        from torch.nn.attention.varlen import varlen_attn

        output: Any = varlen_attn(
            q, k, v, cu_seqlens, cu_seqlens, max_length, max_length, scale=scale, window_size=(-1, 0), enable_gqa=grouped
        )
        return output
    return _bucketed(q, k, v, row_buckets(cu_seqlens) if buckets is None else buckets, scale)


def _bucketed(q: Tensor, k: Tensor, v: Tensor, buckets: Buckets, scale: float) -> Tensor:
    """Scaled dot-product attention, a call for every bucket."""
    outputs = []
    for rows in zip(*(_Pad.apply(x, buckets) for x in (q, k, v)), strict=True):
        qb, kb, vb = (x.transpose(1, 2) for x in rows)  # [rows, heads, length, d]
        output = F.scaled_dot_product_attention(qb, kb, vb, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        outputs.append(output.transpose(1, 2))
    return _Unpad.apply(buckets, *outputs)


@torch.compiler.disable  # its shapes follow the lengths of the rows; the rest of a compiled layer sees one flat sequence
def _packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: int, scale: float, buckets: Buckets | None, sharing: Sharing
) -> Tensor:
    """``varlen_attention`` of distinct tokens: whole rows attend, one copy of each output is kept. [U, H, d]"""
    q, k, v = (sharing.spread(x) for x in (q, k, v))
    return sharing.pick(varlen_attention(q, k, v, cu_seqlens, max_length, scale=scale, buckets=buckets))


def _refuse_unsupported(module: nn.Module, keys: int, options: dict[str, Any]) -> None:
    """Attention variants that would silently be computed as plain attention."""
    name = type(module).__name__
    window = options.get("sliding_window")
    if window is not None and keys > window:
        raise ValueError(f"{name}: rows of {keys} tokens exceed the model's sliding window of {window}, which is not supported")
    for option in ("softcap", "s_aux", "position_bias"):
        if options.get(option) is not None:
            raise ValueError(f"{name}: attention with {option} is not supported")


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls in every layer.

    Args:
        query, key, value: [B, H, L, d]; B is 1 for packed rows.
        attention_mask: 4-D mask of the caller (bool, True attends; or additive), or None. Ignored with ``cu_seqlens``.
        options: ``cu_seqlens``, ``max_length`` and ``buckets`` select the packed path; with ``sharing`` L counts distinct tokens.

    Returns:
        [B, L, H, d] and no attention weights.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    cu_seqlens = options.get("cu_seqlens")
    if cu_seqlens is not None:
        max_length = options["max_length"]
        _refuse_unsupported(module, max_length, options)
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        packed = _packed(q, k, v, cu_seqlens, max_length, scale, options.get("buckets"), options.get("sharing") or Sharing())
        return packed.unsqueeze(0), None
    _refuse_unsupported(module, key.shape[2], options)
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.is_cuda and attention_mask is not None:  # the fused CUDA kernels take a mask or grouped heads, not both
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        grouped = False
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    causal = causal and attention_mask is None and query.shape[2] > 1
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attention_forward)
