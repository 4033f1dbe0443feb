"""Pictures and clips in packed rows: their features, where those go, and positions on three axes."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headrace.media import MediaLoader
from headrace.records import Media

if TYPE_CHECKING:
    from headrace.policy.model import PackedRows

FEATURE_CACHE_BYTES = 1 << 31
"""Features of a frozen tower kept on the device; one 140-frame clip of an 8B model takes 110 MB, and the newest item always stays."""


@dataclass(frozen=True, eq=False)
class VisualFeatures:
    """What the vision tower makes of one picture or clip."""

    embeddings: Tensor  # [n, D], in place of the placeholder tokens
    deepstack: tuple[Tensor, ...]  # each [n, D], added to the hidden states behind the first layers (Qwen3-VL)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.embeddings, *self.deepstack))


class Vision:
    """The vision tower of a Qwen-VL model as the policy uses it.

    A frozen tower encodes every picture once, by itself and without a graph; what it made is kept for later micro-batches, waves and
    steps. Company never changes the bits, so a resumed run repeats exactly. A trained tower runs once per forward over the distinct
    media of its rows, and gradients flow into it.
    """

    def __init__(self, model: PreTrainedModel, media: MediaLoader, *, frozen: bool) -> None:
        self.core, self.media, self.frozen = model.model, media, frozen
        self.tokens = {"image": model.config.image_token_id, "video": model.config.video_token_id}
        self._features: OrderedDict[Media, VisualFeatures] = OrderedDict()
        self._room = FEATURE_CACHE_BYTES

    def decoder_inputs(self, rows: "PackedRows", token_ids: Tensor) -> dict[str, Any]:
        """Embeddings with features inserted, positions [3, 1, N], and deepstack features where the model has them.

        Args:
            rows: the packed rows.
            token_ids: [N] their tokens, on the model's device.

        Raises:
            ValueError: a row's placeholder tokens do not fit the features of its media, or a file is unusable.
        """
        embeddings = self.core.get_input_embeddings()(token_ids)  # [N, D]
        inputs: dict[str, Any] = {}
        if any(rows.media):
            features = self._encode(dict.fromkeys(item for items in rows.media for item in items))
            self._check_counts(rows, features)
            ordered = [features[item] for kind in self.tokens for items in rows.media for item in items if item.kind == kind]
            places = torch.cat([(token_ids == token).nonzero().squeeze(1) for token in self.tokens.values()])
            visual = torch.cat([part.embeddings for part in ordered]).to(embeddings.dtype)
            embeddings = embeddings.index_copy(0, places, visual)
            if ordered[0].deepstack:
                levels = zip(*(part.deepstack for part in ordered), strict=True)
                order = places.argsort()  # the decoder adds in token order
                inputs["visual_pos_masks"] = self._is_visual(token_ids)[None]
                inputs["deepstack_visual_embeds"] = [torch.cat(level)[order] for level in levels]
        return inputs | {"inputs_embeds": embeddings[None], "position_ids": self._positions(rows).to(token_ids.device)[:, None]}

    def _is_visual(self, token_ids: Tensor) -> Tensor:
        return (token_ids == self.tokens["image"]) | (token_ids == self.tokens["video"])

    def _check_counts(self, rows: "PackedRows", features: dict[Media, VisualFeatures]) -> None:
        bounds, token_ids = rows.cu_seqlens.tolist(), rows.token_ids.cpu()
        for row, ((start, stop), items) in enumerate(zip(pairwise(bounds), rows.media, strict=True)):
            for kind, token in self.tokens.items():
                found = int((token_ids[start:stop] == token).sum())
                expected = sum(len(features[item].embeddings) for item in items if item.kind == kind)
                if found != expected:
                    raise ValueError(
                        f"row {row} has {found} {kind} tokens for {expected} {kind} features of {[item.path for item in items]}"
                    )

    # -------------------------------------------------------------------------------------------------- features

    def _encode(self, items: Iterable[Media]) -> dict[Media, VisualFeatures]:
        """Features of distinct items."""
        items = list(items)
        if not self.frozen:
            return dict(zip(items, self._run_tower(items), strict=True))
        for item in items:
            if item in self._features:
                self._features.move_to_end(item)
                continue
            with torch.no_grad():
                (self._features[item],) = self._run_tower([item])
            self._room -= self._features[item].bytes
        found = {item: self._features[item] for item in items}
        while self._room < 0 and len(self._features) > 1:
            self._room += self._features.popitem(last=False)[1].bytes
        return found

    def _run_tower(self, items: Sequence[Media]) -> list[VisualFeatures]:
        tensors = [self.media.load(item).tensors for item in items]
        device = self.core.visual.device
        pixels = torch.cat([part["pixel_values" if "pixel_values" in part else "pixel_values_videos"] for part in tensors]).to(device)
        grids = torch.cat([part["image_grid_thw" if "image_grid_thw" in part else "video_grid_thw"] for part in tensors]).to(device)
        output = self.core.get_image_features(pixels, grids, return_dict=True)  # clips take the same path through the tower
        levels = getattr(output, "deepstack_features", None) or ()
        return [VisualFeatures(part, tuple(level[i] for level in levels)) for i, part in enumerate(output.pooler_output)]

    # -------------------------------------------------------------------------------------------------- positions

    def _positions(self, rows: "PackedRows") -> Tensor:
        """[3, N] time, height and width positions; each row counts from 0, and rows of one prompt share its visual part."""
        token_ids, bounds = rows.token_ids.cpu(), rows.cu_seqlens.tolist()
        fronts: dict[int, Tensor] = {}
        parts = [torch.zeros(3, 0, dtype=torch.int64)]
        for row, (start, stop) in enumerate(pairwise(bounds)):
            prompt = -1 - row if rows.prompts is None else int(rows.prompts[row])
            if prompt not in fronts:
                media = rows.media[row] if rows.media else ()
                fronts[prompt] = self._front(token_ids[start:stop], media)
            parts += [fronts[prompt], _following(fronts[prompt], stop - start - fronts[prompt].shape[1])]
        return torch.cat(parts, dim=1)

    def _front(self, token_ids: Tensor, media: Sequence[Media]) -> Tensor:
        """[3, n] positions of a row up to its last visual token; [3, 0] without media."""
        if not media:
            return torch.zeros(3, 0, dtype=torch.int64)
        end = int(self._is_visual(token_ids).nonzero()[-1]) + 1
        kinds = sum((token_ids[:end] == token) * number for number, token in enumerate(self.tokens.values(), start=1))
        blocks = [[block for item in media if item.kind == kind for block in self._blocks(item)] for kind in self.tokens]
        return mrope_positions(torch.as_tensor(kinds), *blocks)

    def _blocks(self, item: Media) -> list[Tensor]:
        """Relative positions [3, n] of each uninterrupted block of the item's tokens."""
        config, tensors = self.core.config.vision_config, self.media.load(item).tensors
        frames, height, width = tensors[f"{item.kind}_grid_thw"][0].tolist()
        height, width = height // config.spatial_merge_size, width // config.spatial_merge_size
        if item.kind == "video" and self.core.config.model_type.startswith("qwen3"):  # time stamps stand between the frames
            return [_grid(torch.zeros(1), height, width)] * frames
        step = 1.0
        if item.kind == "video" and "second_per_grid_ts" in tensors:
            step = config.tokens_per_second * float(tensors["second_per_grid_ts"])
        return [_grid(torch.arange(frames) * step, height, width)]


def _grid(times: Tensor, height: int, width: int) -> Tensor:
    """[3, T * height * width] positions of a block whose frames are at ``times``."""
    axes = torch.meshgrid(times.long(), torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack(axes).flatten(1)


def _following(front: Tensor, count: int) -> Tensor:
    """[3, count] positions of text behind ``front``: all axes go on together from one past its largest."""
    first = int(front.max()) + 1 if front.numel() else 0
    return torch.arange(first, first + count).expand(3, -1)


def mrope_positions(kinds: Tensor, pictures: Sequence[Tensor], clips: Sequence[Tensor]) -> Tensor:
    """Three-axis rotary positions of one row (Qwen2-VL, section 2.1).

    Text counts all axes together. A block of visual tokens starts where the text stopped and spreads over time, height and width; the text
    behind it goes on from one past the block's largest position on any axis. (The index that comes with transformers 5.3 to 5.19 goes on
    from the larger side of the frame instead, which collides with the times of a longer Qwen2.5-VL clip.)

    Args:
        kinds: [L] 0 for text, 1 for picture tokens, 2 for clip tokens.
        pictures, clips: relative positions [3, n] of each uninterrupted block of tokens, in order.

    Returns:
        [3, L] int64
    """
    waiting = {1: iter(pictures), 2: iter(clips)}
    parts, first = [torch.zeros(3, 0, dtype=torch.int64)], 0
    for kind, count in zip(*(values.tolist() for values in torch.unique_consecutive(kinds, return_counts=True)), strict=True):
        while count > 0:
            relative = next(waiting[kind]) if kind else torch.arange(count).expand(3, -1)
            parts.append(relative + first)
            first = int(parts[-1].max()) + 1
            count -= relative.shape[1]
    return torch.cat(parts, dim=1)
