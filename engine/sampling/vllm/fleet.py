"""The servers as one event loop sees them: which are up, which is least busy, and one HTTP client for all."""

import asyncio
import contextlib
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from headrace.config import VLLMEngineConfig
from headrace.records import EngineDown
from headrace.sampling.vllm.exchange import ABORT_ROUTE, ROUTE

log = logging.getLogger(__name__)

ABORT_SECONDS = 15.0
"""Wait for the rest of a response after its abort was asked for."""
_REMEMBERED = 65_536
_CONNECT_SECONDS = 10.0
_IDLE_SECONDS = 2.0  # the server closes idle connections after five; one that it is just closing would look like its death
_PROBE_SECONDS = 0.5


@dataclass
class Place:
    """One server."""

    url: str
    turns: asyncio.Semaphore
    """Bounds what it is given at once."""
    waiting: int = 0
    """Requests given to it and not yet answered."""
    down: bool = False
    mourned: bool = False
    """Its failure was told."""
    labels: set[str] = field(default_factory=set)
    """Weight versions that its tokens came from."""
    known: dict[tuple[str, ...], "asyncio.Task[bool]"] = field(default_factory=dict)
    """Media it was given, by the hashes of a prompt."""
    running: set[str] = field(default_factory=set)
    """Names of the requests it works on."""


class Fleet:
    """All servers. Not shared between event loops."""

    def __init__(self, urls: Sequence[str], config: VLLMEngineConfig) -> None:
        self.config = config
        self.loop = asyncio.get_running_loop()
        turns = config.max_num_seqs + config.max_num_seqs // 4 + 1  # a few wait in the server, so that it never runs dry
        self.places = [Place(url, asyncio.Semaphore(turns)) for url in urls]
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_IDLE_SECONDS),
            trust_env=False,
        )
        self._probing = asyncio.Lock()
        self._homes: OrderedDict[int, int] = OrderedDict()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def context(self) -> int:
        """Tokens of prompt and response together that every server has room for.

        Raises:
            EngineDown: one does not answer, or not as vLLM.
        """
        limits = []
        for place in self.places:
            try:
                answer = await self._http.get(f"{place.url}/v1/models", timeout=_CONNECT_SECONDS)
                limits += [int(model["max_model_len"]) for model in answer.raise_for_status().json()["data"]]
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                raise EngineDown(f"{place.url}: is no vLLM server that answers ({type(error).__name__}: {error})") from None
        return min(limits)

    def home(self, key: int) -> Place:
        """The server of a prompt: the one it had, if that is up, else the least busy of those that are."""
        up = [index for index, place in enumerate(self.places) if not place.down] or list(range(len(self.places)))
        home = self._homes.pop(key, None)
        if home is None or home not in up:
            home = min(up, key=lambda index: self.places[index].waiting)
        self._homes[key] = home
        if len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)
        return self.places[home]

    async def generate(self, place: Place, body: dict[str, Any], what: str, end: float) -> httpx.Response | None:
        """A server's answer to a drawing request, after an abort if it is not there at ``end``; None when the connection broke.

        Raises:
            EngineDown: no answer, not even to the abort.
        """
        name = uuid.uuid4().hex
        content = msgspec.json.encode({**body, "request_id": name})
        headers = {"Content-Type": "application/json"}
        place.running.add(name)
        posting = asyncio.create_task(self._http.post(place.url + ROUTE, content=content, headers=headers))
        try:
            done, _ = await asyncio.wait([posting], timeout=max(end - time.monotonic(), 0))
            if not done:
                await self.abort(place, [name])
                done, _ = await asyncio.wait([posting], timeout=ABORT_SECONDS)
            if not done:
                deadline = self.config.request_deadline
                raise EngineDown(f"{place.url}: no answer within {deadline:g} s (engine.request_deadline) to {what}, nor to its abort")
            return posting.result()
        except httpx.TransportError:
            return None
        finally:
            posting.cancel()  # closes the connection, upon which the server aborts what it still draws
            place.running.discard(name)

    async def abort(self, place: Place, names: Sequence[str]) -> None:
        """Ask a server to end requests; they are answered with what they have."""
        if names:
            ids = [f"generate-tokens-{name}" for name in names]  # the prefix is the route's
            with contextlib.suppress(httpx.TransportError):
                await self._http.post(place.url + ABORT_ROUTE, json={"request_ids": ids}, timeout=ABORT_SECONDS)

    async def recover(self, place: Place, what: str, end: float) -> None:
        """Wait until some server answers, ``place`` having failed: it died, or it forgot media, which a cleared cache does.

        Raises:
            EngineDown: none does by ``end``, nor within the time that a server may take to start.
        """
        place.down = True
        end = min(time.monotonic() + self.config.start_deadline, end)
        while time.monotonic() < end:
            async with self._probing:
                await asyncio.gather(*(self._probe(place) for place in self.places if place.down))
            if place.down and not place.mourned:
                place.known.clear()
                log.warning("%s does not answer; what it was drawing is drawn again with the same seeds", place.url)
            place.mourned = place.down
            if not all(place.down for place in self.places):
                return
            await asyncio.sleep(_PROBE_SECONDS)
        raise EngineDown(f"{place.url}: died or failed while it drew {what}, and no server came back in time")

    async def _probe(self, place: Place) -> None:
        with contextlib.suppress(httpx.TransportError):
            answer = await self._http.get(f"{place.url}/health", timeout=5.0)
            place.down = answer.status_code != 200
