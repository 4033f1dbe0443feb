"""Degraded pictures: what is left of one when the question is how much a response looked at it.

Degradations work on the patches that a Qwen-VL processor cut, so size and token count stay as they are, for pictures and clips alike.
Parameters are those of VPPO's public code.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import Tensor

from headrace.records import Array, Intervention

Kind = Literal["patches", "blur", "noise", "grey"]

PATCH_SIDE, PATCH_SHARE = 14, 0.5  # pixels a side; share of squares blackened
BLUR_RADIUS = 6.0
NOISE_STD = 189.0  # of 255 levels
GREY_LEVEL = 128.0


def patch_mask(seed: int, rows: int, columns: int) -> Array:
    """bool [rows, columns]: squares to blacken."""
    chosen: Array = np.random.default_rng(seed).random((rows, columns)) < PATCH_SHARE
    return chosen


def _patches(frames: Array, seed: int) -> Array:
    """Squares blackened, the same ones in every frame: what one frame hides no other shows."""
    height, width = frames.shape[1:3]
    mask = patch_mask(seed, -(-height // PATCH_SIDE), -(-width // PATCH_SIDE))
    hidden = mask.repeat(PATCH_SIDE, 0).repeat(PATCH_SIDE, 1)[:height, :width]
    return np.where(hidden[None, :, :, None], np.float32(0), frames)


def _blur(frames: Array, seed: int) -> Array:
    blurred = [Image.fromarray(frame.astype(np.uint8)).filter(ImageFilter.GaussianBlur(BLUR_RADIUS)) for frame in frames]
    return np.stack([np.asarray(frame, dtype=np.float32) for frame in blurred])


def _noise(frames: Array, seed: int) -> Array:
    noisy = frames + np.random.default_rng(seed).normal(0, NOISE_STD, frames.shape)
    return noisy.round().clip(0, 255).astype(np.float32)


def _grey(frames: Array, seed: int) -> Array:
    return np.full_like(frames, GREY_LEVEL)


DEGRADATIONS: dict[Kind, Callable[[Array, int], Array]] = {"patches": _patches, "blur": _blur, "noise": _noise, "grey": _grey}
"""Frames [T, H, W, 3] fp32 of whole levels 0..255 and a seed to frames of the same shape and range."""


class PatchLayout:
    """How a processor of the Qwen-VL family turns frames into rows of patches, and back."""

    def __init__(self, processor: object, grid: Sequence[int]) -> None:
        """``processor``: image or video processor; ``grid``: (time, height, width) in patches."""
        self.times, self.rows, self.columns = (int(side) for side in grid)
        self.step, self.side, self.merge = (getattr(processor, name) for name in ("temporal_patch_size", "patch_size", "merge_size"))
        self.mean, self.std = (torch.tensor(getattr(processor, f"image_{name}")) for name in ("mean", "std"))

    def frames(self, pixels: Tensor) -> Tensor:
        """[times * step, H, W, 3] of patches [times * rows * columns, 3 * step * side * side], values as they are."""
        merge, blocks = self.merge, (self.times, self.rows // self.merge, self.columns // self.merge)
        parts = pixels.reshape(*blocks, merge, merge, 3, self.step, self.side, self.side)
        parts = parts.permute(0, 6, 1, 3, 7, 2, 4, 8, 5)  # time, step, block row, row, y, block column, column, x, colour
        return parts.reshape(self.times * self.step, self.rows * self.side, self.columns * self.side, 3)

    def patches(self, frames: Tensor) -> Tensor:
        """The inverse of ``frames``."""
        merge, side = self.merge, self.side
        parts = frames.reshape(self.times, self.step, self.rows // merge, merge, side, self.columns // merge, merge, side, 3)
        return parts.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(self.times * self.rows * self.columns, -1)

    def levels(self, frames: Tensor) -> Tensor:
        """Normalised values as whole levels 0..255."""
        return ((frames * self.std + self.mean) * 255).round().clamp(0, 255)

    def normalised(self, levels: Tensor) -> Tensor:
        return (levels / 255 - self.mean) / self.std


def degrade(pixels: Tensor, layout: PatchLayout, intervention: Intervention, *, still: bool) -> Tensor:
    """Patches of the degraded picture or clip; pixels that the degradation leaves alone keep their bits.

    Args:
        pixels: [n, d] fp32 normalised patches.
        still: the frames of a patch are copies of one picture, and stay copies.
    """
    frames = layout.frames(pixels)
    levels = layout.levels(frames[:1] if still else frames)
    changed = torch.from_numpy(DEGRADATIONS[intervention.kind](levels.numpy(), intervention.seed)).expand_as(frames)
    kept = changed == levels
    return layout.patches(torch.where(kept, frames, layout.normalised(changed)).to(pixels.dtype))


def pictures(pixels: Tensor, layout: PatchLayout, *, still: bool) -> list[Image.Image]:
    """The frames as pictures, for people to look at."""
    levels = layout.levels(layout.frames(pixels)[: 1 if still else None]).to(torch.uint8)
    return [Image.fromarray(frame) for frame in levels.numpy()]
