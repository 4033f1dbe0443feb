"""Video files in and out: what a container holds, the proxy that the policy sees, the frames of a shot, scenes."""

import io
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import floor, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from headrace.questions.hopchain.records import Dropped, Footage, Shot
from headrace.questions.hopchain.segments import Span

SUFFIXES = {".mp4", ".mkv", ".webm", ".mov", ".avi", ".m4v", ".mpg", ".mpeg", ".ts", ".flv", ".wmv"}
SIDE_STEP = 32
"""Sides of a proxy are multiples of this: a visual token of Qwen3-VL spans 32 x 32 pixels."""
_JPEG_QUALITY = 90


def proxy_size(width: int, height: int, max_pixels: int = 50_176) -> tuple[int, int]:
    """Width and height of a proxy: the aspect kept as far as multiples of 32 allow, never larger than the source or ``max_pixels``."""
    scale = min(1.0, sqrt(max_pixels / (width * height)))
    sides = [max(SIDE_STEP, floor(side * scale / SIDE_STEP) * SIDE_STEP) for side in (width, height)]
    while sides[0] * sides[1] > max_pixels and max(sides) > SIDE_STEP:
        sides[0 if sides[0] >= sides[1] else 1] -= SIDE_STEP
    return sides[0], sides[1]


def proxy_indices(total: int, frames: int = 140) -> list[int]:
    """``frames`` evenly spaced frame numbers, first and last included; they repeat where there are fewer frames."""
    return [round(i * (total - 1) / (frames - 1)) for i in range(frames)]


def probe(path: Path) -> Footage:
    """Frames, rate and size of a video.

    Raises:
        Dropped: ``unreadable``, ``no_video`` (stream) or ``no_frames``.
    """
    with _readable(path), _open(path) as container:
        if not container.streams.video:
            raise Dropped("no_video", f"{path}: has no video stream")
        stream = container.streams.video[0]
        frames = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
        width, height = stream.codec_context.width, stream.codec_context.height
        if frames < 1 or not width or not height:
            raise Dropped("no_frames", f"{path}: holds no frames")
        return Footage(frames=frames, fps=float(stream.average_rate or stream.guessed_rate or 0), width=width, height=height)


def write_proxy(path: Path, footage: Footage, out: Path, frames: int = 140, max_pixels: int = 50_176) -> int:
    """Write the proxy: evenly spaced frames at one a second, in H.264; returns how many, fewer where some could not be decoded.

    Raises:
        Dropped: ``unreadable``.
    """
    width, height = proxy_size(footage.width, footage.height, max_pixels)
    wanted = proxy_indices(footage.frames, frames)
    last = wanted[-1]
    pictures: dict[int, Any] = {}
    with _readable(path):
        for index, frame in enumerate(_decode(path)):
            if index in wanted:
                pictures[index] = frame.reformat(width, height, "rgb24").to_ndarray()
            if index == last:
                break
    found = [pictures[index] for index in wanted if index in pictures]
    if not found:
        raise Dropped("no_frames", f"{path}: none of its frames can be decoded")
    encode(found, out, fps=1)
    return len(found)


def encode(frames: Sequence[np.ndarray], out: Path, fps: int) -> None:
    """Write RGB frames [H, W, 3] as an H.264 file, which appears whole or not at all."""
    import av

    temporary = out.with_name(f".{out.stem}.part{out.suffix}")
    height, width = frames[0].shape[:2]
    with av.open(str(temporary), "w") as container:
        stream: Any = container.add_stream("libx264", rate=fps, options={"crf": "18", "preset": "veryfast", "threads": "1"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for picture in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")))
        container.mux(stream.encode())
    os.replace(temporary, out)


def find_scenes(path: Path, threshold: float = 27.0, min_scene_frames: int = 15) -> list[Span]:
    """Scenes by PySceneDetect's content detector, seconds; one where there is no cut.

    Times are those of the frames, so a variable frame rate shifts nothing.

    Raises:
        Dropped: ``unreadable``.
    """
    from scenedetect import ContentDetector, SceneManager
    from scenedetect.backends import VideoStreamAv  # type: ignore[attr-defined]

    logging.getLogger("pyscenedetect").setLevel(logging.ERROR)
    with _readable(path):
        manager = SceneManager()
        manager.add_detector(ContentDetector(threshold=threshold, min_scene_len=min_scene_frames))
        video = VideoStreamAv(str(path), suppress_output=True)
        manager.detect_scenes(video)
        return [(start.seconds, end.seconds) for start, end in manager.get_scene_list(start_in_scene=True)]


def shot_frames(path: Path, shot: Shot, fps: float = 1.0, max_pixels: int = 1_000_000) -> list[bytes]:
    """JPEG files of frames of a shot, ``fps`` a second and at least one, each the frame on screen in the middle of its stretch.

    Raises:
        Dropped: ``unreadable``.
    """
    length = shot.end - shot.start
    count = max(1, round(length * fps))
    times = [shot.start + (k + 0.5) * length / count for k in range(count)]
    with _readable(path):
        return [_jpeg(frame, max_pixels) for frame in _frames_at(path, times)]


def _frames_at(path: Path, times: Sequence[float]) -> Iterator[Any]:
    """The last frame shown at or before each time; fewer where the file ends early."""
    with _open(path) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        begin = float((stream.start_time or 0) * stream.time_base)
        container.seek(int((times[0] + begin) / stream.time_base), stream=stream, backward=True)
        waiting, shown = list(times), None
        for frame in container.decode(stream):
            if frame.time is None:
                continue
            while waiting and shown is not None and frame.time - begin > waiting[0]:
                waiting.pop(0)
                yield shown
            if not waiting:
                return
            shown = frame
        if shown is not None and waiting:
            yield shown


def _jpeg(frame: Any, max_pixels: int) -> bytes:
    scale = min(1.0, sqrt(max_pixels / (frame.width * frame.height)))
    picture: Image.Image = frame.to_image()
    if scale < 1:
        picture = picture.resize((max(1, floor(frame.width * scale)), max(1, floor(frame.height * scale))))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=_JPEG_QUALITY)
    return buffer.getvalue()


def _open(path: Path) -> Any:
    import av

    return av.open(str(path))


def _decode(path: Path) -> Iterator[Any]:
    """Frames in order; a packet that cannot be decoded ends a stretch, not the file."""
    import av

    with _open(path) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        for packet in container.demux(stream):
            try:
                yield from packet.decode()
            except av.FFmpegError:
                continue


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Whatever a decoder raises becomes one reason with the file's name."""
    try:
        yield
    except Dropped:
        raise
    except (OSError, ValueError, RuntimeError, ArithmeticError) as error:
        raise Dropped("unreadable", f"{path}: cannot be decoded ({error})") from None
    except Exception as error:
        if type(error).__module__.startswith(("scenedetect", "av.")):
            raise Dropped("unreadable", f"{path}: cannot be decoded ({error})") from None
        raise
