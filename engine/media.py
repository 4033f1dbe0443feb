"""Pixels by reference: a picture or clip is loaded where it is used, cut into the vision tower's patches, and kept in a bounded cache."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from headrace import pixels
from headrace.records import Media

CACHE_BYTES = 1 << 31
"""Patches kept in memory; a 140-frame clip at 50,000 pixels a frame takes 84 MB, and the newest item always stays."""

_PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}


@dataclass(frozen=True)
class LoadedMedia:
    """One picture or clip as the processor made it."""

    tensors: Mapping[str, Tensor]
    """``pixel_values`` and ``image_grid_thw``, or ``pixel_values_videos``, ``video_grid_thw`` and what else positions need."""
    placeholder: str
    """Text that stands for it in the prompt: one pad token per visual feature, with time stamps if the model wants them."""
    unchanged: bool = False
    """Its degradation left every pixel as it was."""

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class MediaLoader:
    """Loads media for one processor. Not safe for concurrent use."""

    def __init__(self, processor: Any, cache_bytes: int = CACHE_BYTES) -> None:
        self.processor = processor
        self._cache: OrderedDict[Media, LoadedMedia] = OrderedDict()
        self._room = cache_bytes

    def __deepcopy__(self, memo: dict[int, Any]) -> "MediaLoader":
        """A copied policy goes on using the same loader."""
        return self

    def load(self, media: Media) -> LoadedMedia:
        """The item's patches and placeholder, from the cache if it was loaded recently.

        Raises:
            ValueError: the file is missing, unreadable, or too small or too thin for the processor; the message names it.
        """
        if media in self._cache:
            self._cache.move_to_end(media)
            return self._cache[media]
        plain: Callable[[Media], LoadedMedia] = self._image if media.kind == "image" else self._video
        loaded = plain(media) if media.intervention is None else self._degraded(media)
        self._cache[media] = loaded
        self._room -= loaded.bytes
        while self._room < 0 and len(self._cache) > 1:
            self._room += self._cache.popitem(last=False)[1].bytes
        return loaded

    def tensors(self, media: Sequence[Media]) -> dict[str, Tensor]:
        """Concatenated tensors of several items, pictures and clips each in their order."""
        parts: dict[str, list[Tensor]] = {}
        for item in media:
            for name, tensor in self.load(item).tensors.items():
                parts.setdefault(name, []).append(tensor)
        return {name: torch.cat(tensors) for name, tensors in parts.items()}

    def pictures(self, media: Media) -> list[Image.Image]:
        """What the policy sees of the item, degraded or not: one picture, or the frames of a clip."""
        return pixels.pictures(self.load(media).tensors[_PIXELS[media.kind]], self._layout(media), still=media.kind == "image")

    def _layout(self, media: Media) -> pixels.PatchLayout:
        processor = self.processor.image_processor if media.kind == "image" else self.processor.video_processor
        return pixels.PatchLayout(processor, self.load(media).tensors[f"{media.kind}_grid_thw"][0].tolist())

    def _degraded(self, media: Media) -> LoadedMedia:
        """The item under its intervention: other pixels, everything else as in the original."""
        assert media.intervention is not None
        plain = replace(media, intervention=None)
        original, name = self.load(plain), _PIXELS[media.kind]
        before = original.tensors[name]
        after = pixels.degrade(before, self._layout(plain), media.intervention, still=media.kind == "image")
        return replace(original, tensors={**original.tensors, name: after}, unchanged=torch.equal(before, after))

    def _image(self, media: Media) -> LoadedMedia:
        picture = _guarded(media, "image", lambda: _open_image(media.path))
        processor = self.processor.image_processor
        done = _guarded(media, "image", lambda: processor(images=[picture], return_tensors="pt", **_pixel_limits(processor, media, 1)))
        tensors = {name: done[name] for name in ("pixel_values", "image_grid_thw")}
        return LoadedMedia(tensors, self.processor.replace_image_token(done, 0))

    def _video(self, media: Media) -> LoadedMedia:
        processor = self.processor.video_processor
        frames, metadata = _guarded(media, "video", lambda: _read_clip(media, processor))
        # Qwen3-VL's budget is for the whole clip, rounded to an even number of frames; Qwen2.5-VL's is for one frame.
        whole_clip = type(processor).__name__.startswith("Qwen3")
        step = processor.temporal_patch_size
        budget_frames = max(round(len(frames) / step) * step, step) if whole_clip else 1
        limits = _pixel_limits(processor, media, budget_frames)
        if hasattr(processor, "cap_pixels_per_frame") and processor.cap_pixels_per_frame is None:
            limits["cap_pixels_per_frame"] = False
        done = _guarded(
            media,
            "video",
            lambda: processor(
                videos=[frames], video_metadata=[metadata], do_sample_frames=False, return_metadata=True, return_tensors="pt", **limits
            ),
        )
        tensors = {name: done[name] for name in ("pixel_values_videos", "video_grid_thw")}
        if "second_per_grid_ts" in self.processor.model_input_names:  # Qwen2.5-VL spaces temporal positions by time
            sampled_fps = len(frames) / metadata["duration"]
            tensors["second_per_grid_ts"] = torch.tensor([step / sampled_fps])
        return LoadedMedia(tensors, self.processor.replace_video_token(done, 0))


def _guarded(media: Media, kind: str, load: Callable[[], Any]) -> Any:
    """Run ``load``; whatever a decoder raises becomes one line that names the file."""
    try:
        return load()
    except FileNotFoundError:
        raise ValueError(f"{media.path}: no such {kind} file") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # PIL reports broken PNG chunks as SyntaxError
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{media.path}: not a usable {kind} ({reason})") from None


def _open_image(path: str) -> Image.Image:
    with Image.open(path) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def _pixel_limits(processor: Any, media: Media, frames: int) -> dict[str, Any]:
    """The processor's size option for ``media.max_pixels``; empty when the processor's own bounds stand."""
    if media.max_pixels is None:
        return {}
    shortest, longest = processor.size["shortest_edge"], processor.size["longest_edge"]  # pixel counts, in spite of the names
    bound = min(longest, media.max_pixels * frames)
    return {"size": {"shortest_edge": min(shortest, bound), "longest_edge": bound}}


def _read_clip(media: Media, processor: Any) -> tuple[np.ndarray, dict[str, Any]]:
    """Chosen frames [T, H, W, 3] uint8 of a clip, and the metadata from which the processor makes time stamps."""
    import av

    with av.open(media.path) as container:
        if not container.streams.video:
            raise ValueError("it has no video stream")
        stream = container.streams.video[0]
        fps = float(stream.average_rate or stream.base_rate or 24)
        total = stream.frames
    total = total or sum(1 for _ in _decode(media.path))
    indices = _frame_indices(media, processor, total, fps)
    frames = _pick(media.path, indices)
    if len(frames) < len(set(indices)):  # the header promised more frames than there are
        total = sum(1 for _ in _decode(media.path))
        indices = _frame_indices(media, processor, total, fps)
        frames = _pick(media.path, indices)
    metadata = {"total_num_frames": total, "fps": fps, "frames_indices": indices, "video_backend": "pyav", "duration": total / fps}
    return np.stack([frames[index] for index in indices]), metadata


def _decode(path: str) -> Any:
    import av

    with av.open(path) as container:
        container.streams.video[0].thread_type = "AUTO"
        yield from container.decode(video=0)


def _pick(path: str, indices: Sequence[int]) -> dict[int, np.ndarray]:
    """Decode up to the last index and keep the wanted frames as RGB."""
    wanted, last = set(indices), max(indices)
    frames = {}
    for index, frame in enumerate(_decode(path)):
        if index in wanted:
            frames[index] = frame.to_ndarray(format="rgb24")
        if index == last:
            break
    return frames


def _frame_indices(media: Media, processor: Any, total: int, fps: float) -> list[int]:
    """``media.frames`` evenly spaced indices, round(i (N - 1) / (n - 1)), or the processor's own choice."""
    if total < 1:
        raise ValueError("it has no frames")
    if media.frames is not None:
        return np.linspace(0, total - 1, media.frames).round().astype(int).tolist()
    from transformers.video_utils import VideoMetadata

    metadata = VideoMetadata(total_num_frames=total, fps=fps, duration=total / fps)
    return np.asarray(processor.sample_frames(metadata, fps=processor.fps)).astype(int).tolist()


@cache
def media_loader(directory: Path) -> MediaLoader | None:
    """The loader of a model directory, one per process so that encoder and policy share its cache; None for a text model."""
    if not any(
        (directory / name).exists() for name in ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
    ):
        return None
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(directory)
    return MediaLoader(processor) if hasattr(processor, "image_processor") else None
