"""How the top-token mask reports from inside a vLLM server: two vocabulary rows that no token uses.

vLLM returns, for each drawn token, the log-probs of the ids a request names, after mask and temperature. The processor writes
into the logits of two spare rows such values that their returned log-probs *are* the message:

* flag row: a base that says whether the position is outside the reasoning span, inside, or masked, plus log(1 - p*);
* top-id row: minus (256 + id of the most likely token), an integer that survives the rounding.

Both rows keep a probability below e^-60, so they are never drawn and cost the others nothing. All values are fp32 log-probs: log(1 - p*) is
exact to 6e-5 nat at masked positions, elsewhere as exact as p* in fp32.

This module never imports vLLM: the trainer's process has it too.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from headrace.encoding import Encoder
from headrace.kernels import TopTokenMask
from headrace.records import Array, SampleRequest
from headrace.sampling.top_token import spared_tokens

PROCESSOR = "headrace.sampling.vllm.processor:TopTokenProcessor"
"""Class path for ``--logits-processors``. Never as an entry point: such processors see placeholders instead of tokens."""
KEY = "headrace"
"""Name of our part in ``SamplingParams.extra_args`` and in the server's ``--additional-config``."""
SPARE_ROWS = 2
FILTERS = ("none", "lexical")

OUTSIDE, INSIDE, MASKED = -180.0, -120.0, -60.0
LEAST = -50.0
"""Smallest log(1 - p*) that is sent; less is sent as this."""
SLACK = 0.01  # rounding of a returned log-prob, far below the gap between bases
TOP_ID_BASE = 256


class Settings(BaseModel):
    """What the processor must know of the tokenizer, as the server's JSON file holds it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    vocab_size: int
    think_open: int | None
    think_close: int | None
    banned: list[int]
    spared: dict[Literal["none", "lexical"], list[int]]
    """Top tokens that are never removed, by token filter."""
    spare_rows: tuple[int, int]


class RequestArguments(BaseModel):
    """``extra_args["headrace"]`` of one request."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    threshold: float = Field(0.95, ge=0.5, lt=1)
    mask: bool = False
    filter: Literal["none", "lexical"] = "none"
    cap: int = Field(16_384, ge=0, lt=1 << 24)
    inside: bool = False
    """The prompt ends in a pre-filled opening think tag; nothing else of the prompt counts."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Here and not in vLLM's own field: vLLM's top-p, asked by one request, cuts the spare rows of all others in the batch."""
    top_k: int = Field(0, ge=0, lt=1 << 24)
    """0 keeps all."""


@dataclass(frozen=True, slots=True)
class Channel:
    """What a response of L tokens reports."""

    masked: Array  # [L] bool, the top token was removed
    inside: Array  # [L] bool, the position lies in the reasoning span
    log_rest: Array  # [L] fp32, log(1 - p*)
    top_ids: Array  # [L] int32, the most likely token before the mask

    @property
    def top_probs(self) -> Array:
        """[L] fp32: p*."""
        return -np.expm1(self.log_rest)

    def confident(self, threshold: float) -> Array:
        """[L] bool: inside the span with a top probability above the threshold."""
        return self.masked | (self.inside & (self.top_probs > np.float32(threshold)))


def spare_rows(encoder: Encoder) -> tuple[int, int]:
    """Flag row and top-id row: the last two banned ids that no token of the tokenizer has.

    Raises:
        ValueError: the model's head has no two such rows.
    """
    used = set(encoder.tokenizer.get_vocab().values())
    free = [index for index in encoder.banned_ids if index not in used]
    if len(free) < SPARE_ROWS:
        raise ValueError(
            f"{encoder.directory}: drawing on vLLM needs {SPARE_ROWS} rows of the head that no token uses, found {len(free)} among "
            f"{encoder.vocab_size}; pad the vocabulary (resize_token_embeddings(…, pad_to_multiple_of=64)) or draw with engine.kind local"
        )
    return free[-2], free[-1]


def write_settings(encoder: Encoder, path: Path) -> None:
    """Write the processor's settings, whole or not at all. The server takes the path by ``--additional-config '{"headrace": "<path>"}'``.

    Raises:
        ValueError: the model has no spare rows.
    """
    settings = {
        "vocab_size": encoder.vocab_size,
        "think_open": encoder.think_open,
        "think_close": encoder.think_close,
        "banned": [int(index) for index in encoder.banned_ids],
        "spared": {name: np.flatnonzero(spared_tokens(encoder, name)).tolist() for name in FILTERS},  # type: ignore[arg-type]
        "spare_rows": spare_rows(encoder),
    }
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(settings), encoding="utf-8")
    draft.replace(path)


def read_settings(path: Path) -> Settings:
    """The settings that `write_settings` wrote.

    Raises:
        ValueError: there is no such file, or it holds something else.
    """
    try:
        return Settings.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: the top-token processor's settings cannot be read ({error.strerror})") from None
    except ValidationError as error:
        raise ValueError(f"{path}: not the top-token processor's settings ({first_error(error)})") from None


def first_error(error: ValidationError) -> str:
    """One line of a failed validation: the field and what was wrong."""
    first = error.errors()[0]
    return ": ".join((*map(str, first["loc"]), first["msg"]))


def request_arguments(request: SampleRequest) -> dict[str, Any]:
    """The value of ``extra_args["headrace"]`` for a request.

    The threshold of a request without mask is what it counts confident positions by.
    """
    rule, parameters = request.mask, request.parameters
    arguments: dict[str, Any] = {"threshold": request.confidence, "mask": False, "inside": request.prompt.prefilled}
    if rule is not None:
        arguments |= {"threshold": rule.threshold, "mask": True, "filter": rule.token_filter, "cap": rule.cap}
    if parameters.top_p < 1:
        arguments["top_p"] = parameters.top_p
    if parameters.top_k > 0:
        arguments["top_k"] = parameters.top_k
    return arguments


def encode(logits: Tensor, mask: TopTokenMask, inside: Tensor, reporting: Tensor, temperature: Tensor | None, rows: Tensor) -> None:
    """Write the message into the spare rows. No synchronisation.

    Args:
        logits: [B, V] fp32 after `top_token_mask` and whatever else is removed, spare rows at -inf. Changed in place.
        mask: what the mask did.
        inside: [B] bool, the position lies in the reasoning span.
        reporting: [B] bool, rows that report; the others keep -inf.
        temperature: [B] fp32 the engine will divide by after this; None: 1 everywhere, and nothing was removed but by the mask.
        rows: [2] int64, flag row and top-id row, on the device of the logits.
    """
    rest = torch.where(mask.fired, mask.masked_lse - mask.raw_lse, torch.log1p(-mask.top_prob)).clamp_(min=LEAST)
    base = torch.where(mask.fired, MASKED, torch.where(inside, INSIDE, OUTSIDE))
    message = torch.stack((base + rest, -(TOP_ID_BASE + mask.top_id.float())), 1)
    if temperature is None:
        message += mask.masked_lse[:, None]
    else:
        heat = temperature[:, None]
        message = heat * (message + torch.logsumexp(logits / heat, 1, keepdim=True))
    logits.index_copy_(1, rows, message.masked_fill_(~reporting[:, None], -torch.inf))


def decode(flag_logprobs: Array, top_logprobs: Array) -> Channel:
    """Read what `encode` wrote from the returned log-probs, [L] each, of the flag row and the top-id row.

    Raises:
        ValueError: they are no messages: the server ran without the processor, or returned log-probs of another mode.
    """
    flags, tops = np.asarray(flag_logprobs, dtype=np.float64), np.asarray(top_logprobs, dtype=np.float64)
    base = np.select([flags > MASKED + LEAST - SLACK, flags > INSIDE + LEAST - SLACK], [MASKED, INSIDE], OUTSIDE)
    rest, ids = flags - base, -tops - TOP_ID_BASE
    with np.errstate(invalid="ignore"):
        whole = np.round(ids)
        understood = (rest <= SLACK) & (rest >= LEAST - SLACK) & (whole >= 0) & (np.abs(ids - whole) < 0.25)
    if not understood.all():
        place = int(np.flatnonzero(~understood)[0])
        raise ValueError(
            f"response position {place}: log-probs {flags[place]:g} and {tops[place]:g} of the spare rows are no message of the top-token "
            f"processor; the server must run with --logits-processors {PROCESSOR} and --logprobs-mode processed_logprobs"
        )
    return Channel(base == MASKED, base != OUTSIDE, np.minimum(rest, 0).astype(np.float32), whole.astype(np.int32))
