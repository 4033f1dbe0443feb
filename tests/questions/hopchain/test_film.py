"""Video files: proxies, scenes, frames of a shot, and files that are none."""

import io
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from headrace.questions.hopchain import film, segment_shots
from headrace.questions.hopchain.records import Dropped, Shot
from tests.questions.hopchain.conftest import write_clip

RED, BLUE, GREEN = (200, 60, 60), (30, 60, 180), (60, 200, 90)


@pytest.mark.parametrize(
    ("source", "proxy"),
    [
        ((1920, 1080), (288, 160)),
        ((640, 360), (288, 160)),
        ((1080, 1920), (160, 288)),
        ((224, 224), (224, 224)),
        ((100, 90), (96, 64)),
        ((3840, 100), (1376, 32)),
    ],
)
def test_ex_1_1_proxy_sizes(source: tuple[int, int], proxy: tuple[int, int]) -> None:
    assert film.proxy_size(*source) == proxy


def test_ex_1_2_proxy_indices() -> None:
    nine_thousand = film.proxy_indices(9000)
    assert nine_thousand[:4] == [0, 65, 129, 194]
    assert nine_thousand[-3:] == [8870, 8934, 8999]
    two_hundred = film.proxy_indices(200)
    assert two_hundred[:10] == [0, 1, 3, 4, 6, 7, 9, 10, 11, 13]
    assert len(set(two_hundred)) == 140
    hundred = film.proxy_indices(100)
    assert (len(hundred), len(set(hundred))) == (140, 100)


@pytest.mark.parametrize(("value", "cut"), [(101, True), (100, False)])
def test_ex_1_3_a_score_of_27_is_a_cut(value: int, cut: bool) -> None:
    """Two flat frames whose (H, S, V) differ by (30, 50, 1 or 0): 27.0 or 26.67."""
    import cv2
    from scenedetect import ContentDetector, FrameTimecode

    def flat(hue: int, saturation: int, brightness: int) -> np.ndarray:
        return np.full((8, 8, 3), (hue, saturation, brightness), np.uint8)

    detector = ContentDetector(threshold=27.0, min_scene_len=1)
    converted = {0: flat(10, 100, 100), 1: flat(40, 150, value)}
    real = cv2.cvtColor
    try:  # the detector's own conversion would round the three channels
        cv2.cvtColor = lambda frame, code: converted[int(frame[0, 0, 0])]  # type: ignore[assignment]
        cuts = [detector.process_frame(FrameTimecode(20 + index, 25.0), np.full((8, 8, 3), index, np.uint8)) for index in (0, 1)]
    finally:
        cv2.cvtColor = real
    assert bool(cuts[1]) == cut


def test_a_real_clip_is_cut_into_shots(bikes: Path) -> None:
    footage = film.probe(bikes)
    assert (footage.frames, footage.fps, footage.width, footage.height, footage.duration) == (250, 25.0, 640, 272, 10.0)
    scenes = film.find_scenes(bikes)
    assert scenes == [(0.0, 1.2), (1.2, 3.04), (3.04, 5.48), (5.48, 7.48), (7.48, 9.68), (9.68, 10.0)]
    assert segment_shots(scenes) == [(0.0, 3.04), (3.04, 5.48), (5.48, 7.48), (7.48, 10.0)]


def test_a_real_clip_gets_a_proxy_of_140_frames(bikes: Path, tmp_path: Path) -> None:
    out = tmp_path / "proxy.mp4"
    assert film.write_proxy(bikes, film.probe(bikes), out) == 140
    proxy = film.probe(out)
    assert (proxy.frames, proxy.fps, proxy.width, proxy.height) == (140, 1.0, 320, 128)
    assert proxy.width * proxy.height <= 50_176
    assert [path.name for path in tmp_path.iterdir()] == ["proxy.mp4"]


def test_frames_of_a_shot_are_one_a_second_and_of_that_shot(bikes: Path) -> None:
    step = 8  # every eighth pixel is enough to tell frames apart
    pictures = [
        np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), float)[::step, ::step]
        for data in film.shot_frames(bikes, Shot(start=3.04, end=5.48))
    ]
    assert len(pictures) == 2
    with av.open(str(bikes)) as container:
        frames = [frame.to_ndarray(format="rgb24").astype(float)[::step, ::step] for frame in container.decode(video=0)]
    for picture, time in zip(pictures, (3.65, 4.87), strict=True):
        nearest = min(range(len(frames)), key=lambda index: np.abs(frames[index] - picture).mean())
        assert nearest / 25 == pytest.approx(time, abs=0.05)
    (small,) = film.shot_frames(bikes, Shot(start=0.0, end=0.4), max_pixels=10_000)
    size = Image.open(io.BytesIO(small)).size
    assert size[0] * size[1] <= 10_000


def test_a_video_without_a_cut_is_one_scene(tmp_path: Path) -> None:
    clip = write_clip(tmp_path / "still.mp4")
    assert film.find_scenes(clip) == [(0.0, 6.0)]


def test_fewer_frames_than_the_proxy_repeat(tmp_path: Path) -> None:
    clip = write_clip(tmp_path / "short.mp4", frames=9)
    assert film.write_proxy(clip, film.probe(clip), tmp_path / "proxy.mp4", frames=20) == 20


def test_a_variable_frame_rate_shifts_no_cut(tmp_path: Path) -> None:
    """24 frames in 6 s, then 24 in 3 s: the cut is at 6 s, not in the middle."""
    times = [*np.arange(24) * 0.25, *(6 + np.arange(24) * 0.125)]
    clip = write_clip(tmp_path / "variable.mp4", colours=(RED, BLUE), times=times)
    (first, second) = film.find_scenes(clip)
    assert first == (0.0, pytest.approx(6.0, abs=0.01))
    assert second[0] == pytest.approx(6.0, abs=0.01)
    (picture,) = film.shot_frames(clip, Shot(start=5.0, end=5.6))
    assert np.asarray(Image.open(io.BytesIO(picture)))[0, 0] == pytest.approx(RED, abs=12)
    (picture,) = film.shot_frames(clip, Shot(start=6.2, end=6.8))
    assert np.asarray(Image.open(io.BytesIO(picture)))[0, 0] == pytest.approx(BLUE, abs=12)


def corrupt(folder: Path) -> Path:
    path = folder / "noise.mp4"
    path.write_bytes(np.random.default_rng(0).bytes(4096))
    return path


def only_sound(folder: Path) -> Path:
    path = folder / "sound.wav"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def empty(folder: Path) -> Path:
    path = folder / "empty.mp4"
    path.touch()
    return path


@pytest.mark.parametrize(("make", "reason"), [(corrupt, "unreadable"), (empty, "unreadable"), (only_sound, "no_video")])
def test_a_file_that_is_no_video_is_one_reason(tmp_path: Path, make: object, reason: str) -> None:
    path = make(tmp_path)  # type: ignore[operator]
    with pytest.raises(Dropped) as drop:
        film.probe(path)
    assert drop.value.reason == reason
    assert str(path) in drop.value.detail


def test_a_truncated_file_never_counts_as_whole(tmp_path: Path) -> None:
    whole = write_clip(tmp_path / "whole.mkv", frames=200, colours=(RED, BLUE, GREEN))
    cut = tmp_path / "cut.mkv"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    footage = film.probe(whole)
    assert 0 < film.write_proxy(cut, footage, tmp_path / "proxy.mp4", frames=40) < 40
