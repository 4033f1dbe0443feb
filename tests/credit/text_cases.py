"""Tokenizers as the reader of responses sees them."""

from types import SimpleNamespace
from typing import Any

from headrace.policy.scratch import word_tokenizer


def encoder_of(tokenizer: Any, end: str = "<|end|>") -> Any:
    """What the reader needs of an encoder."""

    def decode(ids: Any) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    end_id, think = (tokenizer.convert_tokens_to_ids(token) for token in (end, "<think>"))
    return SimpleNamespace(tokenizer=tokenizer, eos_ids=(end_id,), think_open=think, decode=decode)


def word_encoder(*more: str) -> Any:
    return encoder_of(word_tokenizer(["blue", "red", "circle", "sum", ";", "9", *more]))
