"""Draws on vLLM servers over HTTP."""

import asyncio
import contextlib
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import numpy as np

from headrace.config import VLLMEngineConfig
from headrace.encoding import Encoder
from headrace.records import Completion, SampleRequest
from headrace.sampling.stops import Stops
from headrace.sampling.vllm.channel import spare_rows
from headrace.sampling.vllm.control import error_text
from headrace.sampling.vllm.exchange import ABORT_ROUTE, ROUTE, AnswerError, Reader, sampling_params
from headrace.sampling.vllm.faults import EngineDown

log = logging.getLogger(__name__)

ABORT_SECONDS = 15.0
"""Wait for the rest of a response after its abort was asked for."""
_REMEMBERED = 65_536
_CONNECT_SECONDS = 10.0
_IDLE_SECONDS = 2.0  # the server closes idle connections after five; one that it is just closing would look like its death
_RETRY_SECONDS = 0.5


@dataclass
class _Place:
    """One server as a session sees it."""

    url: str
    turns: asyncio.Semaphore
    waiting: int = 0
    """Requests given to it and not yet answered."""
    down: bool = False
    labels: set[str] = field(default_factory=set)


@dataclass
class _Session:
    """What belongs to one event loop."""

    loop: asyncio.AbstractEventLoop
    http: httpx.AsyncClient
    places: list[_Place]
    probing: asyncio.Lock
    context: int
    """Tokens of prompt and response together."""


@dataclass
class _Task:
    """One request on its way."""

    request: SampleRequest
    body: dict[str, Any]
    key: int
    epoch: int
    started: float | None = None

    @property
    def name(self) -> str:
        return f"response {self.request.index} of question {self.request.prompt.question.id}"


class VLLMEngine:
    """The `Engine` that draws on vLLM servers.

    All requests of a prompt go to one server, which computes it and its pictures once; prompts go to the least busy one. A request whose
    server died is drawn again with its seed, on another server or on the same once it is back. ``engine.request_deadline`` bounds each
    request from the moment it is sent: then it is aborted, and returns what it has.
    """

    def __init__(
        self, urls: Sequence[str], encoder: Encoder, config: VLLMEngineConfig, *, version: Callable[[], int] | None = None
    ) -> None:
        """Args:
        urls: ``http://host:port`` of each server.
        encoder: of the same model.
        config: bounds.
        version: tells the parameter version that requests start under; keeps the servers' caches of different versions apart.

        Raises:
            ValueError: the model has no spare rows, or there is no server.
        """
        if not urls:
            raise ValueError("engine: no vLLM server to draw on")
        self.urls = [url.rstrip("/") for url in urls]
        self.encoder, self.config, self.version = encoder, config, version
        self._rows = spare_rows(encoder)
        self._reader = Reader(encoder, self._rows)
        self._session: _Session | None = None
        self._homes: OrderedDict[int, int] = OrderedDict()
        self._epoch = 0
        self._running: dict[str, _Place] = {}

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """One completion per request, in order.

        Raises:
            ValueError: a request cannot be drawn: its prompt leaves no room, or the server refuses its parameters.
            EngineDown: a server gave no answer within the deadline, or died and none came back in time; the message names it.
        """
        session = await self._connect()
        stops = Stops(requests, session.context, self.encoder)
        work = [asyncio.create_task(self._draw(session, self._task(*item))) for item in zip(requests, stops.limits, strict=True)]
        try:
            return list(await asyncio.gather(*work))
        except BaseException:
            for task in work:
                task.cancel()  # closes its connection, upon which the server aborts it
            await asyncio.gather(*work, return_exceptions=True)
            raise

    async def abort(self) -> None:
        """End all requests under way; each returns what it has, with finish reason ``abort``."""
        self._epoch += 1
        if self._session is not None:
            for place in self._session.places:
                await self._abort(self._session, place, [name for name, where in self._running.items() if where is place])

    async def close(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.http.aclose()

    # ---------------------------------------------------------------------------------------------- one request

    def _task(self, request: SampleRequest, limit: int) -> _Task:
        body: dict[str, Any] = {
            "token_ids": request.prompt.token_ids.tolist(),
            "sampling_params": sampling_params(request, int(limit), self.encoder, self._rows),
        }
        if self.version is not None:
            body["cache_salt"] = str(self.version())
        return _Task(request, body, hash((request.prompt.question.media, request.prompt.token_ids.tobytes())), self._epoch)

    async def _draw(self, session: _Session, task: _Task) -> Completion:
        while True:
            place = self._home(session, task.key)
            place.waiting += 1
            try:
                async with place.turns:
                    if task.epoch != self._epoch:
                        return _nothing()
                    task.started = task.started or time.monotonic()
                    completion = await self._attempt(session, place, task)
            finally:
                place.waiting -= 1
            if completion is not None:
                return completion
            await self._recover(session, place, task)

    async def _attempt(self, session: _Session, place: _Place, task: _Task) -> Completion | None:
        """Draw on that server; None when it died."""
        response = await self._post(session, place, task)
        if response is None or response.status_code >= 500:
            return None
        if response.status_code == 400:
            raise ValueError(f"{task.name}: {place.url} refuses it ({error_text(response)})")
        if response.status_code != 200:
            raise EngineDown(f"{place.url}: {ROUTE} failed with HTTP {response.status_code} ({error_text(response)})")
        try:
            drawn = self._reader.read(response.content, task.request)
        except AnswerError as error:
            raise EngineDown(f"{place.url}: {task.name}: {error}") from None
        pushed = {label for label in place.labels if label.isdigit()}
        place.labels.update(drawn.labels)
        if pushed and any(not label.isdigit() for label in drawn.labels):
            raise EngineDown(f"{place.url}: draws with weights that this run never pushed; it was started anew by someone else")
        return drawn.completion

    async def _post(self, session: _Session, place: _Place, task: _Task) -> httpx.Response | None:
        """The server's answer, after an abort if it takes too long; None when the connection broke.

        Raises:
            EngineDown: no answer, not even to the abort.
        """
        assert task.started is not None
        name = uuid.uuid4().hex
        content = msgspec.json.encode({**task.body, "request_id": name})
        self._running[name] = place
        posting = asyncio.create_task(session.http.post(place.url + ROUTE, content=content, headers={"Content-Type": "application/json"}))
        try:
            left = task.started + self.config.request_deadline - time.monotonic()
            done, _ = await asyncio.wait([posting], timeout=max(left, 0))
            if not done:
                await self._abort(session, place, [name])
                done, _ = await asyncio.wait([posting], timeout=ABORT_SECONDS)
            if not done:
                raise EngineDown(
                    f"{place.url}: no answer within {self.config.request_deadline:g} s (engine.request_deadline) for {task.name}, "
                    f"and none to its abort within {ABORT_SECONDS:g} s"
                )
            return posting.result()
        except httpx.TransportError:
            return None
        finally:
            posting.cancel()
            del self._running[name]

    async def _abort(self, session: _Session, place: _Place, names: Sequence[str]) -> None:
        if names:
            ids = [f"generate-tokens-{name}" for name in names]  # the route's own prefix
            with contextlib.suppress(httpx.TransportError):
                await session.http.post(place.url + ABORT_ROUTE, json={"request_ids": ids}, timeout=ABORT_SECONDS)

    # ---------------------------------------------------------------------------------------------- servers

    def _home(self, session: _Session, key: int) -> _Place:
        """The server of a prompt: the one it had, if that is up, else the least busy of those that are."""
        up = [index for index, place in enumerate(session.places) if not place.down] or list(range(len(session.places)))
        home = self._homes.pop(key, None)
        if home not in up:
            home = min(up, key=lambda index: session.places[index].waiting)
        self._homes[key] = home
        if len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)
        return session.places[home]

    async def _recover(self, session: _Session, place: _Place, task: _Task) -> None:
        """Wait until some server answers."""
        if not place.down:
            log.warning("%s does not answer; what it was drawing is drawn again with the same seeds", place.url)
        place.down = True
        assert task.started is not None
        end = min(time.monotonic() + self.config.start_deadline, task.started + self.config.request_deadline)
        while time.monotonic() < end:
            await asyncio.sleep(_RETRY_SECONDS)
            async with session.probing:
                await asyncio.gather(*(self._probe(session, place) for place in session.places if place.down))
            if not all(place.down for place in session.places):
                return
        raise EngineDown(f"{place.url}: died while it drew {task.name}, and did not come back in time")

    async def _probe(self, session: _Session, place: _Place) -> None:
        with contextlib.suppress(httpx.TransportError):
            answer = await session.http.get(f"{place.url}/health", timeout=5.0)
            place.down = answer.status_code != 200

    async def _connect(self) -> _Session:
        """The session of the running event loop."""
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.loop is not loop:
            http = httpx.AsyncClient(
                timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
                limits=httpx.Limits(max_connections=None, keepalive_expiry=_IDLE_SECONDS),
                trust_env=False,
            )
            turns = self.config.max_num_seqs + self.config.max_num_seqs // 4 + 1  # a few wait in the server, so that it never runs dry
            places = [_Place(url, asyncio.Semaphore(turns)) for url in self.urls]
            self._session = _Session(loop, http, places, asyncio.Lock(), await self._context(http))
        return self._session

    async def _context(self, http: httpx.AsyncClient) -> int:
        """Tokens of prompt and response together that model and servers have room for."""
        limits = [getattr(self.encoder.config.get_text_config(), "max_position_embeddings", None)]
        for url in self.urls:
            try:
                answer = await http.get(f"{url}/v1/models", timeout=_CONNECT_SECONDS)
                limits += [model.get("max_model_len") for model in answer.raise_for_status().json()["data"]]
            except (httpx.HTTPError, ValueError, KeyError) as error:
                raise EngineDown(f"{url}: is no vLLM server that answers ({type(error).__name__}: {error})") from None
        return min(limit for limit in limits if limit)


def _nothing() -> Completion:
    """A response that was aborted before its first token."""
    return Completion(
        np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32), np.zeros(0, dtype=bool), np.zeros(0, dtype=np.int32), "abort"
    )
