"""Tiny models made on the spot: a Hugging Face directory with random weights and a word-level tokenizer.

They learn the generated tasks on a laptop in a minute or two and pass through every path that a large model takes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from headrace.config import ScratchTextModel

PAD, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
HEAD_DIM = 32  # independent of the width; the smallest that fused attention kernels accept
MAX_POSITIONS = 2048
_SPARE_ROWS = 2  # head rows that no token uses: an engine's sampler may carry flags in them
_ROW_MULTIPLE = 16

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|> ' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ ' <|end|>' }}{% endif %}{{ ' ' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


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
        vocab_size=head_rows(len(tokenizer)),
        hidden_size=source.hidden,
        intermediate_size=2 * source.hidden,
        num_hidden_layers=source.layers,
        num_attention_heads=source.heads,
        num_key_value_heads=source.heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with _seeded(seed):
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def word_tokenizer(
    vocabulary: Sequence[str], media_tokens: Sequence[str] = (), chat_template: str = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per word: text is split at white space, decoding joins with single spaces.

    A word outside the vocabulary is an error: there is no unknown token that would hide it.

    Raises:
        ValueError: a word is empty, repeated, holds white space or is a control token.
    """
    control = [PAD, END, SYSTEM, USER, ASSISTANT, *media_tokens]
    seen: set[str] = set()
    for word in vocabulary:
        if not word or word.split() != [word] or word in seen or word in control or word in TAGS:
            raise ValueError(f"vocabulary: {word!r} is repeated, reserved, empty or holds white space; expected distinct words")
        seen.add(word)
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}))
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
        chat_template=chat_template,
    )


def head_rows(tokens: int) -> int:
    """Rows of the embedding and the head for a tokenizer of that many tokens: spare rows, rounded up."""
    return -(-(tokens + _SPARE_ROWS) // _ROW_MULTIPLE) * _ROW_MULTIPLE


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw initial weights from ``seed`` and leave the global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
