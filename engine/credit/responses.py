"""Where the responses of a batch are, and which of them a rule may change."""

import numpy as np

from headrace.credit.intervention import degraded
from headrace.pixels import Kind
from headrace.records import Array, Media, StepBatch


def spans(batch: StepBatch) -> list[slice]:
    """The tokens of every row's response in the flat arrays."""
    before = np.concatenate(([0], np.cumsum(batch.response_mask)))
    ends = batch.cu_seqlens[1:]
    lengths = before[ends] - before[batch.cu_seqlens[:-1]]
    return [slice(int(end - length), int(end)) for end, length in zip(ends, lengths, strict=True)]


def rows_where(batch: StepBatch, tokens: Array) -> Array:
    """[B] bool: rows with a token that ``tokens`` [N] bool marks."""
    before = np.concatenate(([0], np.cumsum(tokens)))
    return before[batch.cu_seqlens[1:]] > before[batch.cu_seqlens[:-1]]


def degraded_media(batch: StepBatch, rows: Array, kind: Kind) -> list[tuple[Media, ...]]:
    """Per row its media under their fixed degradation; nothing for rows that ``rows`` [B] bool leaves out."""
    return [degraded(question, media, kind) if row else () for question, media, row in zip(batch.questions, batch.media, rows, strict=True)]
