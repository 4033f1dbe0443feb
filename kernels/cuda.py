"""The row operations on Hopper GPUs: those of Triton, with CUDA C++ where a row on chip or one launch saves a pass.

Thread-block clusters hold a whole row of logits in the shared memory of several multiprocessors, which Triton cannot express:
`loss_gradient` and `pair_scores` read every row once instead of twice, and the top-token operations decide in the launch that
reads. Other GPUs, and rows that do not fit, are served by Triton.
"""

from functools import lru_cache

import torch
from torch import Tensor

from headrace.kernels import _cuda, triton
from headrace.kernels.policy_spec import PolicySpec, TokenStreams
from headrace.kernels.rows import PAIR_STATE_WIDTH, STATE_WIDTH
from headrace.kernels.top_token_records import TopTokenMask, TopTokenSample
from headrace.kernels.triton import gradient, pair_divergences, pair_statistics, statistics, token_loss
from headrace.kernels.triton.head_rows import overlay
from headrace.kernels.triton.launch import banned_flags, on_device_of

__all__ = [
    "gradient",
    "loss_gradient",
    "pair_divergences",
    "pair_scores",
    "pair_statistics",
    "statistics",
    "token_loss",
    "top_token",
    "top_token_sample",
]

ELEMENTS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}

BUILT_FOR = (9, 0)
"""Compute capability of the machine code in the extension; it runs on no other."""

LARGEST = 2**31 - 64
"""Columns are counted in 32 bits."""


def loss_gradient(
    logits: Tensor,
    targets: Tensor,
    inv_temperature: Tensor,
    streams: TokenStreams,
    spec: PolicySpec,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Statistics [N, 4] and d loss / d logits [N, C] of rows that hold the whole vocabulary; the logits are consumed."""
    if not fits(logits):
        return triton.loss_gradient(logits, targets, inv_temperature, streams, spec, dtype=dtype)
    rows, columns = logits.shape
    state = torch.empty(rows, STATE_WIDTH, dtype=torch.float32, device=logits.device)
    out = overlay(logits, rows, dtype)
    mask = None if streams.mask is None else streams.mask.view(torch.uint8)
    with on_device_of(logits):
        _cuda.loss_gradient(
            logits=logits.data_ptr(),
            stride=logits.stride(0),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            out_element=ELEMENTS[out.dtype],
            rows=rows,
            columns=columns,
            targets=targets.data_ptr(),
            inv_temperature=inv_temperature.data_ptr(),
            state=state.data_ptr(),
            inputs=_cuda.TokenInputs(**{name: address(mask if name == "mask" else stream) for name, stream in streams._asdict().items()}),
            spec=_cuda.LossSpec(
                cispo=spec.kind == "cispo",
                kl_kind=spec.kl_kind,
                clip_low=spec.clip_low,
                clip_high=spec.clip_high,
                dual_clip=spec.dual_clip,
                tis_cap=spec.tis_cap,
                kl_coef=spec.kl_coef,
                entropy_coef=spec.entropy_coef,
                surprisal_coef=spec.surprisal_coef,
            ),
            stream=stream_of(logits),
        )
    return state, out


def pair_scores(logits: Tensor, logits_cf: Tensor, targets: Tensor, inv_temperature: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Complete pair statistics [N, 10] and (js [N], tv [N]) of rows that hold the whole vocabulary, from one read."""
    if not (starts_aligned(logits) and starts_aligned(logits_cf) and _cuda.pair_cluster(logits.shape[1]) > 0):
        state = pair_statistics(logits, logits_cf, targets, inv_temperature)
        return state, pair_divergences(logits, logits_cf, inv_temperature, state)
    rows, columns = logits.shape
    state = torch.empty(rows, PAIR_STATE_WIDTH, dtype=torch.float32, device=logits.device)
    js, tv = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    with on_device_of(logits):
        _cuda.pair_scores(
            logits=logits.data_ptr(),
            stride=logits.stride(0),
            logits_cf=logits_cf.data_ptr(),
            stride_cf=logits_cf.stride(0),
            rows=rows,
            columns=columns,
            targets=targets.data_ptr(),
            inv_temperature=inv_temperature.data_ptr(),
            state=state.data_ptr(),
            js=js.data_ptr(),
            tv=tv.data_ptr(),
            stream=stream_of(logits),
        )
    return state, (js, tv)


def top_token(
    logits: Tensor,
    eligible: Tensor,
    threshold: Tensor,
    banned: Tensor | None = None,
    spared: Tensor | None = None,
) -> TopTokenMask:
    """Which rows lose their top token."""
    if not runs_on(logits.device) or logits.dtype not in ELEMENTS:
        return triton.top_token(logits, eligible, threshold, banned, spared)
    return TopTokenMask(*decide(logits, eligible, threshold, banned, spared)[:5])


def top_token_sample(
    logits: Tensor,
    eligible: Tensor,
    threshold: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    banned: Tensor | None = None,
    spared: Tensor | None = None,
) -> TopTokenSample:
    """A draw from each row, after the mask."""
    if not runs_on(logits.device) or logits.dtype not in ELEMENTS:
        return triton.top_token_sample(logits, eligible, threshold, seeds, positions, temperature, banned, spared)
    fired, top_id, top_prob, raw, masked, token = decide(
        logits, eligible, threshold, banned, spared, seeds.contiguous(), positions.contiguous(), temperature.contiguous()
    )
    return TopTokenSample(token, fired, top_id, top_prob, masked, raw)


def decide(
    logits: Tensor,
    eligible: Tensor,
    threshold: Tensor,
    banned: Tensor | None,
    spared: Tensor | None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    temperature: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Fired, top id, p*, two log-values (of the row and what it leaves, or of the drawn token), and the token."""
    rows, columns = logits.shape
    if columns > LARGEST:
        raise ValueError(f"logits have {columns} columns; the kernel counts them in 32 bits")
    fired = torch.empty(rows, dtype=torch.bool, device=logits.device)
    top_id, token = (torch.empty(rows, dtype=torch.int64, device=logits.device) for _ in range(2))
    top_prob, raw, masked = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3))
    eligible, threshold = eligible.contiguous(), threshold.contiguous()
    spared = None if spared is None else spared.contiguous()
    flags = banned_flags(banned, columns)
    with on_device_of(logits):
        _cuda.top_token(
            logits=logits.data_ptr(),
            stride=logits.stride(0),
            in_element=ELEMENTS[logits.dtype],
            rows=rows,
            columns=columns,
            eligible=eligible.data_ptr(),
            threshold=threshold.data_ptr(),
            banned=address(flags),
            spared=address(spared),
            fired=fired.data_ptr(),
            top_id=top_id.data_ptr(),
            top_prob=top_prob.data_ptr(),
            raw=raw.data_ptr(),
            masked=masked.data_ptr(),
            seeds=address(seeds),
            positions=address(positions),
            temperature=address(temperature),
            token=0 if seeds is None else token.data_ptr(),
            stream=stream_of(logits),
        )
    return fired, top_id, top_prob, raw, masked, token


def fits(logits: Tensor) -> bool:
    """Whether `loss_gradient` can hold these rows on chip."""
    return starts_aligned(logits) and _cuda.loss_gradient_cluster(logits.shape[1]) > 0


def starts_aligned(logits: Tensor) -> bool:
    """Whether the cluster kernels can copy these rows: fp32 on a device they run on, every row at a multiple of 16 bytes."""
    aligned = logits.shape[1] % 4 == 0 and logits.stride(0) % 4 == 0 and logits.data_ptr() % 16 == 0
    return aligned and logits.dtype == torch.float32 and runs_on(logits.device)


@lru_cache(maxsize=16)
def runs_on(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == BUILT_FOR


def stream_of(tensor: Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
