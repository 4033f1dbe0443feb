"""From what a router quotes of a response to the tokens it means."""

import codecs
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from headrace.encoding import Encoder
from headrace.records import Array, Prompt

WINDOW = 4  # tokens before one that may change how it is written


class Quote(NamedTuple):
    """A passage of a response, quoted."""

    text: str
    occurrence: int = 1
    """Which of the passages that read so, from 1."""


@dataclass(frozen=True, slots=True)
class Claims:
    """Quotes as token spans."""

    spans: tuple[tuple[int, int], ...] = ()
    """[first, past the last) in the response's tokens, in the order of the quotes; they may overlap."""
    unaligned: int = 0
    """Quotes that are nowhere in the response."""
    in_answer: int = 0
    """Quotes of the final answer itself, left out."""


@dataclass(frozen=True, slots=True)
class ResponseText:
    """A response as text, and which characters each token wrote."""

    text: str
    starts: Array  # [L] int64, non-decreasing
    ends: Array  # [L] int64, past the last; tokens that share a character both have it
    prefilled: int = 0
    """Tokens at the front that belong to the prompt."""

    def claims(self, quotes: Sequence[Quote]) -> Claims:
        """The token spans of quotes."""
        found: list[tuple[int, int]] = []
        unaligned = in_answer = 0
        answers = answer_regions(self.text)
        for quote in quotes:
            place = find(self.text, quote)
            span = None if place is None else self.tokens(*place)
            if place is None or span is None:
                unaligned += 1
            elif any(start <= place[0] and place[1] <= end for start, end in answers):
                in_answer += 1
            else:
                found.append(span)
        return Claims(tuple(dict.fromkeys(found)), unaligned, in_answer)

    def tokens(self, start: int, end: int) -> tuple[int, int] | None:
        """The response's tokens whose characters meet [start, end); None when there are none."""
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.starts, end, side="left"))
        first, last = max(0, first - self.prefilled), last - self.prefilled
        return (first, last) if first < last else None


class TokenReader:
    """Reads responses of one tokenizer, token by token."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self._written: dict[int, bytes] = {}

    def read(self, prompt: Prompt, token_ids: Sequence[int] | Array) -> ResponseText:
        """A response with the think tag that the prompt pre-filled; its end token writes nothing."""
        ids = [int(index) for index in token_ids]
        ended = bool(ids) and ids[-1] in self.encoder.eos_ids
        prefilled = int(prompt.prefilled and self.encoder.think_open is not None)
        whole = [self.encoder.think_open, *ids] if prefilled else ids
        spoken = whole[:-1] if ended else whole
        text, starts, ends = (self._read_bytes if self._byte_level else self._read_windows)(spoken)
        if ended:
            starts, ends = [*starts, len(text)], [*ends, len(text)]
        return ResponseText(text, np.asarray(starts, dtype=np.int64), np.asarray(ends, dtype=np.int64), prefilled)

    @cached_property
    def _byte_level(self) -> bool:
        """Whether each token stands for bytes, as in byte-level BPE."""
        backend = getattr(self.encoder.tokenizer, "backend_tokenizer", None)
        decoder: Any = None if backend is None else backend.decoder
        return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    def _read_bytes(self, ids: Sequence[Any]) -> tuple[str, list[int], list[int]]:
        """By the bytes of every token: a character whose bytes several tokens write belongs to all of them."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        parts: list[str] = []
        starts: list[int] = []
        ends: list[int] = []
        unfinished: list[int] = []  # tokens whose last character is not complete
        length = 0
        for place, index in enumerate(ids):
            written = decoder.decode(self._bytes(index))
            starts.append(length)
            if written:
                for earlier in unfinished:
                    ends[earlier] = length + 1
                unfinished = []
            length += len(written)
            ends.append(length)
            parts.append(written)
            if decoder.getstate()[0]:
                unfinished.append(place)
        parts.append(decoder.decode(b"", final=True))
        for earlier in unfinished:
            ends[earlier] = length + len(parts[-1])
        return "".join(parts), starts, ends

    def _bytes(self, index: int) -> bytes:
        """What a token of a byte-level vocabulary writes."""
        if index not in self._written:
            tokenizer = self.encoder.tokenizer
            token = tokenizer.convert_ids_to_tokens(index) if index < len(tokenizer) else None
            added = index in tokenizer.added_tokens_decoder
            text = token or ""
            known = not added and all(character in _BYTE_OF for character in text)
            self._written[index] = bytes(_BYTE_OF[character] for character in text) if known else text.encode()
        return self._written[index]

    def _read_windows(self, ids: Sequence[Any]) -> tuple[str, list[int], list[int]]:
        """By what each token adds to the text of the few before it; for tokenizers that join words by rules of their own."""
        parts: list[str] = []
        starts: list[int] = []
        ends: list[int] = []
        length = before = 0  # characters written, tokens that wrote them
        for place in range(len(ids)):
            first = max(0, before - WINDOW)
            together, alone = self.encoder.decode(ids[first : place + 1]), self.encoder.decode(ids[first:before])
            written = together[len(alone) :] if together.startswith(alone) else self.encoder.decode(ids[before : place + 1])
            starts.append(length)
            if place + 1 < len(ids) and (not written or "\ufffd" in written):  # a character that the next token may complete
                ends.append(length)
                continue
            for earlier in range(before, place):
                ends[earlier] = max(ends[earlier], length + 1)
            parts.append(written)
            length += len(written)
            ends.append(length)
            before = place + 1
        return "".join(parts), starts, ends


def find(text: str, quote: Quote) -> tuple[int, int] | None:
    """[start, end) of a quote in ``text``: as it stands, or else with white space collapsed and accents composed."""
    exact = _nth(text, quote.text, quote.occurrence)
    if exact is not None:
        return exact
    plain, places = _normalised(text)
    wanted, _ = _normalised(quote.text)
    loose = _nth(plain, wanted.strip(), quote.occurrence)
    return None if loose is None else (places[loose[0]], places[loose[1]])


def _nth(text: str, wanted: str, occurrence: int) -> tuple[int, int] | None:
    at = -len(wanted)
    for _ in range(occurrence):
        at = text.find(wanted, at + len(wanted)) if wanted else -1
        if at < 0:
            return None
    return at, at + len(wanted)


def _normalised(text: str) -> tuple[str, list[int]]:
    """Text with runs of white space as one space and composed characters (NFC); where each character began, and the end."""
    parts: list[str] = []
    places: list[int] = []
    for cluster in _CLUSTER.finditer(text):
        plain = " " if cluster.group().isspace() else unicodedata.normalize("NFC", cluster.group())
        parts.append(plain)
        places += [cluster.start()] * len(plain)
    return "".join(parts), [*places, len(text)]


def answer_regions(text: str) -> list[tuple[int, int]]:
    """[start, end) of the last answer block and of the last box, tags included; to the end of the text where one is not closed."""
    regions = []
    block = text.rfind("<answer>")
    if block >= 0:
        close = text.find("</answer>", block)
        regions.append((block, len(text) if close < 0 else close + len("</answer>")))
    box = text.rfind("\\boxed{")
    if box >= 0:
        regions.append((box, _closing_brace(text, box + len("\\boxed"))))
    return regions


def _closing_brace(text: str, start: int) -> int:
    """Past the brace that closes the one at ``start``; escaped braces do not count."""
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return brace.end()
    return len(text)


def _byte_alphabet() -> dict[str, int]:
    """Character to byte of byte-level vocabularies: printable Latin-1 stands for itself, the other bytes for 256 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_MARKS = "\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\u3099\u309a\ufe20-\ufe2f"  # combining marks
_CLUSTER = re.compile(rf"\s+|\S[{_MARKS}]*")
