"""`top_token_mask` and `top_token_sample`: Confidence-Gated Exploration's gate on the sampler (paper 000, Eq. 3)."""

import torch
from torch import Tensor

from headrace.kernels.dispatch import choose
from headrace.kernels.inputs import Banned, banned_ids
from headrace.kernels.top_token_records import TopTokenMask, TopTokenSample
from headrace.kernels.truncation import truncate

__all__ = ["TopTokenMask", "TopTokenSample", "top_token_mask", "top_token_sample"]


@torch.no_grad()
def top_token_mask(
    logits: Tensor,
    eligible: Tensor,
    threshold: float | Tensor,
    *,
    banned: Banned = None,
    spared: Tensor | None = None,
    implementation: str | None = None,
) -> TopTokenMask:
    """Remove the top token of each row where the policy is nearly certain of it.

    A row fires where it is eligible, p* > threshold (strict, in fp32), its top token is not spared and another finite token
    exists; p* is the softmax of the
    row as given, at temperature 1. What remains is summed against its own maximum, so that nothing is lost as p* → 1.

    Args:
        logits: [B, V], any float dtype and strides (but not expanded). **Changed in place**: −inf at the top token of rows that
            fired and at banned ids.
        eligible: [B] bool.
        threshold: τ, a number or [B].
        banned: ids that cannot be drawn; removed before p* is formed.
        spared: [V] bool, tokens that are never removed (think tags, filtered classes).

    Returns:
        TopTokenMask(fired, top_id, top_prob, raw_lse, masked_lse), statistics fp32 (float64 for float64 logits). A row without
        a finite logit has p* 0, one with NaN has NaN statistics; neither fires.
    """
    _check_rows(logits, spared, eligible=eligible)
    if logits.stride(0) == 0 and len(logits) > 1:
        raise ValueError("logits are expanded (stride 0): their rows share memory and cannot be masked apart")
    ids = _banned(banned, logits)
    if ids is not None:
        logits.index_fill_(1, ids, -torch.inf)
    operations = choose(logits.device, logits.dtype, implementation)
    result = operations.top_token(_rows(logits), eligible, _per_row(threshold, logits, "threshold"), None, spared)
    drop = result.fired[:, None]
    top = result.top_id[:, None]
    logits.scatter_(1, top, logits.gather(1, top).masked_fill_(drop, -torch.inf))
    return result


@torch.no_grad()
def top_token_sample(
    logits: Tensor,
    eligible: Tensor,
    threshold: float | Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    banned: Banned = None,
    spared: Tensor | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    implementation: str | None = None,
) -> TopTokenSample:
    """Mask as `top_token_mask` would, then draw one token from each row; the logits stay as they are.

    The draw is a Gumbel race, argmax of logits / temperature + noise, with noise from 32 random bits keyed by (seed, position,
    token): it depends on neither the batch nor the device. The mask only takes one runner out of the race.

    Args:
        logits, eligible, threshold, banned, spared: as in `top_token_mask`, expanded rows allowed.
        seeds: [B] int64, 63 bits. positions: [B] int64, the index of the token in its response.
        temperature: a number or [B]; 0 is greedy. It acts after the mask.
        top_k, top_p: keep the k most likely tokens, then the smallest set of probability ≥ p, after mask and temperature.

    Returns:
        TopTokenSample(token, fired, top_id, top_prob, logprob, raw_logprob).

    Raises:
        ValueError: on a CPU, a row with NaN or without any finite logit. On a GPU its token is −1.
    """
    _check_rows(logits, spared, eligible=eligible, seeds=seeds, positions=positions)
    for name, values in (("seeds", seeds), ("positions", positions)):
        if values.dtype != torch.int64:
            raise ValueError(f"{name} must be int64, got {values.dtype}")
    heat = _per_row(temperature, logits, "temperature")
    if heat.device.type == "cpu" and not bool((heat >= 0).all()):
        raise ValueError(f"temperature must be at least 0, got {float(heat[~(heat >= 0)][0])}")
    operations = choose(logits.device, logits.dtype, implementation)
    limits = _per_row(threshold, logits, "threshold")
    seeds, positions, ids = seeds.contiguous(), positions.contiguous(), _banned(banned, logits)
    sample = operations.top_token_sample(_rows(logits), eligible, limits, seeds, positions, heat, ids, spared)
    if sample.token.device.type == "cpu" and bool((sample.token < 0).any()):
        row = int((sample.token < 0).nonzero()[0, 0])
        raise ValueError(f"logits[{row}] cannot be sampled from: it holds NaN or no finite value")
    if top_k is None and top_p is None:
        return sample
    return truncate(sample, logits, heat, seeds, positions, ids, top_k, top_p)


def _check_rows(logits: Tensor, spared: Tensor | None, **columns: Tensor) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0 or not logits.is_floating_point():
        raise ValueError(f"logits must be [B, V] floating point with V > 0, got {list(logits.shape)} {logits.dtype}")
    if spared is not None and (spared.shape != logits.shape[1:] or spared.dtype != torch.bool or spared.device != logits.device):
        raise ValueError(
            f"spared must be [{logits.shape[1]}] bool on {logits.device}, got {list(spared.shape)} {spared.dtype} on {spared.device}"
        )
    for name, column in columns.items():
        if column.shape != (len(logits),):
            raise ValueError(f"{name} must have shape [{len(logits)}], got {list(column.shape)}")
        if column.device != logits.device:
            raise ValueError(f"{name} is on {column.device} but logits are on {logits.device}")
    if columns["eligible"].dtype != torch.bool:
        raise ValueError(f"eligible must be bool, got {columns['eligible'].dtype}")


def _rows(logits: Tensor) -> Tensor:
    """Logits with unit column stride, copied only where they have another."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _per_row(value: float | Tensor, logits: Tensor, name: str) -> Tensor:
    """[B] fp32 (float64 for float64 logits)."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if not isinstance(value, Tensor):
        return torch.full((len(logits),), value, dtype=dtype, device=logits.device)
    if value.dim() != 0 and value.shape != (len(logits),):
        raise ValueError(f"{name} must be a number or have shape [{len(logits)}], got {list(value.shape)}")
    return value.to(device=logits.device, dtype=dtype).expand(len(logits)).contiguous()


def _banned(banned: Banned, logits: Tensor) -> Tensor | None:
    return banned_ids(banned, logits.shape[1], logits.device)
