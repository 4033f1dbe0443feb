"""What an optimizer step measured: one vector, added up over micro-batches and ranks, then metrics by name."""

import math
import operator
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headrace.kernels import Metric, combine_metrics, empty_metrics, summarise_metrics


def neutral(device: torch.device) -> Tensor:
    """The vector [len(Metric) + 2] of no tokens: the kernel's metrics, loss and entropy sum."""
    return torch.cat([empty_metrics(device), torch.zeros(2, device=device)])


def total(vectors: list[Tensor]) -> Tensor:
    """One vector [len(Metric) + 2] from those of micro-batches or ranks."""
    metrics = combine_metrics([vector[: len(Metric)] for vector in vectors])
    return torch.cat([metrics, torch.stack([vector[len(Metric) :] for vector in vectors]).sum(0)])


_NAMES = {
    "clip_low": "ppo/clip_low",
    "clip_high": "ppo/clip_high",
    "clip_dual": "ppo/clip_dual",
    "k1": "ppo/kl_k1",
    "k3": "ppo/kl_k3",
    "ratio": "ppo/ratio_mean",
    "ratio_min": "ppo/ratio_min",
    "ratio_max": "ppo/ratio_max",
    "effective_sample_share": "ppo/effective_sample_share",
    "surprisal": "policy/surprisal",
}
"""Of the kernel's summary, what is reported and as what: means over unmasked response tokens."""


def named(values: Tensor, response_tokens: int) -> dict[str, float]:
    """Metrics by name from the reduced vector [len(Metric) + 2] on the host; the entropy is over all response tokens."""
    summary = summarise_metrics(values[: len(Metric)])
    loss, entropy = values[len(Metric) :].tolist()
    metrics = {"loss": loss, "ppo/tokens": summary["tokens"]}
    if response_tokens:
        metrics["policy/entropy"] = entropy / response_tokens
    if summary["tokens"]:
        metrics["ppo/clip_share"] = summary["clip_low"] + summary["clip_high"] + summary["clip_dual"]
    return metrics | {_NAMES[name]: value for name, value in summary.items() if name in _NAMES}


def pooled(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a batch from those of its optimizer steps: times and counts add, extremes stay, means over tokens are pooled by
    their tokens, and the rest (loss, norm, rate) is averaged."""
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for step in steps for name in step):
        having = [step for step in steps if name in step]
        values = [step[name] for step in having]
        if name.startswith(("time/", "learner/")) or name == "ppo/tokens":
            merged[name] = math.fsum(values)
        elif name in ("ppo/ratio_min", "ppo/ratio_max"):
            merged[name] = (min if name == "ppo/ratio_min" else max)(values)
        else:
            everywhere = name in ("policy/entropy", "policy/reference_kl")
            counted = "learner/response_tokens" if everywhere else "ppo/tokens" if "/" in name else None
            weights = [step[counted] if counted else 1.0 for step in having]
            weights = weights if any(weights) else [1.0] * len(having)
            merged[name] = math.fsum(map(operator.mul, values, weights)) / math.fsum(weights)
    return merged
