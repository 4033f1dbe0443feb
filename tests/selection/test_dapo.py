"""Dynamic sampling: EX-7.4 and EX-7.6."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.credit.advantage import group_advantages
from headrace.selection.dapo import Refill, keep


def test_ex_7_4_filter() -> None:
    assert [keep([1] * right + [0] * (8 - right)) for right in range(9)] == [False, *[True] * 7, False]


@pytest.mark.parametrize(
    ("right", "size", "kept"),
    [(0, 8, False), (1, 100, False), (99, 100, False), (8, 8, False), (1, 16, True), (4, 8, True), (15, 16, True)],
)
def test_ex_7_4_bounds(right: int, size: int, kept: bool) -> None:
    assert keep([1] * right + [0] * (size - right), bounds=(0.01, 0.99)) is kept


def test_unscored_rollouts_do_not_count() -> None:
    assert not keep([1, None, 1, float("nan")])
    assert keep([1, None, 0])
    assert not keep([None, None])
    assert not keep([])


@given(st.lists(st.sampled_from([0.0, 1.0, None]), min_size=2, max_size=16))
def test_property_10_no_kept_group_is_degenerate(accuracies: list[float | None]) -> None:
    assert keep(accuracies) == group_advantages(accuracies).any()


def test_ex_7_6_fills_up_over_three_rounds() -> None:
    refill: Refill[str] = Refill(need=8, max_rounds=5)
    for round_number, count in enumerate((3, 2, 4)):
        assert refill.status == "open"
        assert refill.missing == (8, 5, 3)[round_number]
        refill.add([f"{round_number}.{i}" for i in range(count)])
    assert (refill.status, refill.rounds) == ("full", 3)
    batch, surplus = refill.take()
    assert (len(batch), surplus) == (8, ["2.3"])
    with pytest.raises(ValueError, match="the batch is full"):
        refill.add([])


def test_ex_7_6_limit() -> None:
    refill: Refill[int] = Refill(need=8, max_rounds=5)
    while refill.status == "open":
        refill.add([refill.rounds])
    assert (refill.status, refill.rounds) == ("exhausted", 5)
    with pytest.raises(ValueError, match="5 rounds kept 5 of the 8 groups"):
        refill.take()
    assert refill.take(partial=True) == ([0, 1, 2, 3, 4], [])


def test_ex_7_6_first_round_overflows() -> None:
    refill: Refill[int] = Refill(need=8)
    refill.add(range(9))
    assert refill.take() == (list(range(8)), [8])


def test_no_limit() -> None:
    refill: Refill[int] = Refill(need=1, max_rounds=0)
    for _ in range(100):
        refill.add([])
    assert refill.status == "open"
