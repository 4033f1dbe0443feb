"""Pictures and clips for a server: the encoder's own patches, by content.

vLLM can load and cut media itself, but not with one item's pixel bound, a clip's chosen frames, or a picture turned as its EXIF tag says.
So it gets the patches that the learner trains on, in the form of its route's ``features``: each item once, and from then on by its
hash, until the server forgets it. Placeholders are found where the encoder put them, and must be as many as the patches make.
"""

import base64
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from headrace.encoding import Encoder, media_ids
from headrace.records import Array, Media, Prompt

_RAW = 3  # vLLM's msgpack extension for the bytes of a tensor


@dataclass(frozen=True, slots=True)
class Item:
    """One encoder input of a prompt."""

    modality: str  # image | video
    tensors: Mapping[str, Tensor]
    offset: int
    length: int
    """Placeholder tokens from ``offset`` on."""
    hash: str


Hashes = dict[Media, tuple[str, ...]]
"""Of media that were hashed before: a picture of a million pixels takes tens of milliseconds."""


def items(encoder: Encoder, prompt: Prompt, hashes: Hashes) -> list[Item]:
    """A prompt's media with their places, in the order of the prompt; loads what is not in the loader's cache.

    A clip of Qwen3-VL is one picture per time step: its placeholder has time stamps between the frames, which the route cannot
    express, and tower and positions treat a step just as they treat a picture.

    Raises:
        ValueError: a file cannot be used, or the prompt does not have the placeholders that it makes.
    """
    cursors = {"image": 0, "video": 0}
    found: list[Item] = []
    for media in prompt.question.media:
        pieces = list(_pieces(encoder, media))
        if media not in hashes:
            hashes[media] = tuple(_hash(modality, tensors) for modality, tensors, _ in pieces)
        for (modality, tensors, length), digest in zip(pieces, hashes[media], strict=True):
            offset = _next_run(encoder, prompt, media, cursors[media.kind], length)
            cursors[media.kind] = offset + length
            found.append(Item(modality, tensors, offset, length, digest))
    return sorted(found, key=lambda item: item.offset)


def features(found: list[Item], *, whole: bool) -> dict[str, Any]:
    """The request's ``features``: with the patches, or by hash alone."""
    result: dict[str, Any] = {"mm_hashes": {}, "mm_placeholders": {}, "kwargs_data": {}}
    for item in found:
        for name, value in (
            ("mm_hashes", item.hash),
            ("mm_placeholders", {"offset": item.offset, "length": item.length}),
            ("kwargs_data", _serialized(item.tensors) if whole else None),
        ):
            result[name].setdefault(item.modality, []).append(value)
    return result


def _pieces(encoder: Encoder, media: Media) -> Iterator[tuple[str, dict[str, Tensor], int]]:
    """Modality, tensors as vLLM names them, and placeholder tokens of each encoder input that an item makes."""
    tensors = encoder.media_tensors([media])
    merged = encoder.processor.image_processor.merge_size**2
    patches = tensors["pixel_values" if media.kind == "image" else "pixel_values_videos"]
    grid = tensors[f"{media.kind}_grid_thw"][0]
    if media.kind == "image":
        yield "image", {"pixel_values": patches, "image_grid_thw": grid}, int(grid.prod()) // merged
    elif encoder.config.model_type.startswith("qwen3"):
        step = torch.tensor([1, *grid[1:].tolist()])
        for part in patches.chunk(int(grid[0])):
            yield "image", {"pixel_values": part.contiguous(), "image_grid_thw": step}, int(step.prod()) // merged
    else:
        rest = {name: tensors[name][0] for name in ("second_per_grid_ts",) if name in tensors}
        yield "video", {"pixel_values_videos": patches, "video_grid_thw": grid, **rest}, int(grid.prod()) // merged


def _next_run(encoder: Encoder, prompt: Prompt, media: Media, cursor: int, length: int) -> int:
    """Where the next ``length`` placeholders of that kind begin."""
    ids: Array = prompt.token_ids
    pad = media_ids(encoder.config)[f"{media.kind}_token_id"]
    places = np.flatnonzero(ids[cursor:] == pad)
    offset = cursor + int(places[0]) if len(places) else len(ids)
    if not (ids[offset : offset + length] == pad).all() or offset + length > len(ids):
        raise ValueError(
            f"question {prompt.question.id}: {media.path} makes {length} {media.kind} tokens, but the prompt has no such run; "
            "encode and draw with the same model directory"
        )
    return offset


def _hash(modality: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(modality.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _serialized(tensors: Mapping[str, Tensor]) -> str:
    """vLLM's ``MultiModalKwargsItem``: patches are concatenated over a batch's items, everything else is stacked."""
    content = {
        name: {
            "data": [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), msgspec.msgpack.Ext(_RAW, _bytes(tensor))],
            "field": ["flat", {"slices": [[0, len(tensor), None]], "dim": 0, "keep_on_cpu": False}]
            if name.startswith("pixel_values")
            else ["batched", {"keep_on_cpu": True}],
        }
        for name, tensor in tensors.items()
    }
    return base64.b64encode(msgspec.msgpack.encode(content)).decode()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
