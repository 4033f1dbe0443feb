"""Specifications: distinct totals, the draws and their shares."""

from collections import Counter
from itertools import product
from random import Random

import pytest

from headrace.questions.hopchain import draw_specification, totals_distinct
from headrace.questions.hopchain.specification import PROFILES, Profile, draw_pairs, totals

FIGURE_2 = [(63, 10), (22, 63), (64, 41), (73, 79)]
CORPUS_TYPES = {"order": 0.4396, "spatial": 0.2198, "action": 0.2198, "attribute": 0.1209}


def test_ex_1_5_the_papers_figure_2_has_sixteen_totals() -> None:
    assert totals_distinct(FIGURE_2)
    assert totals(FIGURE_2) == [146, 152, 169, 175, 187, 193, 199, 205, 210, 216, 222, 228, 240, 246, 263, 269]
    assert FIGURE_2[0][0] + FIGURE_2[1][0] + FIGURE_2[2][1] + FIGURE_2[3][0] == 199


def test_ex_1_6_equal_totals_are_found() -> None:
    assert not totals_distinct([(10, 20), (30, 40), (5, 9)])
    accepted = [(1, 2), (3, 5), (10, 14)]
    assert totals_distinct(accepted)
    assert totals(accepted) == list(range(14, 22))
    assert not totals_distinct([(7, 7)])


def test_distinctness_is_that_of_all_totals_and_of_signed_differences() -> None:
    rng = Random(5)
    for _ in range(400):
        pairs = draw_pairs(rng, rng.randint(1, 5), 20)
        every = totals(pairs)
        signs = [c for c in product((-1, 0, 1), repeat=len(pairs)) if any(c)]
        signed = all(sum(s * (yes - no) for s, (yes, no) in zip(c, pairs, strict=True)) for c in signs)
        assert totals_distinct(pairs) == (len(set(every)) == len(every)) == signed


@pytest.mark.parametrize(("n", "share"), [(3, 0.92), (4, 0.76), (5, 0.43), (6, 0.075)])
def test_ex_1_7_acceptance_of_one_draw(n: int, share: float) -> None:
    rng = Random(n)
    draws = 10_000
    accepted = sum(totals_distinct(draw_pairs(rng, n)) for _ in range(draws)) / draws
    assert accepted == pytest.approx(share, abs=0.02)


def test_a_video_always_gets_the_same_specification() -> None:
    again = [draw_specification("v1", index) for index in range(2)]
    assert again == [draw_specification("v1", index) for index in range(2)]
    assert again[0] != again[1]
    assert draw_specification("v2") != again[0]


def test_every_specification_keeps_the_rules() -> None:
    for number in range(1500):
        drawn = draw_specification(f"video {number}", number % 2)
        n = drawn.hops
        assert n in (4, 5, 6)
        assert "order" in drawn.types
        assert drawn.types.count("attribute") <= (2 if n == 6 else 1)
        assert len(drawn.numbers) == n
        assert all(yes != no and min(yes, no) >= 1 and max(yes, no) <= 80 for yes, no in drawn.numbers)
        assert totals_distinct(drawn.numbers)
        assert all(0 <= router < routed < n for router, routed in drawn.routes)
        assert len(drawn.routes) == {"flat": 0, "selector": 1, "chain": 2}[drawn.link]
        if drawn.link == "chain":
            (_, middle), (second, _) = drawn.routes
            assert middle == second


def test_shares_of_types_hop_counts_and_links() -> None:
    drawn = [draw_specification(str(number)) for number in range(6000)]
    types = Counter(kind for specification in drawn for kind in specification.types)
    assert {kind: count / types.total() for kind, count in types.items()} == pytest.approx(CORPUS_TYPES, abs=0.012)
    hops = Counter(specification.hops for specification in drawn)
    assert {n: count / len(drawn) for n, count in hops.items()} == pytest.approx({4: 0.55, 5: 0.35, 6: 0.10}, abs=0.02)
    links = Counter(specification.link for specification in drawn)
    assert {link: count / len(drawn) for link, count in links.items()} == pytest.approx(
        {"flat": 0.3, "selector": 0.4, "chain": 0.3}, abs=0.02
    )


def test_the_published_marginals_reach_three_hops() -> None:
    counts = Counter(draw_specification(str(number), profile="paper_marginal").hops for number in range(2000))
    assert set(counts) == {3, 4, 5, 6}
    assert counts[3] / 2000 == pytest.approx(PROFILES["paper_marginal"].hops[3], abs=0.015)


@pytest.mark.parametrize(("n", "least"), [(2, 3), (3, 5), (4, 8)])
def test_numbers_too_small_for_distinct_totals_are_refused(n: int, least: int) -> None:
    """The bound is exact: every set of differences below it collides, one at it does not."""
    from itertools import combinations

    def possible(highest: int) -> bool:
        return any(totals_distinct([(d + 1, 1) for d in differences]) for differences in combinations(range(1, highest), n))

    assert (possible(least - 1), possible(least)) == (False, True)
    with pytest.raises(ValueError, match=f"{n} hops have distinct totals only with numbers up to {least} or more"):
        Profile({n: 1.0}, max_number=least - 1)
    assert Profile({n: 1.0}, max_number=least)


def test_a_draw_that_finds_no_distinct_totals_says_so() -> None:
    with pytest.raises(ValueError, match=r"v/0: no 6 pairs of numbers from 1 to 25 with distinct totals in 20,000 draws"):
        draw_specification("v", profile=Profile({6: 1.0}, max_number=25))
    with pytest.raises(ValueError, match="expected one of release, paper_marginal"):
        draw_specification("v", profile="other")
    with pytest.raises(ValueError, match="expected counts from 2 to 8"):
        Profile({9: 1.0})
