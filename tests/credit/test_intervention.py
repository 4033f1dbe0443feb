"""Degraded media: EX-6.2, fixed per sample, same size and tokens, pictures and clips."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from headrace.config import ScratchVisionModel
from headrace.credit.intervention import degraded, intervention_seed
from headrace.media import MediaLoader, media_loader
from headrace.pixels import DEGRADATIONS, PatchLayout, patch_mask
from headrace.policy.scratch import build_vision
from headrace.records import Intervention, Media


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> MediaLoader:
    directory = tmp_path_factory.mktemp("model")
    source = ScratchVisionModel(kind="scratch_vision", hidden=32, layers=1, heads=1, vision_hidden=32, vision_layers=1)
    build_vision(directory, source, ["w"], 0)
    found = media_loader(directory)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Media:
    path = tmp_path_factory.mktemp("pictures") / "noise.png"
    Image.fromarray(np.random.default_rng(0).integers(1, 256, (64, 96, 3), dtype=np.uint8)).save(path)
    return Media("image", str(path))


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Media:
    av = pytest.importorskip("av")
    path = tmp_path_factory.mktemp("clips") / "clip.mp4"
    rng = np.random.default_rng(1)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for _ in range(8):
            frame = av.VideoFrame.from_ndarray(rng.integers(40, 200, (64, 64, 3), dtype=np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return Media("video", str(path), frames=4)


def test_ex_6_2_seed_and_patches() -> None:
    seed = intervention_seed("q0001")
    assert seed == 4372922019544613267
    assert ["".join(str(int(black)) for black in row) for row in patch_mask(seed, 4, 4)] == ["0001", "0011", "1010", "1001"]


def test_a_sample_always_has_the_same_degradation_and_each_of_its_pictures_its_own(picture: Media) -> None:
    first, second = degraded("q0001", [picture, picture], "blur")
    assert first.intervention == Intervention("blur", 4372922019544613267)
    assert second.intervention is not None
    assert second.intervention.seed != first.intervention.seed
    assert degraded("q0001", [picture], "blur") == (first,)
    assert degraded("q0002", [picture], "blur") != (first,)
    assert degraded("q0001", [], "blur") == ()


def test_the_layout_is_the_processors_own(loader: MediaLoader, picture: Media) -> None:
    tensors = loader.load(picture).tensors
    layout = PatchLayout(loader.processor.image_processor, tensors["image_grid_thw"][0].tolist())
    frames = layout.frames(tensors["pixel_values"])
    original = np.asarray(Image.open(picture.path))
    np.testing.assert_array_equal(layout.levels(frames)[0].numpy(), original)
    assert torch.equal(layout.patches(frames), tensors["pixel_values"])
    np.testing.assert_array_equal(np.asarray(loader.pictures(picture)[0]), original)


@pytest.mark.parametrize("kind", DEGRADATIONS)
@pytest.mark.parametrize("name", ["picture", "clip"])
def test_size_and_tokens_stay_and_pixels_change(loader: MediaLoader, kind, name: str, request: pytest.FixtureRequest) -> None:
    media: Media = request.getfixturevalue(name)
    (other,) = degraded("q7", [media], kind)
    before, after = loader.load(media), loader.load(other)
    assert after.placeholder == before.placeholder
    assert not after.unchanged
    for key, tensor in before.tensors.items():
        same = torch.equal(tensor, after.tensors[key])
        assert same != key.startswith("pixel_values"), key
        assert tensor.shape == after.tensors[key].shape
    again = MediaLoader(loader.processor).load(other)
    assert all(torch.equal(tensor, again.tensors[key]) for key, tensor in after.tensors.items())


def test_blackened_patches_are_black_and_the_others_keep_their_bits(loader: MediaLoader, picture: Media) -> None:
    (other,) = degraded("q0001", [picture], "patches")
    before, after = (np.asarray(loader.pictures(media)[0]) for media in (picture, other))
    black = patch_mask(intervention_seed("q0001"), 5, 7).repeat(14, 0).repeat(14, 1)[:64, :96]
    assert not after[black].any()
    np.testing.assert_array_equal(after[~black], before[~black])
    pixels = [loader.load(media).tensors["pixel_values"] for media in (picture, other)]
    layout = PatchLayout(loader.processor.image_processor, [1, 8, 12])
    one, two = (layout.frames(values)[0] for values in pixels)
    assert torch.equal(one[~torch.from_numpy(black)], two[~torch.from_numpy(black)])


def test_a_clip_hides_the_same_squares_in_every_frame(loader: MediaLoader, clip: Media) -> None:
    (other,) = degraded("q0001", [clip], "patches")
    black = patch_mask(intervention_seed("q0001"), 5, 5).repeat(14, 0).repeat(14, 1)[:64, :64]
    frames = [np.asarray(frame) for frame in loader.pictures(other)]
    assert len(frames) == 4
    assert all(not frame[black].any() and frame[~black].all() for frame in frames)


def test_the_other_degradations_are_what_they_say(loader: MediaLoader, picture: Media) -> None:
    seen = {kind: np.asarray(loader.pictures(degraded("q", [picture], kind)[0])[0]).astype(int) for kind in DEGRADATIONS}
    grey, blur, noise = seen["grey"], seen["blur"], seen["noise"]
    original = np.asarray(Image.open(picture.path)).astype(int)
    assert (grey == 128).all()
    assert blur.std() < original.std() / 5
    assert abs(blur.mean() - original.mean()) < 3
    assert 0.5 < np.isin(noise, (0, 255)).mean() < 0.7  # σ 189 leaves about 2 of 5 levels inside the range


def test_a_picture_that_cannot_change_says_so(loader: MediaLoader, tmp_path: Path) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "black.png")
    black = Media("image", str(tmp_path / "black.png"))
    (hidden,) = degraded("q", [black], "patches")
    assert loader.load(hidden).unchanged
    assert not loader.load(replace(hidden, intervention=Intervention("grey", 0))).unchanged
