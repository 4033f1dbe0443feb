"""The simulated schedule: closed forms where there are any, and the bounds that hold always."""

import math
from dataclasses import replace

import pytest

from headrace.planning.rates import Rates
from headrace.planning.setting import Setting
from headrace.planning.simulate import simulate
from headrace.planning.workload import Workload


def setting(*, staleness: float = 0.0, sync_interval: int = 1, **changes: object) -> Setting:
    """One server that draws one row at a time at 1 s a token; responses of exactly 10 tokens, two a group, two groups a batch."""
    workload = Workload(prompt_tokens=10, response_tokens=10, spread=0.0, reward_seconds=0.0)
    base = Setting(
        batch=2,
        sync_interval=sync_interval,
        slots=math.floor((1 + staleness) * 2 * sync_interval),
        group_size=2,
        first_wave=2,
        max_tokens=10,
        updates=1,
        micro_batch_tokens=1000,
        servers=1,
        rows=1,
        ranks=1,
        rates=Rates(decode_step=1.0, decode_row=0.0, train_token=0.0),
        workload=workload,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def test_synchronous_run_alternates() -> None:
    """Drawing 2 x 2 x 10 = 40 s, then training 2 x 2 x 20 tokens at 0.5 s = 40 s, then a push of 5 s; each side idles in the rest."""
    result = simulate(setting(rates=Rates(decode_step=1.0, decode_row=0.0, train_token=0.5, sync=5.0)))
    assert result.version_seconds == pytest.approx(85)
    assert (result.wait_seconds, result.update_seconds, result.sync_seconds) == pytest.approx((40, 40, 5))
    assert result.learner_idle == pytest.approx(40 / 85)
    assert result.engine_idle == pytest.approx(45 / 85)
    assert result.max_lag == 0


def test_staleness_overlaps_the_sides() -> None:
    """With a version ahead both sides work all the time: the slower one, 40 s here, sets the pace, and tokens lag one version."""
    result = simulate(setting(staleness=1.0, rates=Rates(decode_step=1.0, decode_row=0.0, train_token=0.375)))
    assert result.version_seconds == pytest.approx(40)
    assert result.learner_idle == pytest.approx(0.25)
    assert result.engine_idle == pytest.approx(0)
    assert result.max_lag == 1


def test_filtered_groups_are_drawn_and_do_not_train() -> None:
    """A learner that costs nothing waits for the engine alone: half the groups filtered double a version's time."""
    workload = Workload(prompt_tokens=10, response_tokens=10, spread=0.0, reward_seconds=0.0, filtered=0.5)
    result = simulate(setting(workload=workload), versions=400)
    assert result.version_seconds == pytest.approx(80, rel=0.1)


def test_second_wave_waits_for_the_first() -> None:
    """Two places for a group of two: one wave takes 10 s a group, two waves of one rollout take 20 s."""
    one = simulate(setting(rows=2, batch=1, slots=1))
    two = simulate(setting(rows=2, batch=1, slots=1, first_wave=1))
    assert (one.version_seconds, two.version_seconds) == pytest.approx((10, 20))


def test_straggler_holds_up_the_oldest_batch_only_in_order_of_admission() -> None:
    """Two servers; one response in ten is ten times as long. Batches of the first complete groups do not wait for it."""
    workload = Workload(prompt_tokens=10, response_tokens=19, spread=0.0, at_limit=0.1, reward_seconds=0.0)
    common = {"servers": 8, "rows": 2, "max_tokens": 100, "batch": 4, "slots": 8, "workload": workload}
    oldest = simulate(setting(**common), versions=100)  # type: ignore[arg-type]
    first = simulate(setting(**common, order="completion"), versions=100)  # type: ignore[arg-type]
    assert first.version_seconds < 0.8 * oldest.version_seconds


@pytest.mark.parametrize("filtered", [0.0, 0.4])
@pytest.mark.parametrize(("sync_interval", "staleness"), [(1, 0.0), (4, 0.5), (2, 1.0), (3, 1.7)])
def test_lag_stays_in_its_bound(sync_interval: int, staleness: float, filtered: float) -> None:
    """ceil(slots / P) - 1, as headrace.schedule.max_lag says, whatever the rates."""
    workload = Workload(prompt_tokens=10, response_tokens=20, spread=1.0, filtered=filtered)
    for train_token in (0.0, 0.02, 0.5):
        rates = Rates(decode_step=0.1, decode_row=0.01, prefill_token=0.01, train_token=train_token, sync=1.0)
        case = setting(staleness=staleness, sync_interval=sync_interval, servers=2, rows=3, max_tokens=200, rates=rates, workload=workload)
        assert simulate(case, versions=20).max_lag <= math.ceil(case.slots / (2 * sync_interval)) - 1


def test_same_seed_same_result() -> None:
    case = setting(staleness=0.5, sync_interval=2, workload=Workload(prompt_tokens=5, response_tokens=5, spread=0.7))
    assert simulate(case, seed=3) == simulate(case, seed=3) != simulate(case, seed=4)


def test_no_room_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 rows"):
        simulate(setting(rows=0))
