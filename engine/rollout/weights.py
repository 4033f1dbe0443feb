"""How the engine gets the learner's weights: shared, copied in this process, or pushed to servers."""

from typing import Protocol

from headrace.policy import parallel as ranks
from headrace.policy.model import Policy
from headrace.policy.parallel import Parallel


class EngineWeights(Protocol):
    """Keeps the engine's weights as new as the schedule wants them. ``refresh`` and ``push`` are collective."""

    def refresh(self, step: int, *, always: bool = False) -> dict[str, float] | None:
        """After ``step`` batches: give the engine the weights if that is due; metrics, None when it was not.

        ``always``: also between two versions, for an evaluation of just these weights.
        """
        ...

    def push(self, step: int) -> dict[str, float]:
        """Give the engine the weights after ``step`` batches."""
        ...

    def overdue(self) -> bool:
        """On rank 0: an engine came back without its weights."""
        ...


class SharedWeights:
    """Of the local engine: it draws with the learner's own weights, or with a whole copy where those are sharded."""

    def __init__(self, policy: Policy, replica: Policy | None, parallel: Parallel) -> None:
        self._policy, self._replica, self._sharded = policy, replica, parallel.world_size > 1

    def refresh(self, step: int, *, always: bool = False) -> dict[str, float]:
        return self.push(step)

    def push(self, step: int) -> dict[str, float]:
        if self._sharded:
            ranks.gather_full_weights(self._policy, self._replica)
        return {}

    def overdue(self) -> bool:
        return False
