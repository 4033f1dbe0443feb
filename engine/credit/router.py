"""Who says which passages of a response are read directly off the picture: patterns, or a model behind a server.

A router sees picture, question and response, and never the right answer nor the score.
"""

import asyncio
import base64
import functools
import mimetypes
import os
import re
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import httpx
import msgspec

from headrace.config import RouterConfig, RulesRouterConfig, ServerRouterConfig
from headrace.credit.claims import Quote
from headrace.records import Media, Question

MAX_SPANS, MAX_OCCURRENCE = 512, 10_000
RETRY_PAUSE = 0.5  # seconds before a server that could not be reached is asked again
PICTURES_KEPT = 64  # encoded; the rollouts of a group ask about the same ones


class RouterError(Exception):
    """The router gave no usable answer."""

    def __init__(self, reason: Literal["malformed", "refused", "timeout", "unreachable", "media"], detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class Router(Protocol):
    async def route(self, question: Question, response: str) -> list[Quote]:
        """The passages that claim to be read off the picture.

        Raises:
            RouterError: there is no answer.
        """
        ...

    async def close(self) -> None: ...


def make_router(config: RouterConfig) -> Router:
    """The configured router.

    Raises:
        ValueError: the variable that holds the key is not set.
    """
    return RulesRouter(config) if isinstance(config, RulesRouterConfig) else ServerRouter(config)


# ------------------------------------------------------------------------------------------------------ patterns


class RulesRouter:
    """Claims by regular expressions, for vocabularies that are known."""

    def __init__(self, config: RulesRouterConfig) -> None:
        self._patterns = [re.compile(pattern) for pattern in config.patterns]

    async def route(self, question: Question, response: str) -> list[Quote]:
        places: list[tuple[int, int]] = []
        for pattern in self._patterns:
            groups = range(1, pattern.groups + 1) if pattern.groups else (0,)
            places += [match.span(group) for match in pattern.finditer(response) for group in groups if match.group(group)]
        return [_quote(response, start, end) for start, end in sorted(set(places))]

    async def close(self) -> None:
        pass


def _quote(response: str, start: int, end: int) -> Quote:
    """A passage by its words and its number among the passages that read so, as ``claims.find`` counts them."""
    text = response[start:end]
    number, at = 0, -len(text)
    while at < start:
        at = response.find(text, at + len(text))
        number += 1
    return Quote(text, number)


# ------------------------------------------------------------------------------------------------------ server


class Span(msgspec.Struct, forbid_unknown_fields=True):
    """One passage in a reply. Training reads ``text`` and ``occurrence`` of those with ``direct_vef``."""

    text: Annotated[str, msgspec.Meta(min_length=1)]
    direct_vef: bool
    evidence_status: Literal["supported", "contradicted", "unverifiable"]
    occurrence: Annotated[int, msgspec.Meta(ge=1, le=MAX_OCCURRENCE)] = 1
    type: str = ""


class Reply(msgspec.Struct, forbid_unknown_fields=True):
    spans: Annotated[list[Span], msgspec.Meta(max_length=MAX_SPANS)]


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "spans": {
            "type": "array",
            "maxItems": MAX_SPANS,
            "items": {
                "type": "object",
                "properties": {
                    "text": {"type": "string", "minLength": 1},
                    "occurrence": {"type": "integer", "minimum": 1, "maximum": MAX_OCCURRENCE},
                    "type": {"type": "string"},
                    "direct_vef": {"type": "boolean"},
                    "evidence_status": {"type": "string", "enum": ["supported", "contradicted", "unverifiable"]},
                },
                "required": ["text", "occurrence", "type", "direct_vef", "evidence_status"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["spans"],
    "additionalProperties": False,
}
"""What the server is asked to hold its reply to; it is checked here all the same."""


class ServerRouter:
    """Asks a vision-language model behind an OpenAI-compatible server. For one event loop."""

    def __init__(self, config: ServerRouterConfig) -> None:
        headers = {}
        if config.key_variable is not None:
            key = os.environ.get(config.key_variable)
            if not key:
                raise ValueError(f"credit.pacg.router.key_variable: the environment has no {config.key_variable}")
            headers["Authorization"] = f"Bearer {key}"
        self.config = config
        self._instructions = files("headrace.credit").joinpath("prompts/claims.md").read_text(encoding="utf-8")
        limits = httpx.Limits(max_connections=config.concurrency, max_keepalive_connections=config.concurrency)
        self._client = httpx.AsyncClient(headers=headers, timeout=config.timeout, limits=limits)

    async def route(self, question: Question, response: str) -> list[Quote]:
        """The direct claims of ``spans``."""
        return [Quote(span.text, span.occurrence) for span in await self.spans(question, response) if span.direct_vef]

    async def spans(self, question: Question, response: str) -> list[Span]:
        """All that the server marks. A reply that is no valid JSON, or a server that cannot be reached, is tried once more.

        Raises:
            RouterError: there is no answer.
        """
        try:
            body = await asyncio.to_thread(self._body, question, response)
        except OSError as error:
            raise RouterError("media", f"{error.filename}: {error.strerror}") from None
        try:
            return await self._ask(body)
        except RouterError as error:
            if error.reason not in ("malformed", "unreachable"):
                raise
            if error.reason == "unreachable":
                await asyncio.sleep(RETRY_PAUSE)
        return await self._ask(body)

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask(self, body: bytes) -> list[Span]:
        try:
            async with asyncio.timeout(self.config.timeout):
                answer = await self._client.post(
                    f"{self.config.url.rstrip('/')}/chat/completions", content=body, headers={"Content-Type": "application/json"}
                )
        except (TimeoutError, httpx.TimeoutException):
            raise RouterError("timeout", f"no reply within {self.config.timeout:g} s") from None
        except httpx.HTTPError as error:
            raise RouterError("unreachable", str(error) or type(error).__name__) from None
        if answer.status_code >= 500 or answer.status_code == 429:
            raise RouterError("unreachable", f"status {answer.status_code}")
        if answer.status_code >= 400:
            raise RouterError("refused", f"status {answer.status_code}: {answer.text[:200]}")
        return parse(answer.content).spans

    def _body(self, question: Question, response: str) -> bytes:
        """The request; reads the media files."""
        text = f"<question>\n{question_text(question)}\n</question>\n\n<response>\n{response}\n</response>"
        content = [*map(_part, question.media), {"type": "text", "text": text}]
        return msgspec.json.encode(
            {
                "model": self.config.model,
                "messages": [{"role": "system", "content": self._instructions}, {"role": "user", "content": content}],
                "temperature": 0,
                "max_tokens": self.config.max_tokens,
                "response_format": {"type": "json_schema", "json_schema": {"name": "claims", "strict": True, "schema": SCHEMA}},
            }
        )


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Answer(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]


_THOUGHTS = re.compile(r"^.*</think>", re.DOTALL)
_FENCE = re.compile(r"^```(?:json)?\s*(.*?)\s*```$", re.DOTALL)


def parse(answer: bytes) -> Reply:
    """The reply in a chat completion; thoughts before it and a code fence around it are taken off.

    Raises:
        RouterError: it is not what was asked for.
    """
    try:
        content = msgspec.json.decode(answer, type=_Answer).choices[0].message.content or ""
        bare = _THOUGHTS.sub("", content).strip()
        fenced = _FENCE.match(bare)
        return msgspec.json.decode(fenced[1] if fenced else bare, type=Reply)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RouterError("malformed", str(error)) from None


def question_text(question: Question) -> str:
    """What the user said, without placeholders of media."""
    said = [str(message["content"]) for message in question.messages if message.get("role") == "user"]
    return re.sub(r"<(image|video)>\s*", "", "\n\n".join(said)).strip()


def _part(media: Media) -> dict[str, Any]:
    """A picture or clip as a part of the message."""
    kind = f"{media.kind}_url"
    return {"type": kind, kind: {"url": _data_url(media.path)}}


@functools.lru_cache(maxsize=PICTURES_KEPT)
def _data_url(path: str) -> str:
    kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(Path(path).read_bytes()).decode()}"
