"""Draws on vLLM servers over HTTP."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.config import VLLMEngineConfig
from headrace.encoding import Encoder
from headrace.records import TRIAL, Completion, EngineDown, SampleRequest
from headrace.sampling.stops import Stops
from headrace.sampling.vllm.channel import spare_rows
from headrace.sampling.vllm.control import error_text
from headrace.sampling.vllm.exchange import ROUTE, AnswerError, Reader, sampling_params
from headrace.sampling.vllm.fleet import Fleet, Place
from headrace.sampling.vllm.media import Hashes, Item, features, items

MOST_FAILURES = 3
"""Internal errors of servers that are up, after which a request is given up."""
_MEET = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}


@dataclass
class _Task:
    """One request on its way."""

    request: SampleRequest
    body: dict[str, Any]
    media: list[Item]
    home: int
    epoch: int
    end: float = 0.0
    """When it must be done; set when it is first sent."""
    failures: int = 0
    given: "asyncio.Task[bool] | None" = None
    """The introduction of its media that it relies on."""

    @property
    def name(self) -> str:
        return f"response {self.request.index} of question {self.request.prompt.question.id}"

    @property
    def hashes(self) -> tuple[str, ...]:
        return tuple(item.hash for item in self.media)


class VLLMEngine:
    """The `Engine` that draws on vLLM servers.

    All requests of a prompt go to one server, which computes it and its pictures once; prompts go to the least busy one. A request
    whose server died is drawn again with its seed, on another server or on the same once it is back. ``engine.request_deadline``
    bounds each request from the moment it is sent: then it is aborted, and returns what it has.
    """

    def __init__(self, urls: Sequence[str], encoder: Encoder, config: VLLMEngineConfig, *, pushed: bool = False) -> None:
        """Args:
        urls: ``http://host:port`` of each server.
        encoder: of the same model.
        config: bounds.
        pushed: the servers were given weights, so one that draws with others was started anew.

        Raises:
            ValueError: the model has no spare rows, or there is no server.
        """
        if not urls:
            raise ValueError("engine: no vLLM server to draw on")
        self.urls = [url.rstrip("/") for url in urls]
        self.encoder, self.config, self._pushed = encoder, config, pushed
        self._rows = spare_rows(encoder)
        self._reader = Reader(encoder, self._rows)
        self._fleet: Fleet | None = None
        self._context = 0
        self._epoch = 0
        self._hashes: Hashes = {}

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """One completion per request, in order.

        Raises:
            ValueError: a request cannot be drawn: its prompt leaves no room, its media cannot be used, or the server refuses its
                parameters.
            EngineDown: a server gave no answer within the deadline, or died and none came back in time; the message names it.
        """
        fleet = await self._connected()
        limits = Stops(requests, self._context, self.encoder).limits
        media: dict[int, list[Item]] = {}
        tasks = [self._task(request, int(limit), media) for request, limit in zip(requests, limits, strict=True)]
        work = [asyncio.create_task(self._draw(fleet, task)) for task in tasks]
        try:
            return list(await asyncio.gather(*work))
        except BaseException:
            for drawing in work:
                drawing.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            raise

    async def abort(self) -> None:
        """End all requests under way; each returns what it has, with finish reason ``abort``."""
        self._epoch += 1
        if self._fleet is not None:
            await asyncio.gather(*(self._fleet.abort(place, sorted(place.running)) for place in self._fleet.places))

    async def close(self) -> None:
        """Close the connections."""
        fleet, self._fleet = self._fleet, None
        if fleet is not None:
            await fleet.close()

    async def _connected(self) -> Fleet:
        """The servers, for the running event loop."""
        if self._fleet is None or self._fleet.loop is not asyncio.get_running_loop():
            fleet = Fleet(self.urls, self.config)
            room = [getattr(self.encoder.config.get_text_config(), "max_position_embeddings", None), await fleet.context()]
            self._context = min(tokens for tokens in room if tokens)
            self._fleet = fleet
        return self._fleet

    def _task(self, request: SampleRequest, limit: int, media: dict[int, list[Item]]) -> _Task:
        """A request ready to be sent; ``media`` holds those of the prompts so far, by their homes."""
        prompt = request.prompt
        body: dict[str, Any] = {
            "token_ids": prompt.token_ids.tolist(),
            "sampling_params": sampling_params(request, limit, self.encoder, self._rows),
        }
        home = hash((prompt.question.media, prompt.token_ids.tobytes()))
        if home not in media:
            media[home] = items(self.encoder, prompt, self._hashes)
        return _Task(request, body, media[home], home, self._epoch)

    async def _draw(self, fleet: Fleet, task: _Task) -> Completion:
        while True:
            place = fleet.home(task.home)
            place.waiting += 1
            try:
                async with place.turns:
                    if task.epoch != self._epoch:
                        return _nothing()
                    task.end = task.end or time.monotonic() + self.config.request_deadline
                    completion = await self._attempt(fleet, place, task)
            finally:
                place.waiting -= 1
            if completion is not None:
                return completion
            await fleet.recover(place, task.name, task.end)

    async def _attempt(self, fleet: Fleet, place: Place, task: _Task) -> Completion | None:
        """Draw on that server; None if it died or failed, which may pass."""
        body = task.body
        if task.media:
            if not await self._introduced(fleet, place, task):
                return None
            if task.epoch != self._epoch:
                return _nothing()
            body = body | {"features": features(task.media, whole=False)}
        content = self._checked(place, task, await fleet.generate(place, body, task.name, task.end))
        if content is None:
            if place.known.get(task.hashes) is task.given:  # it may have forgotten them; once is enough to give them again
                place.known.pop(task.hashes, None)
            return None
        try:
            drawn = self._reader.read(content, task.request)
        except AnswerError as error:
            raise EngineDown(f"{place.url}: {task.name}: {error}") from None
        if TRIAL in drawn.labels:
            return await self._attempt(fleet, place, task)  # from the same seed, with the weights that it has by now
        pushed = self._pushed or any(label.isdigit() for label in place.labels)
        place.labels.update(drawn.labels)
        if pushed and not all(label.isdigit() for label in drawn.labels):
            raise EngineDown(f"{place.url}: draws with weights that this run never pushed: it was started anew")
        return drawn.completion

    async def _introduced(self, fleet: Fleet, place: Place, task: _Task) -> bool:
        """Whether the server has a prompt's media. The first request of a prompt gives them, with the prompt, so that both are computed
        once; the others wait for it."""
        giving = place.known.get(task.hashes)
        if giving is None or (giving.done() and (giving.cancelled() or giving.exception() or not giving.result())):
            giving = place.known[task.hashes] = asyncio.create_task(self._introduce(fleet, place, task))
        task.given = giving
        return await asyncio.shield(giving)

    async def _introduce(self, fleet: Fleet, place: Place, task: _Task) -> bool:
        body = task.body | {"sampling_params": _MEET, "features": features(task.media, whole=True)}
        return self._checked(place, task, await fleet.generate(place, body, task.name, task.end)) is not None

    def _checked(self, place: Place, task: _Task, response: Any) -> bytes | None:
        """The content of a response; None if the server died or failed, which may pass."""
        if response is None:
            return None
        code = response.status_code
        if code == 400:
            raise ValueError(f"{task.name}: {place.url} refuses it ({error_text(response)})")
        if code >= 500 and task.failures < MOST_FAILURES:
            task.failures += 1
            return None
        if code != 200:
            raise EngineDown(f"{place.url}: {ROUTE} failed with HTTP {code} for {task.name} ({error_text(response)})")
        content: bytes = response.content
        return content


def _nothing() -> Completion:
    """A response that was aborted before its first token."""
    return Completion(
        np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32), np.zeros(0, dtype=bool), np.zeros(0, dtype=np.int32), "abort"
    )
