"""What a policy loss is made of: its specification, its per-token inputs and its metrics."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

KINDS = ("ppo", "gspo", "cispo")
KL_KINDS = ("k1", "k2", "k3")

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ± this many nats; beyond it the term is constant and has no gradient."""

K3_LIMIT = 10.0
"""The k3 estimate of the reference KL is clamped to this, again without gradient beyond."""


@dataclass(frozen=True)
class PolicySpec:
    """The loss of one token, `w (tis · surrogate + kl_coef · kl − entropy_coef · H − surprisal_coef · log π)`."""

    kind: str = "ppo"
    """`ppo`: −min(r A, clip(r) A) per token. `gspo`: the same with one ratio for the sequence, exp(mean log-ratio).
    `cispo`: −clip(r) A log π with the clipped ratio held constant."""

    clip_low: float = 0.2
    """Ratios below 1 − clip_low are clipped."""

    clip_high: float = 0.3
    """Ratios above 1 + clip_high are clipped."""

    dual_clip: float | None = None
    """For negative advantages the objective never falls below dual_clip · A (None: no such floor)."""

    tis_cap: float | None = None
    """Truncation of the importance weight exp(proximal − old) (None: not truncated). Needs `proximal_logprobs`."""

    kl_coef: float = 0.0
    """Weight of the KL to the reference policy. Needs `ref_logprobs`."""

    kl_kind: str = "k3"
    """Estimator of that KL from one sample, d = ref − log π: `k1` −d, `k2` d²/2, `k3` exp(d) − d − 1."""

    entropy_coef: float = 0.0
    """Above zero rewards the entropy of the full distribution."""

    surprisal_coef: float = 0.0
    """Above zero penalises −log π of the sampled token (VPPO's term, which lowers entropy)."""

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"PolicySpec.kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.kl_kind not in KL_KINDS:
            raise ValueError(f"PolicySpec.kl_kind must be one of {', '.join(KL_KINDS)}, got {self.kl_kind!r}")
        if not 0.0 <= self.clip_low <= 1.0:
            raise ValueError(f"PolicySpec.clip_low must lie in [0, 1], got {self.clip_low}")
        if not self.clip_high >= 0.0:
            raise ValueError(f"PolicySpec.clip_high must be at least 0, got {self.clip_high}")
        if self.dual_clip is not None and not self.dual_clip > 1.0:
            raise ValueError(f"PolicySpec.dual_clip must be above 1 or None, got {self.dual_clip}")
        if self.dual_clip is not None and self.kind == "cispo":
            raise ValueError("PolicySpec.dual_clip has no meaning for cispo, whose ratio is already bounded; set it to None")
        if self.tis_cap is not None and not self.tis_cap > 0.0:
            raise ValueError(f"PolicySpec.tis_cap must be above 0 or None, got {self.tis_cap}")
        for name in ("kl_coef", "entropy_coef", "surprisal_coef"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"PolicySpec.{name} must be finite, got {getattr(self, name)}")

    @property
    def has_regulariser(self) -> bool:
        """Whether a token with advantage zero can still have a gradient."""
        return bool(self.kl_coef or self.entropy_coef or self.surprisal_coef)

    def check_streams(self, streams: "TokenStreams", has_sequences: bool) -> None:
        """Raise where an input that this loss needs was not given."""
        if self.kind == "gspo" and not has_sequences:
            raise ValueError("a gspo loss needs cu_seqlens: its ratio belongs to a whole sequence")
        if self.tis_cap is not None and streams.proximal_logprobs is None:
            raise ValueError("tis_cap needs proximal_logprobs: the importance weight is exp(proximal - old)")
        if self.kl_coef and streams.ref_logprobs is None:
            raise ValueError("kl_coef needs ref_logprobs: the log-probs of the reference policy")


class TokenStreams(NamedTuple):
    """The per-token inputs of a policy loss; each `[T]` in the dtype of the statistics (mask: bool), or None."""

    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    gates: Tensor | None = None
    mask: Tensor | None = None
    ref_logprobs: Tensor | None = None
    proximal_logprobs: Tensor | None = None

    def prepare(self, tokens: int, device: torch.device, dtype: torch.dtype) -> "TokenStreams":
        """Checked for shape and device, detached, contiguous, in one dtype."""
        prepared: dict[str, Any] = {}
        for name, stream in self._asdict().items():
            if stream is None:
                prepared[name] = None
                continue
            if stream.shape != (tokens,):
                raise ValueError(f"{name} must have shape [{tokens}], got {list(stream.shape)}")
            if stream.device != device:
                raise ValueError(f"{name} is on {stream.device}, expected {device}")
            wanted = torch.bool if name == "mask" else dtype
            prepared[name] = stream.detach().to(wanted).contiguous()
        return TokenStreams(**prepared)

    def select(self, rows: Tensor | slice | None) -> "TokenStreams":
        """The streams of some rows, in that order."""
        if rows is None:
            return self
        chosen: Iterator[Any] = (stream if stream is None else stream[rows] for stream in self)
        return TokenStreams(*chosen)

    def may_have_gradient(self, spec: PolicySpec) -> Tensor:
        """bool [T]: False where the coefficient is zero whatever the policy says (masked, weight 0, advantage or gate 0)."""
        alive = self.weights != 0
        if not spec.has_regulariser:
            alive &= self.advantages != 0
            if self.gates is not None:
                alive &= (self.gates != 0) | ~(self.advantages > 0)
        return alive if self.mask is None else alive & self.mask


class Metric(IntEnum):
    """Offsets into the fp32 metrics vector of a policy loss. All cover the rows that count: not ignored, `mask` true.

    Entries before `RATIO_MIN` are sums over tokens, so that ranks and micro-batches add them; the last two are extremes.
    """

    TOKENS = 0
    CLIPPED_LOW = 1
    """Tokens whose lower clip is active: A < 0 and r < 1 − clip_low (cispo: r below, whatever the sign)."""
    CLIPPED_HIGH = 2
    """A > 0 and r > 1 + clip_high (cispo: r above, whatever the sign)."""
    CLIPPED_DUAL = 3
    """A < 0 and r > dual_clip."""
    K1 = 4
    """Σ old − log π, an estimate of KL(behaviour ‖ policy) in nats."""
    K3 = 5
    """Σ exp(d) − d − 1 with d = log π − old: the same KL, never negative."""
    REFERENCE_KL = 6
    """Σ of the estimator that `kl_kind` names, against the reference."""
    RATIO = 7
    RATIO_SQUARED = 8
    """With RATIO gives the effective sample size (Σr)² / Σr²."""
    ENTROPY = 9
    SURPRISAL = 10
    """Σ −log π."""
    TIS_CAPPED = 11
    POSITIVES = 12
    """Tokens with A > 0."""
    GATE_ON_POSITIVES = 13
    """Σ of the gate over them."""
    RATIO_MIN = 14
    """+inf if no row counts."""
    RATIO_MAX = 15
    """−inf if no row counts."""


def empty_metrics(device: torch.device | str = "cpu") -> Tensor:
    """The metrics of no tokens: the neutral element of `combine_metrics`."""
    metrics = torch.zeros(len(Metric), dtype=torch.float32, device=device)
    metrics[Metric.RATIO_MIN], metrics[Metric.RATIO_MAX] = math.inf, -math.inf
    return metrics


def combine_metrics(vectors: list[Tensor]) -> Tensor:
    """One metrics vector from several (micro-batches or ranks), without a host sync."""
    stacked = torch.stack(vectors)
    combined = stacked.sum(0)
    combined[Metric.RATIO_MIN] = stacked[:, Metric.RATIO_MIN].amin()
    combined[Metric.RATIO_MAX] = stacked[:, Metric.RATIO_MAX].amax()
    return combined


def summarise_metrics(metrics: Tensor) -> dict[str, float]:
    """Means and shares from a reduced vector; the one place that reads it on the host. Only `tokens` if none counted."""
    values = metrics.tolist()
    tokens = values[Metric.TOKENS]
    if tokens == 0:
        return {"tokens": 0.0}
    means = {
        "clip_low": Metric.CLIPPED_LOW,
        "clip_high": Metric.CLIPPED_HIGH,
        "clip_dual": Metric.CLIPPED_DUAL,
        "k1": Metric.K1,
        "k3": Metric.K3,
        "reference_kl": Metric.REFERENCE_KL,
        "ratio": Metric.RATIO,
        "entropy": Metric.ENTROPY,
        "surprisal": Metric.SURPRISAL,
        "tis_capped": Metric.TIS_CAPPED,
    }
    summary = {"tokens": tokens} | {name: values[offset] / tokens for name, offset in means.items()}
    summary["ratio_min"], summary["ratio_max"] = values[Metric.RATIO_MIN], values[Metric.RATIO_MAX]
    if values[Metric.RATIO_SQUARED] > 0:
        summary["effective_sample_share"] = values[Metric.RATIO] ** 2 / (values[Metric.RATIO_SQUARED] * tokens)
    if values[Metric.POSITIVES] > 0:
        summary["gate_on_positives"] = values[Metric.GATE_ON_POSITIVES] / values[Metric.POSITIVES]
    return summary
