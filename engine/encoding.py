"""Text and media to token ids and back, and what the sampler and the loss must know about the vocabulary."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from headrace.media import MediaLoader, media_loader
from headrace.records import Media, Prompt, Question

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CONTENT_TAGS = (THINK_OPEN, THINK_CLOSE, "<answer>", "</answer>")
"""Tags a response is made of: never banned, even where a tokenizer calls them special."""
_RESERVED = re.compile(r"<\|.*\|>")
_PLACEHOLDER = re.compile(r"<(image|video)>")


@cache  # one tokenizer per directory and process: a loader's tokenizer is shared and extended only once
def load_tokenizer(directory: Path) -> tuple[PreTrainedTokenizerBase, tuple[int, ...]]:
    """Tokenizer of a model directory in which both think tags are single tokens.

    A tokenizer without them gets them added behind its last token, so encoder and policy of one directory always agree.

    Returns:
        The tokenizer and the ids that were added, to be initialised by the policy.

    Raises:
        ValueError: the directory has no tokenizer.
    """
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise ValueError(f"{directory}: no usable tokenizer (neither tokenizer.json nor tokenizer_config.json is there)")
    try:
        loader = media_loader(directory)
        tokenizer = loader.processor.tokenizer if loader is not None else AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{directory}: no usable tokenizer ({' '.join(str(error).split())[:200]})") from None
    return tokenizer, add_think_tags(tokenizer)


def add_think_tags(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Make both think tags single tokens; returns the new ids, none where they are already."""
    known = len(tokenizer)
    tokenizer.add_tokens([tag for tag in (THINK_OPEN, THINK_CLOSE) if single_token(tokenizer, tag) is None])
    return tuple(range(known, len(tokenizer)))


def single_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    """Id of the one token that ``text`` is, or None."""
    index: Any = tokenizer.convert_tokens_to_ids(text)
    if index is None or index == tokenizer.unk_token_id:
        return None
    return index if tokenizer.encode(text, add_special_tokens=False) == [index] else None


def end_ids(directory: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a response: the generation configuration's, then the tokenizer's; those the tokenizer does not know are left out."""
    ids: list[int] = []
    if (directory / "generation_config.json").exists():
        stated = GenerationConfig.from_pretrained(directory).eos_token_id
        ids += stated if isinstance(stated, list) else [stated]
    ids.append(tokenizer.eos_token_id)
    ends = tuple(dict.fromkeys(int(i) for i in ids if i is not None and i < len(tokenizer)))
    if not ends:
        raise ValueError(f"{directory}: neither the tokenizer nor generation_config.json names an end token")
    return ends


def media_ids(config: PreTrainedConfig) -> dict[str, int]:
    """The model configuration's media tokens by name: ``image_token_id``, ``vision_start_token_id``, …; empty for a text model."""
    names = ("image", "video", "vision_start", "vision_end", "audio")
    found = {f"{name}_token_id": getattr(config, f"{name}_token_id", None) for name in names}
    return {name: index for name, index in found.items() if index is not None}


@dataclass(frozen=True, eq=False, repr=False)
class Encoder:
    """Tokenizer, processor and chat template of one model directory."""

    directory: Path
    tokenizer: PreTrainedTokenizerBase
    media: MediaLoader | None
    config: PreTrainedConfig
    eos_ids: tuple[int, ...]
    vocab_size: int
    """Rows of the language model's head."""
    think_open: int | None
    think_close: int | None
    banned_ids: tuple[int, ...]
    """Ids the policy never samples and every softmax leaves out: media, reserved and unused ones."""
    think_prefill: bool
    system_prompt: str | None
    max_prompt_tokens: int

    @classmethod
    def load(
        cls, directory: Path, *, think_prefill: bool, system_prompt: str | None, max_prompt_tokens: int, stop_ids: Sequence[int] = ()
    ) -> "Encoder":
        """Read tokenizer and processor of a Hugging Face model directory.

        Control tokens among ``stop_ids`` become end ids: a token that is banned could never end a response.

        Raises:
            ValueError: the directory lacks a configuration or tokenizer, or names no end token.
        """
        directory = Path(directory)
        tokenizer, _ = load_tokenizer(directory)
        config = AutoConfig.from_pretrained(directory)
        eos_ids = end_ids(directory, tokenizer)
        vocab_size = max(config.get_text_config().vocab_size, len(tokenizer))
        think_open, think_close = single_token(tokenizer, THINK_OPEN), single_token(tokenizer, THINK_CLOSE)
        reserved = _banned(tokenizer, config, vocab_size, keep={*eos_ids, think_open, think_close})
        eos_ids += tuple(index for index in stop_ids if index in reserved)
        return cls(
            directory=directory,
            tokenizer=tokenizer,
            media=media_loader(directory),
            config=config,
            eos_ids=eos_ids,
            vocab_size=vocab_size,
            think_open=think_open,
            think_close=think_close,
            banned_ids=tuple(index for index in reserved if index not in eos_ids),
            think_prefill=think_prefill,
            system_prompt=system_prompt,
            max_prompt_tokens=max_prompt_tokens,
        )

    @property
    def processor(self) -> Any:
        """The model's processor; None for a text model."""
        return None if self.media is None else self.media.processor

    @cached_property
    def lexical(self) -> np.ndarray:
        """bool [vocab_size]: tokens the ``lexical`` filter lets be masked: with a letter, not special, no tag."""
        allowed = np.zeros(self.vocab_size, dtype=bool)
        excluded: set[int | None] = {*self.banned_ids, *self.eos_ids, *self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        excluded |= {single_token(self.tokenizer, tag) for tag in CONTENT_TAGS}
        ids = [index for index in range(len(self.tokenizer)) if index not in excluded]
        texts = self.tokenizer.batch_decode([[index] for index in ids], clean_up_tokenization_spaces=False)
        allowed[ids] = [any(character.isalpha() for character in text) for text in texts]
        return allowed

    def encode(self, question: Question) -> Prompt:
        """Render the chat template, put one token per visual feature in place of each medium, and open the think tag if configured.

        Raises:
            ValueError: media do not fit their placeholders, a file cannot be used, the model takes no media, a message's text contains
                the model's own media tokens, or the prompt is too long; the message names the question.
        """
        try:
            text = self._render(question)
        except (ValueError, TemplateError) as error:
            raise ValueError(f"question {question.id}: {error}") from None
        prefilled = text.rstrip().endswith(THINK_OPEN)
        try:
            ids = self.tokenizer.encode(text, add_special_tokens=self.tokenizer.chat_template is None)
        except Exception as error:  # the tokenizers library raises nothing narrower
            raise ValueError(f"question {question.id}: cannot be tokenized ({error})") from None
        if self.think_prefill and not prefilled:
            assert self.think_open is not None
            ids.append(self.think_open)
            prefilled = True
        if len(ids) > self.max_prompt_tokens:
            raise ValueError(f"question {question.id}: the prompt has {len(ids)} tokens, max_prompt_tokens is {self.max_prompt_tokens}")
        context = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        if context is not None and len(ids) >= context:
            raise ValueError(f"question {question.id}: the prompt has {len(ids)} tokens, the model's context is {context}")
        return Prompt(question, np.asarray(ids, dtype=np.int64), prefilled)

    def media_tensors(self, media: Sequence[Media]) -> dict[str, Tensor]:
        """Patches and grids of those media, loaded now (or from the bounded cache); empty for none.

        Raises:
            ValueError: a file is missing or unusable, or the model takes no media.
        """
        if not media:
            return {}
        if self.media is None:
            raise ValueError(f"{media[0].path}: the model {self.directory} takes no {media[0].kind}s")
        return self.media.tensors(media)

    def decode(self, token_ids: Sequence[int] | np.ndarray | Tensor) -> str:
        """Text of the tokens, special tokens kept."""
        ids = np.asarray(token_ids).tolist()
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def response_text(self, prompt: Prompt, token_ids: Sequence[int] | np.ndarray) -> str:
        """A response as rewards read it: with the think tag that the prompt pre-filled, without the end token."""
        ids = [int(index) for index in token_ids]
        if ids and ids[-1] in self.eos_ids:
            ids.pop()
        if prompt.prefilled and self.think_open is not None:
            ids.insert(0, self.think_open)
        return self.decode(ids)

    def token_text(self, token_id: int) -> str:
        """Text of one token; empty for an id beyond the tokenizer."""
        return self.decode([token_id]) if token_id < len(self.tokenizer) else ""

    def save(self, directory: Path) -> None:
        """Write tokenizer, chat template and processor beside exported weights."""
        (self.tokenizer if self.processor is None else self.processor).save_pretrained(directory)

    def _render(self, question: Question) -> str:
        """The prompt's text with media placeholders expanded."""
        messages = [dict(message) for message in question.messages]
        if self.system_prompt is not None and not any(message.get("role") == "system" for message in messages):
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        for message in messages:
            if not isinstance(message.get("content"), str):
                raise ValueError(f"content of the {message.get('role')} message must be text, got {type(message.get('content')).__name__}")
        if question.media and self.media is None:
            raise ValueError(f"it has media, but the model {self.directory} takes none")
        if question.media:
            for kind in ("image", "video"):
                count = sum(item.kind == kind for item in question.media)
                named = sum(message["content"].count(f"<{kind}>") for message in messages)
                if named != count:
                    raise ValueError(f"its messages name <{kind}> {named} times, but it brings {count} {kind}(s)")
            messages = [{**message, "content": _structured(message["content"])} for message in messages]
        reserved = self._media_tokens
        if any(token in _plain(message["content"]) for message in messages for token in reserved):
            raise ValueError(f"a message contains one of the model's media tokens {reserved} as text; write <image> or <video>")
        if self.tokenizer.chat_template is None:
            if question.media:
                raise ValueError(f"it has media, but {self.directory} has no chat template to place them")
            return "\n\n".join(message["content"] for message in messages)
        template: Any = self.tokenizer if self.processor is None else self.processor
        text: str = template.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self._expand(text, question.media) if question.media else text

    @cached_property
    def _media_tokens(self) -> tuple[str, ...]:
        return tuple(self.tokenizer.convert_ids_to_tokens(list(media_ids(self.config).values())))

    def _expand(self, text: str, media: Sequence[Media]) -> str:
        """Put each medium's placeholder text where the template left its pad token; media of a kind go in order."""
        assert self.media is not None
        tokens = {kind: getattr(self.processor, f"{kind}_token") for kind in ("image", "video")}
        waiting = {kind: iter([self.media.load(item).placeholder for item in media if item.kind == kind]) for kind in tokens}
        start, end = (re.escape(getattr(self.processor, f"vision_{side}_token", "")) for side in ("start", "end"))

        def place(match: re.Match[str]) -> str:
            kind = "image" if match["image"] else "video"
            placeholder = next(waiting[kind])
            if kind == "video" and start and placeholder.count(getattr(self.processor, "vision_start_token", "")):
                return placeholder  # Qwen3-VL brackets every frame by itself
            return f"{match['open']}{placeholder}{match['close']}"

        image, video = re.escape(tokens["image"]), re.escape(tokens["video"])
        return re.sub(rf"(?P<open>(?:{start})?)(?:(?P<image>{image})|(?P<video>{video}))(?P<close>(?:{end})?)", place, text)


def _structured(content: str) -> list[dict[str, str]]:
    """``look <image> here`` to the processor's list of text and media parts."""
    parts: list[dict[str, str]] = []
    last = 0
    for match in _PLACEHOLDER.finditer(content):
        if match.start() > last:
            parts.append({"type": "text", "text": content[last : match.start()]})
        parts.append({"type": match[1]})
        last = match.end()
    if last < len(content) or not parts:
        parts.append({"type": "text", "text": content[last:]})
    return parts


def _plain(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _banned(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, vocab_size: int, keep: set[int | None]) -> tuple[int, ...]:
    """Media, chat-control and reserved ids and head rows without a token; never what ``keep`` holds nor a content tag."""
    banned = {*tokenizer.all_special_ids, *media_ids(config).values()}
    for index, token in tokenizer.added_tokens_decoder.items():
        if token.special or _RESERVED.fullmatch(token.content):
            banned.add(index)
    used = set(tokenizer.get_vocab().values())
    banned |= {index for index in range(vocab_size) if index not in used}
    kept: Mapping[str, int | None] = {tag: single_token(tokenizer, tag) for tag in CONTENT_TAGS}
    return tuple(sorted(banned - keep - set(kept.values())))
