"""Scratch models are ordinary Hugging Face directories, the same bits for the same seed."""

import hashlib
from fractions import Fraction

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM

from headrace.config import MultiHopSource, ScratchTextModel, ScratchVisionModel
from headrace.encoding import Encoder
from headrace.policy.scratch import build_text, build_vision, word_tokenizer
from headrace.questions import load
from headrace.records import Media, Question

TEXT = ScratchTextModel(kind="scratch_text", hidden=32, layers=1, heads=2)
VISION = ScratchVisionModel(kind="scratch_vision", hidden=32, layers=2, heads=2, vision_hidden=32, vision_layers=2)
TASK = load(MultiHopSource(kind="multi_hop", count=32), 0, "train")


def encoder(directory, prefill=True):
    return Encoder.load(directory, think_prefill=prefill, system_prompt=None, max_prompt_tokens=512)


def bits(directory):
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    directory = tmp_path_factory.mktemp("text")
    build_text(directory, TEXT, TASK.vocabulary(), seed=0)
    return directory


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    directory = tmp_path_factory.mktemp("vision")
    build_vision(directory, VISION, ["what", "is", "this", "?"], seed=0)
    return directory


def test_the_same_seed_gives_the_same_bits_and_leaves_the_global_stream_alone(text, tmp_path):
    before = torch.random.get_rng_state()
    build_text(tmp_path / "same", TEXT, TASK.vocabulary(), seed=0)
    build_text(tmp_path / "other", TEXT, TASK.vocabulary(), seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    assert bits(tmp_path / "same") == bits(text) != bits(tmp_path / "other")


def test_every_word_and_tag_is_one_token(text):
    loaded = encoder(text)
    for word in [*TASK.vocabulary(), "<think>", "</think>", "<answer>", "</answer>"]:
        (index,) = loaded.tokenizer.encode(word, add_special_tokens=False)
        assert loaded.decode([index]) == word
    assert loaded.think_open is not None
    assert loaded.think_close is not None


def test_decoding_and_encoding_again_is_exact(text):
    loaded = encoder(text)
    for index in range(len(TASK)):
        trace = TASK.trace(index, np.random.default_rng(0))
        ids = loaded.tokenizer.encode(trace, add_special_tokens=False)
        assert loaded.decode(ids) == trace
    drawn = np.random.default_rng(0).integers(len(loaded.tokenizer), size=200).tolist()
    assert loaded.tokenizer.encode(loaded.decode(drawn), add_special_tokens=False) == drawn
    assert loaded.tokenizer.encode("7</think><answer>12</answer>", add_special_tokens=False) == loaded.tokenizer.encode(
        "7 </think> <answer> 12 </answer>", add_special_tokens=False
    )


def test_the_chat_template_adds_two_control_tokens(text):
    question = TASK.question(0)
    words = len(question.messages[0]["content"].split())
    assert len(encoder(text, prefill=False).encode(question).token_ids) == words + 2
    prompt = encoder(text).encode(question)
    assert len(prompt.token_ids) == words + 3
    assert prompt.prefilled
    assert encoder(text).decode(prompt.token_ids[-2:]) == "<|assistant|> <think>"


def test_control_tokens_and_spare_rows_are_banned_but_end_and_tags_are_not(text):
    loaded = encoder(text)
    free = set(range(loaded.vocab_size)) - set(loaded.banned_ids)
    assert free == {*range(len(TASK.vocabulary()) + 4), *loaded.eos_ids}
    assert loaded.vocab_size - len(loaded.tokenizer) >= 2


def test_transformers_generates_from_the_directory(text):
    model = AutoModelForCausalLM.from_pretrained(text)
    prompt = torch.tensor(encoder(text).encode(TASK.question(0)).token_ids)[None]
    assert model.generate(prompt, max_new_tokens=3, do_sample=False).shape[1] <= prompt.shape[1] + 3
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("words", [["a", "a"], ["a b"], [""], ["<think>"], ["<|end|>"]])
def test_a_vocabulary_that_is_no_list_of_distinct_words_is_refused(words):
    with pytest.raises(ValueError, match="vocabulary"):
        word_tokenizer(words)


@pytest.mark.parametrize(("size", "tokens"), [((64, 64), 16), ((32, 48), 6), ((1280, 720), 60)])
def test_a_picture_becomes_a_token_per_sixteen_by_sixteen_pixels(vision, tmp_path, size, tokens):
    path = tmp_path / "picture.png"
    Image.new("RGB", size, "teal").save(path)
    question = Question("p", ({"role": "user", "content": "<image> what is this ?"},), "x", media=(Media("image", str(path)),))
    loaded = encoder(vision)
    text = loaded.decode(loaded.encode(question).token_ids).split()
    assert text.count("<|image_pad|>") == tokens
    assert text[-6:] == ["what", "is", "this", "?", "<|assistant|>", "<think>"]


def test_a_clip_becomes_frames_with_a_word_for_their_time(vision, tmp_path):
    av = pytest.importorskip("av")
    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=Fraction(8))
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for shade in range(16):
            frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), 16 * shade, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    question = Question("c", ({"role": "user", "content": "<video> what is this ?"},), "x", media=(Media("video", str(path), frames=4),))
    words = encoder(vision).decode(encoder(vision).encode(question).token_ids).split()
    assert words.count("frame") == words.count("<|vision_start|>") == 2
    assert words.count("<|video_pad|>") == 2 * 16


def test_media_tokens_are_banned(vision):
    loaded = encoder(vision)
    media = [
        loaded.tokenizer.convert_tokens_to_ids(token) for token in ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    ]
    assert set(media) <= set(loaded.banned_ids)
