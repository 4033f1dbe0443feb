"""Which degraded picture stands beside which original: fixed by the sample, so that every epoch and checkpoint sees the same."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from headrace.pixels import Kind
from headrace.records import Intervention, Media

VERSION = "v1"
"""Part of every seed; another one stands for other degradations of the same samples."""


def intervention_seed(sample: str) -> int:
    """64 bits from the id of a sample."""
    return int.from_bytes(hashlib.sha256(f"{VERSION}:{sample}".encode()).digest()[:8], "big")


def degraded(question_id: str, media: Sequence[Media], kind: Kind) -> tuple[Media, ...]:
    """The media of a question under their fixed degradation, by reference. The second and later ones have seeds of their own."""
    names = [question_id, *(f"{question_id}:{number}" for number in range(1, len(media)))]
    return tuple(replace(item, intervention=Intervention(kind, intervention_seed(name))) for item, name in zip(media, names, strict=False))
