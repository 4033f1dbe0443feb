"""The gated clipped policy loss over tokens, with its metrics in a fixed order of summation."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.policy_spec import Metric, PolicySpec, TokenStreams, empty_metrics
from headrace.kernels.rows import TokenLoss
from headrace.kernels.triton.launch import TOKEN_BLOCK, on_device_of, options
from headrace.kernels.triton.loss_terms import exp_beyond_linear, token_terms

TOKENS = tl.constexpr(int(Metric.TOKENS))
CLIPPED_LOW = tl.constexpr(int(Metric.CLIPPED_LOW))
CLIPPED_HIGH = tl.constexpr(int(Metric.CLIPPED_HIGH))
CLIPPED_DUAL = tl.constexpr(int(Metric.CLIPPED_DUAL))
K1 = tl.constexpr(int(Metric.K1))
K3 = tl.constexpr(int(Metric.K3))
REFERENCE_KL = tl.constexpr(int(Metric.REFERENCE_KL))
RATIO = tl.constexpr(int(Metric.RATIO))
RATIO_SQUARED = tl.constexpr(int(Metric.RATIO_SQUARED))
ENTROPY = tl.constexpr(int(Metric.ENTROPY))
SURPRISAL = tl.constexpr(int(Metric.SURPRISAL))
TIS_CAPPED = tl.constexpr(int(Metric.TIS_CAPPED))
POSITIVES = tl.constexpr(int(Metric.POSITIVES))
GATE_ON_POSITIVES = tl.constexpr(int(Metric.GATE_ON_POSITIVES))
RATIO_MIN = tl.constexpr(int(Metric.RATIO_MIN))
RATIO_MAX = tl.constexpr(int(Metric.RATIO_MAX))

METRICS = len(Metric)
WIDTH = tl.constexpr(METRICS)


def loss_arguments(streams: TokenStreams, spec: PolicySpec) -> dict[str, object]:
    """The arguments of `token_terms` that come from streams and specification."""
    return {
        "old_logprobs": streams.old_logprobs,
        "advantages": streams.advantages,
        "weights": streams.weights,
        "gates": streams.gates,
        "mask": None if streams.mask is None else streams.mask.view(torch.uint8),
        "ref_logprobs": streams.ref_logprobs,
        "proximal_logprobs": streams.proximal_logprobs,
        "clip_low": float(spec.clip_low),
        "clip_high": float(spec.clip_high),
        "dual_clip": None if spec.dual_clip is None else float(spec.dual_clip),
        "tis_cap": None if spec.tis_cap is None else float(spec.tis_cap),
        "kl_coef": float(spec.kl_coef),
        "entropy_coef": float(spec.entropy_coef),
        "surprisal_coef": float(spec.surprisal_coef),
        "CISPO": spec.kind == "cispo",
        "KL_KIND": spec.kl_kind,
    }


def token_loss(
    logprobs: Tensor,
    entropies: Tensor,
    streams: TokenStreams,
    spec: PolicySpec,
    log_ratios: Tensor | None = None,
) -> TokenLoss:
    """Loss and derivatives of N tokens."""
    tokens = len(logprobs)
    if tokens == 0:
        nothing = torch.empty_like(logprobs)
        return TokenLoss(nothing, nothing.clone(), nothing.clone(), empty_metrics(logprobs.device))
    losses, grad_logprobs, grad_entropies = (torch.empty_like(logprobs, memory_format=torch.contiguous_format) for _ in range(3))
    programs = triton.cdiv(tokens, TOKEN_BLOCK)
    partials = torch.empty(programs, METRICS, dtype=torch.float32, device=logprobs.device)
    with on_device_of(logprobs):
        token_loss_kernel[(programs,)](
            logprobs,
            entropies,
            log_ratios,
            losses,
            grad_logprobs,
            grad_entropies,
            partials,
            tokens,
            **loss_arguments(streams, spec),
            BLOCK=TOKEN_BLOCK,
            **options(4),
        )
        if programs == 1:
            return TokenLoss(losses, grad_logprobs, grad_entropies, partials[0])
        metrics = torch.empty(METRICS, dtype=torch.float32, device=logprobs.device)
        metrics_kernel[(1,)](partials, metrics, programs, BLOCK=64, **options(4))
    return TokenLoss(losses, grad_logprobs, grad_entropies, metrics)


@triton.jit(do_not_specialize=["tokens"])
def token_loss_kernel(
    logprobs,
    entropies,
    log_ratios,
    losses,
    grad_logprobs,
    grad_entropies,
    partials,
    tokens,
    old_logprobs,
    advantages,
    weights,
    gates,
    mask,
    ref_logprobs,
    proximal_logprobs,
    clip_low,
    clip_high,
    dual_clip,
    tis_cap,
    kl_coef,
    entropy_coef,
    surprisal_coef,
    CISPO: tl.constexpr,
    KL_KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < tokens
    counted = inside
    if mask is not None:
        counted = inside & (tl.load(mask + index, mask=inside, other=0) != 0)
    logprob = tl.load(logprobs + index, mask=counted, other=0.0)
    entropy = tl.load(entropies + index, mask=counted, other=0.0)
    loss, grad_logprob, grad_entropy, ratio, drift, kl, gate, advantage, below, above, dual, capped = token_terms(
        logprob,
        entropy,
        log_ratios,
        old_logprobs,
        advantages,
        weights,
        gates,
        ref_logprobs,
        proximal_logprobs,
        index,
        counted,
        clip_low,
        clip_high,
        dual_clip,
        tis_cap,
        kl_coef,
        entropy_coef,
        surprisal_coef,
        CISPO,
        KL_KIND,
    )
    tl.store(losses + index, loss, mask=inside)
    tl.store(grad_logprobs + index, grad_logprob, mask=inside)
    tl.store(grad_entropies + index, grad_entropy, mask=inside)

    out = partials + tl.program_id(0) * WIDTH
    positive = advantage > 0
    tl.store(out + TOKENS, share(counted, counted))
    tl.store(out + CLIPPED_LOW, share(below, counted))
    tl.store(out + CLIPPED_HIGH, share(above, counted))
    tl.store(out + CLIPPED_DUAL, share(dual, counted))
    tl.store(out + K1, share(-drift, counted))
    tl.store(out + K3, share(exp_beyond_linear(drift), counted))
    tl.store(out + REFERENCE_KL, share(kl, counted))
    tl.store(out + RATIO, share(ratio, counted))
    tl.store(out + RATIO_SQUARED, share(ratio * ratio, counted))
    tl.store(out + ENTROPY, share(entropy, counted))
    tl.store(out + SURPRISAL, share(-logprob, counted))
    tl.store(out + TIS_CAPPED, share(capped, counted))
    tl.store(out + POSITIVES, share(positive, counted))
    tl.store(out + GATE_ON_POSITIVES, share(gate, counted & positive))
    tl.store(out + RATIO_MIN, tl.min(tl.where(counted, ratio, float("inf")), 0))
    tl.store(out + RATIO_MAX, tl.max(tl.where(counted, ratio, float("-inf")), 0))


@triton.jit
def share(values, counted):
    """Sum over the rows that count."""
    return tl.sum(tl.where(counted, values.to(tl.float32), 0.0), 0)


@triton.jit(do_not_specialize=["programs"])
def metrics_kernel(partials, metrics, programs, BLOCK: tl.constexpr):
    """One metrics vector from those of the programs, always in the same order."""
    column = tl.arange(0, WIDTH)
    sums = tl.zeros([WIDTH], tl.float32)
    lows = tl.full([WIDTH], float("inf"), tl.float32)
    highs = tl.full([WIDTH], float("-inf"), tl.float32)
    for start in range(0, programs, BLOCK):
        program = start + tl.arange(0, BLOCK)
        inside = (program < programs)[:, None]
        values = tl.load(partials + program[:, None] * WIDTH + column[None, :], mask=inside, other=0.0)
        sums += tl.sum(values, 0)
        lows = tl.minimum(lows, tl.min(tl.where(inside, values, float("inf")), 0))
        highs = tl.maximum(highs, tl.max(tl.where(inside, values, float("-inf")), 0))
    result = tl.where(column == RATIO_MIN, lows, tl.where(column == RATIO_MAX, highs, sums))
    tl.store(metrics + column, result)
