"""Tiny models made on the spot: a Hugging Face directory with random weights and a word-level tokenizer.

They learn the generated tasks on a laptop in minutes and pass through every path that a large model takes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from headrace.config import ScratchTextModel, ScratchVisionModel

PAD, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
MEDIA_TOKENS = {"image": "<|image_pad|>", "video": "<|video_pad|>", "vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
FRAME = "frame"  # the one word that stands for every time stamp the processor writes into a clip

HEAD_DIM = 32  # independent of the width; the smallest that fused attention kernels accept
MAX_POSITIONS = 2048
INITIAL_STD = 0.05
ROPE_THETA = 30.0  # rows are short: position heads form several times sooner than at the usual 10,000
PATCH, MERGE, CLIP_STEP = 8, 2, 2  # pixels a patch side, patches a token side, frames a patch
IMAGE_SIDE = 64  # the tower's own position grid: 8 x 8 patches, 4 x 4 tokens
_SPARE_ROWS = 2  # head rows that no token uses: an engine's sampler may carry flags in them
_ROW_MULTIPLE = 16

CHAT_TEMPLATE = """\
{%- for message in messages -%}
  {{- '<|' + message['role'] + '|> ' -}}
  {%- if message['content'] is string -%}
    {{- message['content'] -}}
  {%- else -%}
    {%- for part in message['content'] -%}
      {%- if part['type'] == 'text' -%}
        {{- part['text'] -}}
      {%- else -%}
        {{- '<|vision_start|><|' + part['type'] + '_pad|><|vision_end|>' -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{- ' <|end|> ' if message['role'] == 'assistant' else ' ' -}}
{%- endfor -%}
{{- '<|assistant|>' if add_generation_prompt else '' -}}"""


def build_text(directory: Path, source: ScratchTextModel, vocabulary: Sequence[str], seed: int) -> None:
    """Write a tiny Qwen3 language model with random weights.

    Args:
        directory: made if missing; receives config, safetensors, tokenizer with chat template, generation config.
        source: sizes.
        vocabulary: words, each becomes one token; think tags, answer tags and control tokens are added.
        seed: of the weights; the same seed gives the same bits.
    """
    tokenizer = word_tokenizer(vocabulary)
    config = Qwen3Config(
        **_decoder(source, tokenizer),
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        bos_token_id=None,
    )
    with _seeded(seed):
        model = Qwen3ForCausalLM(config)
    _save(directory, model, tokenizer)


def build_vision(directory: Path, source: ScratchVisionModel, vocabulary: Sequence[str], seed: int) -> None:
    """Write a tiny Qwen3-VL with random weights: as ``build_text``, with an image and a video processor besides.

    A picture of 64 x 64 pixels becomes 16 tokens; pictures of 32 x 32 to 128 x 128 pixels keep their size, others are scaled.
    """
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    tokenizer = word_tokenizer([*vocabulary, *({FRAME} - set(vocabulary))], tuple(MEDIA_TOKENS.values()))
    vocabulary_ids: dict[str, Any] = tokenizer.get_vocab()
    third = HEAD_DIM // 2 // 3
    config = Qwen3VLConfig(
        text_config={
            **_decoder(source, tokenizer),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": ROPE_THETA,
                "mrope_section": [HEAD_DIM // 2 - 2 * third, third, third],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": source.vision_layers,
            "hidden_size": source.vision_hidden,
            "intermediate_size": 2 * source.vision_hidden,
            "num_heads": max(1, source.vision_hidden // HEAD_DIM),
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": CLIP_STEP,
            "out_hidden_size": source.hidden,
            "num_position_embeddings": (IMAGE_SIDE // PATCH) ** 2,
            "deepstack_visual_indexes": list(range(min(2, source.vision_layers, source.layers))),
        },
        **{f"{name}_token_id": vocabulary_ids[token] for name, token in MEDIA_TOKENS.items()},
        tie_word_embeddings=True,
    )
    with _seeded(seed):
        model = Qwen3VLForConditionalGeneration(config)
    _save(directory, model, tokenizer)
    _save_processor(directory, tokenizer)


def word_tokenizer(vocabulary: Sequence[str], media_tokens: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per word: text is split at white space, decoding joins with single spaces.

    A word outside the vocabulary is an error: there is no unknown token that would hide it.

    Raises:
        ValueError: a word is empty, repeated, holds white space or is a control token.
    """
    control = [PAD, END, SYSTEM, USER, ASSISTANT, *media_tokens]
    seen = {*control, *TAGS}
    for word in vocabulary:
        if word.split() != [word] or word in seen:
            raise ValueError(f"vocabulary: {word!r} is repeated, reserved, empty or holds white space; expected distinct words")
        seen.add(word)
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}))
    if media_tokens:
        core.normalizer = normalizers.Replace(Regex(r"<\d+\.\d seconds>"), f" {FRAME} ")
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    core.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT, *media_tokens],
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
        chat_template=CHAT_TEMPLATE,
    )


def _decoder(source: ScratchTextModel | ScratchVisionModel, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """What both families' text configurations share."""
    used = len(tokenizer) + _SPARE_ROWS
    return {
        "vocab_size": -(-used // _ROW_MULTIPLE) * _ROW_MULTIPLE,
        "hidden_size": source.hidden,
        "intermediate_size": 2 * source.hidden,
        "num_hidden_layers": source.layers,
        "num_attention_heads": source.heads,
        "num_key_value_heads": source.heads,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": True,
        "initializer_range": INITIAL_STD,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw initial weights from ``seed`` and leave the global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _save(directory: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True)
    disable_progress_bar()  # one shard needs none
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _save_processor(directory: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    # torchvision is behind these three; a text policy does without it
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    patches = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": CLIP_STEP}
    colours = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    smallest, largest = (IMAGE_SIDE // 2) ** 2, (2 * IMAGE_SIDE) ** 2
    image = Qwen2VLImageProcessor(size={"shortest_edge": smallest, "longest_edge": largest}, **patches, **colours)
    clip = Qwen3VLVideoProcessor(
        size={"shortest_edge": CLIP_STEP * smallest, "longest_edge": 16 * IMAGE_SIDE**2},  # of all frames together
        fps=1,
        min_frames=CLIP_STEP,
        max_frames=16,
        **patches,
        **colours,
    )
    processor = Qwen3VLProcessor(image_processor=image, tokenizer=tokenizer, video_processor=clip, chat_template=CHAT_TEMPLATE)
    processor.save_pretrained(directory)
