"""The three matrix products of a language-model head over one chunk, each with fp32 accumulation and fp32 result.

They belong to the vendor's libraries. What is here is only how each device is asked for an fp32 result from narrow inputs:
CUDA has `out_dtype`; a CPU has not, so weights are widened a vocabulary tile at a time.
"""

import torch
from torch import Tensor

WIDEN_ROWS = 4096
"""Vocabulary rows that a CPU widens to fp32 at a time."""


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def logits_of(hidden: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """hidden [N, D] · weight [V, D]ᵀ into `out` [N, V]."""
    if hidden.dtype == out.dtype:
        return torch.mm(hidden, weight.t(), out=out)
    if hidden.device.type == "cuda":
        return torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
    wide = hidden.to(out.dtype)
    for start in range(0, len(weight), WIDEN_ROWS):
        tile = weight[start : start + WIDEN_ROWS].to(out.dtype)
        out[:, start : start + len(tile)] = wide @ tile.t()
    return out


def hidden_gradient(grad_logits: Tensor, weight: Tensor) -> Tensor:
    """grad_logits [N, V] · weight [V, D] → [N, D]."""
    if grad_logits.dtype == weight.dtype:
        return torch.mm(grad_logits, weight)
    total = torch.zeros(len(grad_logits), weight.shape[1], dtype=grad_logits.dtype, device=weight.device)
    for start in range(0, len(weight), WIDEN_ROWS):
        tile = weight[start : start + WIDEN_ROWS].to(grad_logits.dtype)
        total.addmm_(grad_logits[:, start : start + len(tile)], tile)
    return total


def add_weight_gradient(total: Tensor | None, grad_logits: Tensor, hidden: Tensor) -> Tensor:
    """total [V, D] fp32 + grad_logits [N, V]ᵀ · hidden [N, D], in place once there is a total."""
    dtype = statistics_dtype(hidden.dtype)
    if hidden.device.type == "cuda" and hidden.dtype != dtype:
        if total is None:
            return torch.mm(grad_logits.t(), hidden, out_dtype=dtype)
        return torch.addmm(total, grad_logits.t(), hidden, out_dtype=dtype, out=total)
    if total is None:
        return torch.mm(grad_logits.t(), hidden.to(dtype))
    return total.addmm_(grad_logits.t(), hidden.to(dtype))


def gradient_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype in which the gradient of the logits enters the backward products."""
    return hidden.dtype if hidden.device.type == "cuda" else statistics_dtype(hidden.dtype)
