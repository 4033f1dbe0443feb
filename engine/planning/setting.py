"""What is simulated: a topology, its schedule and its rates."""

from dataclasses import dataclass
from typing import Literal

from headrace.planning.rates import Rates
from headrace.planning.workload import Workload


@dataclass(frozen=True, slots=True)
class Setting:
    """One topology under one schedule."""

    batch: int
    """Groups of one batch."""
    sync_interval: int
    """Batches between two pushes."""
    slots: int
    """Groups admitted and not released."""
    group_size: int
    first_wave: int
    """Rollouts of a group that are drawn first; ``group_size`` when there is one wave."""
    max_tokens: int
    updates: int
    """Optimizer steps per batch."""
    micro_batch_tokens: int
    servers: int
    rows: int
    """Rows one server draws at once."""
    ranks: int
    """Learner ranks."""
    rates: Rates
    workload: Workload
    order: Literal["admission", "completion"] = "admission"
    """Which groups make a batch: the oldest admitted, as here, or the first that are complete, as elsewhere."""
