"""Questions become prompts: chat template, system prompt, think tag, media; and what the vocabulary bans and lets be masked."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen3Config, Qwen3VLConfig, Qwen3VLProcessor, Qwen3VLVideoProcessor

from headrace.encoding import Encoder
from headrace.records import Media, Question

MEDIA = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *MEDIA)
PLAIN_ADDED = ("<think>", "</think>", "<|fim_pad|>", "<tool_call>")
TEMPLATE = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}{{ '\n' }}"
    "{%- if m.content is string -%}{{ m.content }}"
    "{%- else -%}{%- for part in m.content -%}"
    "{%- if part.type == 'text' -%}{{ part.text }}"
    "{%- else -%}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>{%- endif -%}"
    "{%- endfor -%}{%- endif -%}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)
ROWS = 300


def byte_tokenizer(special=SPECIAL, added=PLAIN_ADDED, template=TEMPLATE):
    """Every byte a token, plus the control tokens of the Qwen family."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    core.add_tokens([AddedToken(token, normalized=False) for token in added])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template, clean_up_tokenization_spaces=False
    )


def text_directory(path, **options):
    Qwen3Config(vocab_size=ROWS).save_pretrained(path)
    byte_tokenizer(**options).save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 256, 151645]}))
    return path


def load(path, **options):
    return Encoder.load(path, **({"think_prefill": True, "system_prompt": None, "max_prompt_tokens": 10_000} | options))


def ask(*contents, media=(), roles=("user",)):
    return Question("q7", tuple({"role": role, "content": content} for role, content in zip(roles, contents, strict=True)), "1", media)


@pytest.fixture(scope="module")
def text_encoder(tmp_path_factory):
    return load(text_directory(tmp_path_factory.mktemp("text")))


# ------------------------------------------------------------------------------------------------------ text


def test_prompt_is_the_template_and_an_open_think_tag(text_encoder):
    prompt = text_encoder.encode(ask("1 + 1?"))
    assert text_encoder.decode(prompt.token_ids) == "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n<think>"
    assert prompt.prefilled
    assert prompt.token_ids.dtype == np.int64
    assert prompt.token_ids[-1] == text_encoder.think_open


def test_without_prefill_the_span_is_closed(tmp_path):
    encoder = load(text_directory(tmp_path), think_prefill=False)
    prompt = encoder.encode(ask("hi"))
    assert not prompt.prefilled
    assert encoder.decode(prompt.token_ids).endswith("assistant\n")


def test_a_template_that_opens_the_tag_itself_is_not_doubled(tmp_path):
    encoder = load(
        text_directory(tmp_path, template=TEMPLATE + "{%- if add_generation_prompt -%}<think>\n{% endif -%}"), think_prefill=False
    )
    prompt = encoder.encode(ask("hi"))
    assert prompt.prefilled
    assert encoder.decode(prompt.token_ids).count("<think>") == 1


def test_own_system_message_passes_byte_for_byte(tmp_path):
    encoder = load(text_directory(tmp_path), system_prompt="Default.")
    own = " Think in <think> tags.\n\tKeep  spaces é "
    text = encoder.decode(encoder.encode(ask(own, "hi", roles=("system", "user"))).token_ids)
    assert f"<|im_start|>system\n{own}<|im_end|>" in text
    assert "Default." not in text
    assert "<|im_start|>system\nDefault.<|im_end|>" in encoder.decode(encoder.encode(ask("hi")).token_ids)


def test_literal_placeholder_without_media_is_text(text_encoder):
    assert "an <image> tag" in text_encoder.decode(text_encoder.encode(ask("an <image> tag")).token_ids)


def test_base_model_without_template_gets_the_plain_text(tmp_path):
    encoder = load(text_directory(tmp_path, template=None))
    assert encoder.decode(encoder.encode(ask("a", "b", roles=("system", "user"))).token_ids) == "a\n\nb<think>"


def test_long_prompt_names_question_and_limit(tmp_path):
    encoder = load(text_directory(tmp_path), max_prompt_tokens=20)
    with pytest.raises(ValueError, match=r"question q7: the prompt has \d+ tokens, max_prompt_tokens is 20"):
        encoder.encode(ask("x" * 50))


def test_media_for_a_text_model_is_refused(text_encoder):
    with pytest.raises(ValueError, match="question q7: it has media"):
        text_encoder.encode(ask("<image>", media=(Media("image", "a.png"),)))
    with pytest.raises(ValueError, match=r"a\.png"):
        text_encoder.media_tensors([Media("image", "a.png")])


def test_content_must_be_text(text_encoder):
    with pytest.raises(ValueError, match="question q7: content of the user message must be text, got list"):
        text_encoder.encode(ask([{"type": "text"}]))


def test_what_the_template_refuses_names_the_question(tmp_path):
    template = "{%- if messages[0].role == 'system' -%}{{ raise_exception('no system role') }}{%- endif -%}"
    encoder = load(text_directory(tmp_path, template=template))
    with pytest.raises(ValueError, match="question q7: no system role"):
        encoder.encode(ask("s", roles=("system",)))


# ------------------------------------------------------------------------------------------------------ vocabulary


def test_end_ids_come_from_generation_config_then_tokenizer(text_encoder):
    assert text_encoder.eos_ids == (258, 256)


def test_banned_are_media_control_and_unused_ids_only(text_encoder):
    """Never the end ids nor the think tags; tool-call and content tags stay free."""
    tokens = {
        text_encoder.tokenizer.convert_ids_to_tokens(index) for index in text_encoder.banned_ids if index < len(text_encoder.tokenizer)
    }
    assert tokens == {"<|im_start|>", *MEDIA, "<|fim_pad|>"}
    beyond = [index for index in text_encoder.banned_ids if index >= len(text_encoder.tokenizer)]
    assert beyond == list(range(len(text_encoder.tokenizer), ROWS))


def test_a_control_token_that_stops_is_an_end_and_not_banned(tmp_path, text_encoder):
    turn, letter = (text_encoder.tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "A"))
    encoder = load(text_directory(tmp_path), stop_ids=(turn, letter))
    assert encoder.eos_ids == (*text_encoder.eos_ids, turn)
    assert set(text_encoder.banned_ids) - set(encoder.banned_ids) == {turn}


def test_special_content_tags_are_not_banned(tmp_path):
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    encoder = load(text_directory(tmp_path, special=(*SPECIAL, *tags), added=()))
    assert not {encoder.tokenizer.convert_tokens_to_ids(tag) for tag in tags} & set(encoder.banned_ids)


def test_lexical_tokens_have_a_letter_and_are_no_tags(text_encoder):
    """Special, white space, punctuation, digits and letterless tokens are spared."""
    allowed = {text_encoder.token_text(index) for index in text_encoder.lexical.nonzero()[0]}
    assert allowed == set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
    assert text_encoder.lexical.shape == (ROWS,)


def test_decode_keeps_special_tokens(text_encoder):
    assert text_encoder.decode(torch.tensor([258, 263])) == "<|im_end|><think>"
    assert text_encoder.token_text(ROWS - 1) == ""


def test_directory_without_tokenizer_names_itself(tmp_path):
    Qwen3Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path}: no usable tokenizer"):
        load(tmp_path)


# ------------------------------------------------------------------------------------------------------ pictures


def vision_directory(path):
    tokenizer = byte_tokenizer()
    ids = {
        name: tokenizer.convert_tokens_to_ids(token)
        for name, token in zip(("vision_start", "vision_end", "image", "video"), MEDIA, strict=True)
    }
    config = Qwen3VLConfig(
        text_config={"vocab_size": ROWS, "num_hidden_layers": 1}, **{f"{name}_token_id": index for name, index in ids.items()}
    )
    config.save_pretrained(path)
    sizes = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2, "size": {"shortest_edge": 16 * 16, "longest_edge": 1 << 20}}
    Qwen3VLProcessor(Qwen2VLImageProcessor(**sizes), tokenizer, Qwen3VLVideoProcessor(**sizes), chat_template=TEMPLATE).save_pretrained(
        path
    )
    return path


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return load(vision_directory(tmp_path_factory.mktemp("vision")), think_prefill=False)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for name, size in (("small", (32, 32)), ("wide", (96, 32))):
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)).save(folder / f"{name}.png")
    return {name: Media("image", str(folder / f"{name}.png")) for name in ("small", "wide")}


def test_pictures_take_one_token_per_feature_in_order(encoder, pictures):
    """Same ids and pixels as the processor makes of the conversation at once."""
    question = ask("look <image> then\n<image>!", media=(pictures["small"], pictures["wide"]))
    content = [
        {"type": "text", "text": "look "},
        {"type": "image"},
        {"type": "text", "text": " then\n"},
        {"type": "image"},
        {"type": "text", "text": "!"},
    ]
    text = encoder.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    images = [Image.open(media.path) for media in question.media]
    want = encoder.processor(text=[text], images=images, return_tensors="pt")
    prompt, tensors = encoder.encode(question), encoder.media_tensors(question.media)
    assert prompt.token_ids.tolist() == want["input_ids"][0].tolist()
    assert (prompt.token_ids == encoder.processor.image_token_id).sum() == (32 // 16) ** 2 + (96 // 16) * (32 // 16)
    assert torch.equal(tensors["pixel_values"], want["pixel_values"])
    assert torch.equal(tensors["image_grid_thw"], want["image_grid_thw"])


def test_max_pixels_bounds_a_picture(encoder, pictures):
    bounded = Media("image", pictures["wide"].path, max_pixels=1024)
    grid = encoder.media_tensors([bounded])["image_grid_thw"][0]
    assert grid.prod() * 64 <= 1024


def test_text_only_question_on_a_vision_model(encoder):
    assert encoder.decode(encoder.encode(ask("hi")).token_ids).startswith("<|im_start|>user\nhi<|im_end|>")
    assert encoder.media_tensors(()) == {}


@pytest.mark.parametrize("content", ["no place", "<image> <image>", "<video>"])
def test_placeholders_must_fit_the_media(encoder, pictures, content):
    with pytest.raises(ValueError, match=r"question q7: its messages name <(image|video)> \d times, but it brings \d"):
        encoder.encode(ask(content, media=(pictures["small"],)))


def test_media_tokens_typed_as_text_are_refused(encoder, pictures):
    for content, media in (("<|image_pad|>", ()), ("<image> <|image_pad|>", (pictures["small"],))):
        with pytest.raises(ValueError, match="question q7: a message contains one of the model's media tokens"):
            encoder.encode(ask(content, media=media))


def test_missing_and_corrupt_pictures_name_the_file(encoder, pictures, tmp_path):
    gone = tmp_path / "gone.png"
    with pytest.raises(ValueError, match=f"question q7: {gone}: no such image file"):
        encoder.encode(ask("<image>", media=(Media("image", str(gone)),)))
    whole = Path(pictures["wide"].path).read_bytes()
    for name, data in (("cut.png", whole[: len(whole) // 2]), ("text.png", b"hello"), ("empty.png", b"")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=f"question q7: {tmp_path / name}: not a usable image"):
            encoder.encode(ask("<image>", media=(Media("image", str(tmp_path / name)),)))
    Image.new("RGB", (1000, 2)).save(tmp_path / "thin.png")
    with pytest.raises(ValueError, match=r"thin\.png: not a usable image \(absolute aspect ratio"):
        encoder.encode(ask("<image>", media=(Media("image", str(tmp_path / "thin.png")),)))


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "I;16"])
def test_other_colour_modes_are_pictures_too(encoder, tmp_path, mode):
    Image.new(mode, (32, 32)).save(tmp_path / "picture.png")
    tensors = encoder.media_tensors([Media("image", str(tmp_path / "picture.png"))])
    assert tensors["pixel_values"].isfinite().all()


def test_cache_is_bounded_and_keeps_the_newest(encoder, pictures):
    from headrace.media import MediaLoader

    loader = MediaLoader(encoder.processor, cache_bytes=1)
    first = loader.load(pictures["small"])
    assert loader.load(pictures["small"]) is first
    loader.load(pictures["wide"])
    assert list(loader._cache) == [pictures["wide"]]
    assert loader.load(pictures["small"]) is not first
