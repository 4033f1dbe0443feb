"""The stratified draw of the held-out split."""

from collections import Counter
from random import Random

import pytest

from headrace.questions.hopchain.quotas import draw_stratified, scale

HOPS = {"4": 302, "5": 450, "6": 248}
LENGTHS = {"40": 151, "70": 301, "110": 300, "0": 248}
SOURCES = {"LongVILA": 467, "FineVideo": 358, "Vript": 175}


@pytest.mark.parametrize(
    ("size", "hops", "lengths", "sources"),
    [
        (50, [15, 23, 12], [8, 15, 15, 12], [23, 18, 9]),
        (64, [19, 29, 16], [10, 19, 19, 16], [30, 23, 11]),
        (1000, [302, 450, 248], [151, 301, 300, 248], [467, 358, 175]),
    ],
)
def test_ex_1_11_quotas(size: int, hops: list[int], lengths: list[int], sources: list[int]) -> None:
    assert [list(scale(weights, size).values()) for weights in (HOPS, LENGTHS, SOURCES)] == [hops, lengths, sources]


def pool(count: int, seed: int) -> list[tuple[str, ...]]:
    rng = Random(seed)
    return [tuple(rng.choice(list(axis)) for axis in (HOPS, LENGTHS, SOURCES)) for _ in range(count)]


def test_a_rich_pool_meets_every_quota() -> None:
    candidates, quotas = pool(600, 1), [scale(weights, 100) for weights in (HOPS, LENGTHS, SOURCES)]
    draw = draw_stratified(candidates, quotas, 100)
    assert draw.deviation == 0
    assert len(set(draw.chosen)) == 100
    for axis, quota in enumerate(quotas):
        assert Counter(candidates[index][axis] for index in draw.chosen) == quota
    assert draw == draw_stratified(candidates, quotas, 100)
    assert draw != draw_stratified(candidates, quotas, 100, seed=7)


def test_a_poor_pool_is_used_up_and_the_deviation_told() -> None:
    draw = draw_stratified([("4",)] * 8, [{"4": 2, "5": 3}], 5)
    assert (len(draw.chosen), draw.deviation) == (5, 6)


def test_swaps_mend_what_the_greedy_pass_cannot() -> None:
    """Whatever the order, the one way to meet both axes is found."""
    candidates = [("a", "x"), ("a", "y"), ("b", "x"), ("b", "x")]
    for seed in range(20):
        draw = draw_stratified(candidates, [{"a": 1, "b": 1}, {"x": 1, "y": 1}], 2, seed)
        assert draw.deviation == 0
