"""Client of an OpenAI-compatible chat server: bounded concurrency, deadlines, retries, tokens counted."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

import httpx

from headrace.questions.hopchain.records import Cost
from headrace.questions.hopchain.roles import Refused, Reply, ServerDown
from headrace.questions.hopchain.settings import ServerConfig

_PASSING = {408, 409, 425, 429, 500, 502, 503, 504, 529}
"""Statuses after which the same request may succeed."""
_REFUSED = {400, 413, 422}
"""Statuses that concern this request alone: too long, or pictures that the server cannot read."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 15.0


class Chat:
    """One server and model.

    A request that fails in passing is sent again, ever later, until the server has not answered for ``patience`` seconds; then
    ``ServerDown``. Calls that failed count as calls.
    """

    def __init__(self, config: ServerConfig, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.config = config
        self._room = asyncio.Semaphore(config.concurrency)
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(config.timeout, connect=min(10.0, config.timeout)),
            headers=_key(config),
            limits=httpx.Limits(max_connections=config.concurrency, max_keepalive_connections=config.concurrency),
            transport=transport,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], *, temperature: float = 0.0, seed: int = 0, json_mode: bool = False
    ) -> Reply:
        """The reply to ``messages``.

        Raises:
            ServerDown: no answer for ``patience`` seconds, or an answer that no request of this kind would get past.
            Refused: the server cannot serve this one request.
        """
        body: dict[str, Any] = {
            "model": self.config.model,
            "messages": list(messages),
            "max_tokens": self.config.max_tokens,
            "temperature": temperature,
            "seed": seed,
        }
        if json_mode and self.config.json_mode:
            body["response_format"] = {"type": "json_object"}
        async with self._room:
            return await self._persist(body)

    async def _persist(self, body: dict[str, Any]) -> Reply:
        """Send until there is an answer or patience ends."""
        began, pause, calls = monotonic(), _FIRST_PAUSE, 0
        while True:
            calls += 1
            try:
                return await self._send(body, calls)
            except (httpx.HTTPError, _Passing) as error:
                if monotonic() - began + pause > self.config.patience:
                    raise ServerDown(
                        f"{self.config.url}: the server of {self.config.model} does not answer ({_reason(error)}, {calls} tries in "
                        f"{monotonic() - began:.0f} s); what is done is kept, the same command goes on"
                    ) from None
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _send(self, body: dict[str, Any], calls: int) -> Reply:
        response = await self._client.post(f"{self.config.url}/chat/completions", json=body)
        status = response.status_code
        if status in _PASSING:
            raise _Passing(f"HTTP {status}")
        if status in _REFUSED:
            raise Refused(f"HTTP {status}: {_remark(response)}")
        if status != 200:
            raise ServerDown(
                f"{self.config.url}: HTTP {status} for model {self.config.model!r} ({_remark(response)}); check url, model and key_variable"
            )
        try:
            answer = response.json()
            text = answer["choices"][0]["message"]["content"]
            usage = answer.get("usage") or {}
            cost = Cost(
                calls=calls, prompt_tokens=int(usage.get("prompt_tokens") or 0), completion_tokens=int(usage.get("completion_tokens") or 0)
            )
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise _Passing("its answer is no chat completion") from None
        return Reply(text if isinstance(text, str) else "", cost)


class _Passing(Exception):  # noqa: N818
    """May go better the next time."""


def _key(config: ServerConfig) -> dict[str, str]:
    if config.key_variable is None:
        return {}
    key = os.environ.get(config.key_variable)
    if not key:
        raise ValueError(f"models: the environment variable {config.key_variable} (key_variable of {config.url}) is not set")
    return {"Authorization": f"Bearer {key}"}


def _remark(response: httpx.Response) -> str:
    return " ".join(response.text.split())[:200] or response.reason_phrase


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
