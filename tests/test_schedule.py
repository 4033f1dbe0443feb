"""Slots and lag of the asynchronous schedule (docs/asynchrony.md)."""

import random
from collections import deque

import pytest

from headrace.config import Config
from headrace.schedule import max_lag, questions_per_version, slots


def config(questions: int, sync: int, staleness: float, updates: int = 1) -> Config:
    return Config.model_validate(
        {
            "run": {"questions_per_step": questions},
            "model": {"source": {"kind": "scratch_text"}},
            "sampling": {"max_tokens": 8},
            "engine": {"kind": "vllm"},
            "schedule": {"staleness": staleness, "sync_interval": sync},
            "learner": {"updates_per_batch": updates},
        }
    )


def test_ex_3_8_released_values() -> None:
    """EX-3.8: 16 x 8 prompts a pull, 512 a version (4,096 rollouts, 32 updates), 768 slots; 568 may start where 200 are left over."""
    released = config(16 * 8, 4, 0.5, updates=8)
    assert released.run.questions_per_step == 128
    assert questions_per_version(released) == 512
    assert questions_per_version(released) * released.sampling.group_size == 4096
    assert released.schedule.sync_interval * released.learner.updates_per_batch == 32
    assert slots(released) == 768
    assert slots(released) - 200 == 568
    assert round(22_550 / questions_per_version(released), 2) == 44.04
    assert max_lag(released) == 1


def test_ex_3_9_table_3_alone() -> None:
    """EX-3.9: without the released launcher's require_batches: 16, 64, 96."""
    table = config(16, 4, 0.5)
    assert (table.run.questions_per_step, questions_per_version(table), slots(table)) == (16, 64, 96)


@pytest.mark.parametrize(
    ("questions", "sync", "staleness", "expected"),
    [(8, 1, 0.0, 8), (1, 1, 0.5, 1), (1, 2, 0.5, 3), (100, 1, 0.15, 115), (100, 1, 0.29, 129), (10, 1, 1.1, 21), (4, 1, 2.0, 12)],
)
def test_slots_are_exact(questions: int, sync: int, staleness: float, expected: int) -> None:
    assert slots(config(questions, sync, staleness)) == expected


@pytest.mark.parametrize(("staleness", "expected"), [(0.0, 0), (0.5, 1), (1.0, 1), (1.5, 2), (2.0, 2), (3.25, 4)])
def test_lag_is_bounded_by_staleness(staleness: float, expected: int) -> None:
    assert max_lag(config(16, 4, staleness)) == expected


def trained_lags(config: Config, rng: random.Random, versions: int, filtered: float, *, in_order: bool = True) -> list[int]:
    """Lag of every drawn token's version in a random run of the slot rule: events happen in any order the rule allows.

    Without ``in_order`` batches take any groups, as when the first that are complete train first.
    """
    free, engine, trained = slots(config), 0, 0
    waiting: deque[list[int]] = deque()  # versions of a group's tokens, in the order of admission
    lags: list[int] = []
    while engine < versions:
        ready = len(waiting) >= config.run.questions_per_step
        event = rng.choice(["admit"] * 8 * (free > 0) + ["draw"] * (len(waiting) > 0) + ["train"] * ready)
        if event == "admit":
            free -= 1
            waiting.append([engine])
        elif event == "draw":
            group = rng.randrange(len(waiting))
            if rng.random() < filtered:
                del waiting[group]
                free += 1
            else:
                waiting[group].append(engine)
        else:
            if not in_order:
                rng.shuffle(waiting)
            batch = [waiting.popleft() for _ in range(config.run.questions_per_step)]
            lags += [engine - version for group in batch for version in group]
            trained += len(batch)
            if trained == questions_per_version(config):
                free, trained, engine = free + trained, 0, engine + 1
    return lags


@pytest.mark.parametrize("filtered", [0.0, 0.3])
@pytest.mark.parametrize(("questions", "sync", "staleness"), [(4, 1, 0.0), (4, 4, 0.5), (3, 2, 1.0), (2, 3, 1.7), (1, 1, 0.5)])
def test_no_order_of_events_breaks_the_bound(questions: int, sync: int, staleness: float, filtered: float) -> None:
    """The bound holds for random interleavings, and without filtering the greediest one reaches it."""
    setting = config(questions, sync, staleness)
    lags = [lag for seed in range(20) for lag in trained_lags(setting, random.Random(seed), 12, filtered)]
    assert max(lags) <= max_lag(setting)
    if not filtered:
        assert max(lags) == max_lag(setting)


def test_the_bound_needs_the_order_of_admission() -> None:
    """Batches that take any group let some be overtaken again and again."""
    setting = config(3, 2, 1.0)
    lags = [lag for seed in range(20) for lag in trained_lags(setting, random.Random(seed), 12, 0.0, in_order=False)]
    assert max(lags) > max_lag(setting)
