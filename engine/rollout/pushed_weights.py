"""Gives vLLM servers the learner's weights, version by version."""

from collections.abc import Callable, Sequence
from functools import partial

from headrace.config import VLLMEngineConfig
from headrace.policy.adapters import named_weights
from headrace.policy.model import Policy
from headrace.policy.parallel import Parallel
from headrace.records import EngineDown
from headrace.rollout.servers import Servers, wait_until_back
from headrace.sampling.vllm.control import Control
from headrace.sync.push import WeightSync
from headrace.sync.servers import SyncError

_TRIES = 3
"""Pushes that may fail one after the other while no server dies."""


class PushedWeights:
    """The weights of vLLM servers: every ``interval`` batches make a parameter version, which is pushed to all of them.

    A push that failed is repeated as a whole, once a server that had died is back. When it keeps failing the run ends, since nothing may be
    drawn with weights that are not proven.
    """

    def __init__(
        self,
        policy: Policy,
        config: VLLMEngineConfig,
        interval: int,
        parallel: Parallel,
        servers: Servers | None,
        score: Callable[[Sequence[int]], Sequence[float]],
    ) -> None:
        """Args:
        servers: on rank 0.
        score: ``WeightSync``'s.
        """
        self._config, self._interval, self._parallel, self._servers = config, interval, parallel, servers
        self._controls = [] if servers is None else [self._control(servers, number) for number in range(len(servers.urls))]
        ask = None if servers is None else lambda: self._controls
        self._sync = WeightSync(policy, ask, config, parallel, score, partial(named_weights, policy.model))
        self._pushed: tuple[int, ...] | None = None  # the generations of the servers that have the weights
        self._newest = -1  # batches that those weights have seen

    def refresh(self, step: int, *, always: bool = False) -> dict[str, float] | None:
        due = always or self._newest < 0 or step % self._interval == 0
        return self.push(step) if due and step != self._newest else None

    def push(self, step: int) -> dict[str, float]:
        for tries_left in reversed(range(_TRIES)):
            generations = self._servers.generations() if self._servers else None
            try:
                report = self._sync.push(step // self._interval)
            except SyncError:
                if not self._worth_repeating(tries_left):
                    raise
                continue
            self._pushed, self._newest = generations, step
            return report.metrics()
        raise AssertionError("the last try raises")

    def overdue(self) -> bool:
        return self._servers is not None and self._servers.generations() != self._pushed

    def close(self) -> None:
        """Give back what the transport holds."""
        self._sync.close()
        for control in self._controls:
            control.close()

    def _worth_repeating(self, tries_left: int) -> bool:
        """Whether to push once more, when every server answers again; all ranks alike."""
        failure = None
        if self._servers is not None:
            try:
                wait_until_back(self._servers, self._controls, self._config.start_deadline)
            except EngineDown as error:
                failure = str(error)
        reason = self._parallel.broadcast_json(failure)
        if reason is not None:
            raise EngineDown(reason)
        return tries_left > 0

    @staticmethod
    def _control(servers: Servers, number: int) -> Control:
        return Control(servers.urls[number], generation=lambda: servers.generations()[number])
