"""Queueing simulation of both sides under the schedule that the controller keeps (docs/asynchrony.md)."""

from dataclasses import dataclass

import numpy as np

from headrace.planning.setting import Setting
from headrace.planning.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Simulation:
    """Means over the measured versions; seconds, and shares between 0 and 1."""

    batch_seconds: float
    version_seconds: float
    update_seconds: float
    """Of a version: the learner trains."""
    wait_seconds: float
    """Of a version: the learner waits for groups."""
    sync_seconds: float
    """Of a version: weights are pushed."""
    learner_idle: float
    """Waiting over all of the learner's time."""
    engine_idle: float
    """Share of a server's time without any rollout to draw."""
    engine_rows: float
    """Mean rows that a server draws at once."""
    tokens_per_second: float
    """Response tokens that train, per second."""
    all_tokens_per_second: float
    """Prompt and response tokens that train, per second."""
    max_lag: int
    """Largest lag of a trained group, in versions."""
    mean_lag: float
    learner_spans: tuple[tuple[str, float, float], ...]
    """What the learner did: (update | wait | sync, start, end)."""
    engine_track: tuple[tuple[float, int, int], ...]
    """(time, rows running on all servers, groups complete and not trained)."""
    start: float
    """Where measuring began."""
    end: float


def simulate(setting: Setting, *, versions: int = 6, warm_up: int = 2, seed: int = 0) -> Simulation:
    """Simulate ``warm_up + versions`` parameter versions and measure the last ones.

    Raises:
        ValueError: a server has no room for a row, so nothing would ever be drawn.
    """
    if min(setting.rows, setting.servers, setting.ranks) < 1:
        raise ValueError(
            f"{setting.servers} servers of {setting.rows} rows and {setting.ranks} learner ranks: expected one of each at least"
        )
    run = Timeline(setting, seed)
    run.until(warm_up)
    start = run.now
    for server in run.servers:
        server.advance(start)
        server.busy = server.row_seconds = 0.0
    run.until(warm_up + versions)
    for server in run.servers:
        server.advance(run.now)
    return _measured(run, start, warm_up, versions)


def _measured(run: Timeline, start: float, warm_up: int, versions: int) -> Simulation:
    total = run.now - start
    seconds = {
        kind: sum(end - max(begin, start) for name, begin, end in run.spans if name == kind and end > start and begin < run.now)
        for kind in ("update", "wait", "sync")
    }
    batches = versions * run.setting.sync_interval
    tokens = run.batch_tokens[warm_up * run.setting.sync_interval :][:batches]
    lags = [lag for _, batch in run.batch_lags[warm_up * run.setting.sync_interval :][:batches] for lag in batch]
    servers = len(run.servers)
    return Simulation(
        batch_seconds=total / batches,
        version_seconds=total / versions,
        update_seconds=seconds["update"] / versions,
        wait_seconds=seconds["wait"] / versions,
        sync_seconds=seconds["sync"] / versions,
        learner_idle=seconds["wait"] / total,
        engine_idle=max(0.0, 1 - sum(server.busy for server in run.servers) / servers / total),
        engine_rows=sum(server.row_seconds for server in run.servers) / servers / total,
        tokens_per_second=sum(responses for responses, _ in tokens) / total,
        all_tokens_per_second=sum(everything for _, everything in tokens) / total,
        max_lag=max(lags),
        mean_lag=float(np.mean(lags)),
        learner_spans=tuple(span for span in run.spans if span[2] > start),
        engine_track=tuple(point for point in run.track if point[0] >= start),
        start=start,
        end=run.now,
    )
