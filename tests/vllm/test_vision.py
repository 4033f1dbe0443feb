"""Pictures and clips on a server: the same tokens as the local engine with the same patches, given once per prompt."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from headrace.config import DirectoryModel, ModelConfig, ScratchVisionModel, VLLMEngineConfig
from headrace.encoding import Encoder
from headrace.policy.model import Policy
from headrace.policy.scratch import build_vision
from headrace.records import Completion, Media, Prompt, Question, TopTokenRule
from headrace.sampling.local import LocalEngine
from headrace.sampling.vllm.channel import write_settings
from headrace.sampling.vllm.client import VLLMEngine
from headrace.sampling.vllm.control import Control
from headrace.sampling.vllm.fleet import Fleet
from headrace.sampling.vllm.media import features, items
from headrace.sampling.vllm.server import Server
from tests.policy.test_model_vision import MEDIA, TEMPLATE, tokenizer
from tests.sampling.test_local_vision import teacher_forced
from tests.sampling.tiny_policy import ROUNDING, WORDS
from tests.vllm.test_client import requests


def build_qwen3(directory: Path) -> None:
    build_vision(
        directory, ScratchVisionModel(kind="scratch_vision", hidden=32, layers=2, heads=2, vision_hidden=32, vision_layers=2), WORDS, seed=2
    )


def build_qwen25(directory: Path) -> None:
    """Heads of 32 dimensions, the smallest that vLLM's attention on a CPU takes."""
    words = tokenizer()
    text = {
        "vocab_size": 272,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]},
        "max_position_embeddings": 2048,
    }
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "patch_size": 8, "out_hidden_size": 64}
    vision |= {"fullatt_block_indexes": [1], "window_size": 32}
    ids = {name: words.convert_tokens_to_ids(token) for name, token in MEDIA.items()}
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids))
    model.save_pretrained(directory)
    sizes = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2, "size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64 * 8}}
    processor = Qwen2_5_VLProcessor(Qwen2VLImageProcessor(**sizes), words, Qwen2VLVideoProcessor(**sizes), chat_template=TEMPLATE)
    processor.save_pretrained(directory)


def sharpen(policy: Policy, directory: Path) -> None:
    """Make the next token depend on all before it, and surely."""
    for name, parameter in policy.model.named_parameters():
        if parameter.dim() >= 2 and "embed" not in name:
            parameter.data *= 6.0
    policy.model.get_decoder().norm.weight.data *= 50.0
    policy.model.save_pretrained(directory)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Media]:
    """Two sizes, one that its bound makes smaller, one turned by its EXIF tag, and a clip."""
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    made = []
    for number, (size, bound, turned) in enumerate(
        [((64, 64), None, 1), ((96, 64), None, 1), ((128, 96), 64 * 64, 1), ((96, 64), None, 6)]
    ):
        picture = Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
        tags = picture.getexif()
        tags[0x0112] = turned
        picture.save(folder / f"{number}.png", exif=tags)
        made.append(Media("image", str(folder / f"{number}.png"), max_pixels=bound))
    with av.open(str(folder / "clip.mp4"), "w") as file:
        stream = file.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for frame in rng.integers(0, 256, (16, 64, 64, 3), dtype=np.uint8):
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                file.mux(packet)
        for packet in stream.encode():
            file.mux(packet)
    return [*made, Media("video", str(folder / "clip.mp4"), frames=6)]


Seeing = tuple[Policy, Encoder, VLLMEngineConfig, str]


def serve(build: Callable[[Path], None], factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    directory, folder = factory.mktemp("seeing"), factory.mktemp("servers")
    build(directory)
    policy = Policy.load(directory, ModelConfig(source=DirectoryModel(path=directory)), "cpu")
    sharpen(policy, directory)
    encoder = Encoder.load(directory, think_prefill=True, system_prompt=None, max_prompt_tokens=512)
    write_settings(encoder, folder / "processor.json")
    config = VLLMEngineConfig(kind="vllm", memory=0.0625, max_num_seqs=32, start_deadline=280)
    server = Server(directory, config, dtype="float32", max_model_len=512, settings=folder / "processor.json", folder=folder)
    server.start()
    try:
        yield policy, encoder, config, server.url
    finally:
        server.stop()


@pytest.fixture(scope="module")
def qwen3(needs_vllm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    yield from serve(build_qwen3, tmp_path_factory)


@pytest.fixture(scope="module")
def qwen25(needs_vllm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    yield from serve(build_qwen25, tmp_path_factory)


def prompts(encoder: Encoder, pictures: list[Media]) -> list[Prompt]:
    rows: list[tuple[str, tuple[Media, ...]]] = [
        ("<image> a b", (pictures[0],)),
        ("c d e f <image> g", (pictures[1],)),
        ("h i j", ()),
        ("k <image> l <image>", (pictures[2], pictures[3])),
        ("m <video> n", (pictures[4],)),
        ("o <image> p <video> q", (pictures[0], pictures[4])),
    ]
    return [
        encoder.encode(Question(id=f"q{number}", messages=({"role": "user", "content": text},), answer="", media=media))
        for number, (text, media) in enumerate(rows)
    ]


def check_equal_to_local(seeing: Seeing, pictures: list[Media], monkeypatch: pytest.MonkeyPatch) -> None:
    policy, encoder, config, url = seeing
    given = prompts(encoder, pictures)
    greedy = [*requests(given, 1, temperature=0.0), *requests(given, 1, TopTokenRule(threshold=0.8), temperature=0.0)]
    drawn = requests(given, 3)
    bodies: list[dict[str, Any]] = []
    generate = Fleet.generate

    async def recording(self: Fleet, place: Any, body: dict[str, Any], *arguments: Any) -> Any:
        bodies.append(body)
        return await generate(self, place, body, *arguments)

    monkeypatch.setattr(Fleet, "generate", recording)

    async def run() -> tuple[list[Completion], list[Completion]]:
        engine = VLLMEngine([url], encoder, config)
        try:
            first = await engine.sample(greedy)
            await asyncio.to_thread(forget, url)
            return first, await engine.sample(drawn)
        finally:
            await engine.close()

    ours, sampled = asyncio.run(run())
    local = asyncio.run(LocalEngine(policy, encoder).sample(greedy))
    for one, other in zip(ours, local, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.masked.tolist() == other.masked.tolist()
    for request, completion in zip(drawn, sampled, strict=True):
        np.testing.assert_allclose(completion.logprobs, teacher_forced(policy, encoder, request, completion), atol=10 * ROUNDING)
    whole = [body for body in bodies if any(any(part) for part in body.get("features", {}).get("kwargs_data", {}).values())]
    assert len(whole) == 2 * 5, "a prompt's media go once before the server forgets them and once after"


def forget(url: str) -> None:
    """Empty the server's caches, as a push of weights does."""
    control = Control(url)
    control.pause("keep")
    control.resume()
    control.close()


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_qwen3_vl_draws_what_the_local_engine_draws(qwen3: Seeing, pictures: list[Media], monkeypatch: pytest.MonkeyPatch) -> None:
    check_equal_to_local(qwen3, pictures, monkeypatch)


@pytest.mark.vllm
@pytest.mark.soak
@pytest.mark.timeout(600)
def test_qwen25_vl_draws_what_the_local_engine_draws(qwen25: Seeing, pictures: list[Media], monkeypatch: pytest.MonkeyPatch) -> None:
    check_equal_to_local(qwen25, pictures, monkeypatch)


def test_every_placeholder_belongs_to_one_item(tmp_path: Path, pictures: list[Media]) -> None:
    build_qwen3(tmp_path)
    encoder = Encoder.load(tmp_path, think_prefill=True, system_prompt=None, max_prompt_tokens=512)
    pads = (encoder.config.image_token_id, encoder.config.video_token_id)
    for prompt in prompts(encoder, pictures):
        found = items(encoder, prompt, {})
        covered = np.zeros(len(prompt.token_ids), dtype=int)
        for item in found:
            covered[item.offset : item.offset + item.length] += 1
            grid = item.tensors["image_grid_thw"]
            assert len(item.tensors["pixel_values"]) == grid.prod() == item.length * 4
        assert (covered == np.isin(prompt.token_ids, pads)).all()


def test_equal_pictures_have_equal_hashes_and_go_by_them(tmp_path: Path, pictures: list[Media]) -> None:
    build_qwen3(tmp_path)
    encoder = Encoder.load(tmp_path, think_prefill=True, system_prompt=None, max_prompt_tokens=512)
    first, second, _, both, *_ = prompts(encoder, pictures)
    assert items(encoder, first, {})[0].hash != items(encoder, second, {})[0].hash
    assert len({item.hash for item in items(encoder, both, {})}) == 2
    by_hash = features(items(encoder, first, {}), whole=False)
    assert by_hash["kwargs_data"] == {"image": [None]}
    assert by_hash["mm_hashes"] == features(items(encoder, first, {}), whole=True)["mm_hashes"]


def test_a_prompt_of_another_model_is_refused(tmp_path: Path, pictures: list[Media]) -> None:
    build_qwen3(tmp_path)
    encoder = Encoder.load(tmp_path, think_prefill=True, system_prompt=None, max_prompt_tokens=512)
    first, *_ = prompts(encoder, pictures)
    shorter = Prompt(first.question, np.delete(first.token_ids, np.flatnonzero(first.token_ids == encoder.config.image_token_id)[:1]), True)
    with pytest.raises(ValueError, match=r"question q0: \S+0.png makes 16 image tokens, but the prompt has no such run"):
        items(encoder, shorter, {})
