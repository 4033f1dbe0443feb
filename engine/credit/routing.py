"""Routes claims beside sampling and learning: starts early, asks once, and never holds a step up for long.

::

    routing = ClaimRouting(config.credit, encoder, config.sampling.group_size)
    routing.start(prompt, rollouts)          # as soon as rollouts are scored; returns at once
    group = await routing.collect(group)     # before the batch is built: its rollouts have their claims
    metrics |= routing.metrics()             # since the last call
    await routing.close()

Whatever goes wrong with a router costs its rollout the claims, so that its gates stay 1, and is counted by reason.
"""

import asyncio
import hashlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.config import CreditConfig, ServerRouterConfig
from headrace.credit.claims import TokenReader
from headrace.credit.router import Router, RouterError, make_router
from headrace.encoding import Encoder
from headrace.records import Group, Prompt, Rollout

log = logging.getLogger(__name__)

Spans = tuple[tuple[int, int], ...]

CACHED = 1 << 16
"""Answers kept; a few hundred bytes each."""
PATIENCE, REST = 8, 30.0
"""After so many requests in a row that nobody answered, the router is left alone for so many seconds."""


@dataclass(eq=False, slots=True)
class _Asked:
    """A request under way, or answered."""

    key: bytes
    task: asyncio.Task[Spans]
    deadline: float
    """Monotonic time at which the claims must be there."""
    collected: bool = False
    """Some rollout has had the answer."""


class ClaimRouting:
    """The claims of rollouts whose advantage may turn out positive. For one event loop.

    A response is asked about once: requests are known by question, media, response tokens. An answer is kept, a failure is not.
    Without PACG, or where every token is a claim, nothing is asked and groups pass through.
    """

    def __init__(self, config: CreditConfig, encoder: Encoder, group_size: int, router: Router | None = None) -> None:
        pacg = config.pacg
        configured = pacg.router if pacg is not None else None
        self.router = router or (make_router(configured) if configured is not None else None)
        self._both_signs = pacg is not None and not pacg.positive_only
        served = configured if isinstance(configured, ServerRouterConfig) else None
        self._deadline = served.deadline if served is not None else 60.0
        self._line = asyncio.Semaphore(served.concurrency if served is not None else 1)
        self._reader = TokenReader(encoder)
        self._group_size = group_size
        self._asked: OrderedDict[bytes, _Asked] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._latencies: list[float] = []
        self._unanswered, self._resting_until = 0, 0.0
        self._waiting, self._waited, self._since = 0, 0.0, 0.0
        self._warned: set[str] = set()

    def start(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> None:
        """Ask about the scored rollouts of a question, as far as they can come out above its mean; must run inside the event loop.

        Of a group that is not complete yet the right answers are asked about; the others follow when it is.
        """
        if self.router is None or not prompt.question.media:
            return
        scored = [rollout for rollout in rollouts if rollout.reward is not None]
        rewards = [rollout.reward.total for rollout in scored if rollout.reward is not None]
        complete = len(rollouts) >= self._group_size
        for rollout, reward in zip(scored, rewards, strict=True):
            assert rollout.reward is not None
            differs = reward != np.mean(rewards) if self._both_signs else reward > np.mean(rewards)
            if differs if complete else rollout.reward.accuracy >= 1:
                self._ask(rollout.prompt or prompt, rollout)

    async def collect(self, group: Group) -> Group:
        """The group with the claims of every rollout whose advantage a gate could change; waits no longer than the deadline."""
        if self.router is None or group.advantages is None:
            return group
        concerned = group.advantages != 0 if self._both_signs else group.advantages > 0
        asked: dict[int, _Asked] = {}
        for place, (rollout, counts) in enumerate(zip(group.rollouts, concerned, strict=True)):
            prompt = rollout.prompt or group.prompt
            if not counts or not len(rollout.completion.token_ids):
                continue
            if prompt.question.media:
                asked[place] = self._ask(prompt, rollout)
            else:
                self._counts["text_only"] += 1
        answers = {place: await self._answer(request) for place, request in asked.items()}
        rollouts = [replace(rollout, claims=answers.get(place)) for place, rollout in enumerate(group.rollouts)]
        return replace(group, rollouts=tuple(rollouts))

    def metrics(self) -> dict[str, float]:
        """Counts since the last call, and seconds: mean answer time, and how long anybody waited in ``collect``."""
        found = {f"router/{name}": float(count) for name, count in sorted(self._counts.items())}
        if self._latencies:
            found["router/latency"] = float(np.mean(self._latencies))
        if self.router is not None:
            found["time/router_wait"] = self._waited
        self._counts.clear()
        self._latencies.clear()
        self._waited = 0.0
        return found

    async def close(self) -> None:
        """Drop what is under way."""
        tasks = [request.task for request in self._asked.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.router is not None:
            await self.router.close()

    # -------------------------------------------------------------------------------------------------- requests

    def _ask(self, prompt: Prompt, rollout: Rollout) -> _Asked:
        """The request about a rollout, made now if it is new."""
        key = _key(prompt, rollout)
        known = self._asked.get(key)
        if known is not None:
            self._asked.move_to_end(key)
            return known
        request = _Asked(key, asyncio.create_task(self._route(prompt, rollout)), time.monotonic() + self._deadline)
        request.task.add_done_callback(_retrieve)
        self._asked[key] = request
        while len(self._asked) > CACHED:
            self._asked.popitem(last=False)
        return request

    async def _route(self, prompt: Prompt, rollout: Rollout) -> Spans:
        """Ask the router and align what it says."""
        assert self.router is not None
        response = self._reader.read(prompt, rollout.completion.token_ids)
        async with self._line:
            if time.monotonic() < self._resting_until:
                raise RouterError("unreachable", "it did not answer lately")
            self._counts["requests"] += 1
            started = time.monotonic()
            try:
                quotes = await self.router.route(prompt.question, response.text)
            except RouterError as error:
                self._note(error)
                raise
            self._unanswered = 0
            self._latencies.append(time.monotonic() - started)
        claims = response.claims(quotes)
        self._counts["spans"] += len(claims.spans)
        self._counts["unaligned_spans"] += claims.unaligned
        self._counts["answer_spans"] += claims.in_answer
        return claims.spans

    def _note(self, error: RouterError) -> None:
        """Log the first failure of each kind; leave a router that does not answer alone for a while."""
        if error.reason not in self._warned:
            self._warned.add(error.reason)
            log.warning("claim router: %s; the gates of such rollouts stay 1, further ones are only counted", error)
        self._unanswered = self._unanswered + 1 if error.reason in ("timeout", "unreachable") else 0
        if self._unanswered >= PATIENCE:
            self._unanswered, self._resting_until = 0, time.monotonic() + REST

    async def _answer(self, request: _Asked) -> Spans | None:
        """The claims, or None with the reason counted; a failed request is forgotten, so that the response may be asked about again."""
        self._begin_waiting()
        try:
            await asyncio.wait({request.task}, timeout=max(0.0, request.deadline - time.monotonic()))
        finally:
            self._end_waiting()
        try:
            if request.task.done():
                claims = request.task.result()
                self._counts["cached"] += request.collected
                request.collected = True
                return claims
            request.task.cancel()
            self._counts["late"] += 1
        except RouterError as error:
            self._counts[error.reason] += 1
        except asyncio.CancelledError:  # by another rollout that reads the same and came too late
            self._counts["late"] += 1
        self._asked.pop(request.key, None)
        return None

    def _begin_waiting(self) -> None:
        if self._waiting == 0:
            self._since = time.monotonic()
        self._waiting += 1

    def _end_waiting(self) -> None:
        self._waiting -= 1
        if self._waiting == 0:
            self._waited += time.monotonic() - self._since


def _key(prompt: Prompt, rollout: Rollout) -> bytes:
    """Hash of all that a router is shown."""
    digest = hashlib.sha256(repr((prompt.question.messages, prompt.question.media)).encode())
    digest.update(np.ascontiguousarray(rollout.completion.token_ids, dtype=np.int64).tobytes())
    return digest.digest()


def _retrieve(task: asyncio.Task[Spans]) -> None:
    """Look at the outcome, or asyncio complains about failures that nobody collected."""
    if not task.cancelled():
        task.exception()
