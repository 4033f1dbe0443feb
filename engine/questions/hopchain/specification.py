"""What a question has to be, drawn by code before anything is written (paper 000 §2)."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random

from headrace.questions.hopchain.records import LETTERS, HopType, Link, Specification

_TRIES = 20_000
_LEAST_SPREAD = {2: 2, 3: 4, 4: 7, 5: 13, 6: 24, 7: 44, 8: 84}
"""Smallest largest member of n whole numbers with distinct subset sums (Conway and Guy): what yes and no must differ by."""
_LINKS: tuple[tuple[Link, float], ...] = (("flat", 0.30), ("selector", 0.40), ("chain", 0.30))  # the paper's 0.70 of selectors, split
_OTHERS: tuple[HopType, ...] = ("order", "spatial", "action")


@dataclass(frozen=True, slots=True)
class Profile:
    """The parts of the draw that a corpus may set."""

    hops: Mapping[int, float]
    """Weights of the hop counts."""
    max_number: int = 80
    """Numbers are drawn from 1..max_number."""

    def __post_init__(self) -> None:
        if not self.hops or not all(2 <= n <= len(LETTERS) and weight >= 0 for n, weight in self.hops.items()):
            raise ValueError(f"hop weights {dict(self.hops)}: expected counts from 2 to {len(LETTERS)} with weights of at least 0")
        if sum(self.hops.values()) <= 0:
            raise ValueError("hop weights: expected at least one above 0")
        for n, weight in self.hops.items():
            if weight and self.max_number <= _LEAST_SPREAD[n]:
                raise ValueError(
                    f"max_number = {self.max_number}: {n} hops have distinct totals only with numbers up to {_LEAST_SPREAD[n] + 1} or more"
                )


PROFILES = {
    "release": Profile({4: 0.55, 5: 0.35, 6: 0.10}),
    "paper_marginal": Profile({3: 0.026, 4: 0.559, 5: 0.334, 6: 0.081}),
}
"""``release`` is the published draw; ``paper_marginal`` draws the hop counts that the published corpus ended up with."""


def totals_distinct(pairs: Sequence[tuple[int, int]]) -> bool:
    """Whether every combination of answers gives a total of its own.

    Two combinations collide exactly where some signs c in {-1, 0, 1}, not all zero, give sum(c_i (yes_i - no_i)) = 0, so it is
    enough to compare the 2^n subset sums of the differences.
    """
    sums = {0}
    for yes, no in pairs:
        shifted = {total + yes - no for total in sums}
        if sums & shifted:
            return False
        sums |= shifted
    return True


def totals(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """The 2^n totals, sorted."""
    return sorted(sum(choice) for choice in product(*pairs))


def draw_specification(video_id: str, index: int = 0, profile: str | Profile = "release") -> Specification:
    """Question ``index`` of a video; the same arguments always give the same specification.

    The structures of a video's questions come from one stream in turn, the numbers of each from a stream of its own.

    Raises:
        ValueError: an unknown profile, or no numbers with distinct totals were found in 20,000 draws.
    """
    if isinstance(profile, str):
        if profile not in PROFILES:
            raise ValueError(f"profile {profile!r}: expected one of {', '.join(PROFILES)}")
        profile = PROFILES[profile]
    structure = Random(_seed(f"spec:{video_id}"))
    for _ in range(index):
        _draw_structure(structure, profile)
    types, link, routes = _draw_structure(structure, profile)
    numbers = _draw_numbers(Random(_seed(f"numbers:{video_id}:{index}")), len(types), profile.max_number)
    if numbers is None:
        raise ValueError(
            f"{video_id}/{index}: no {len(types)} pairs of numbers from 1 to {profile.max_number} with distinct totals in {_TRIES:,} draws"
        )
    return Specification(video_id=video_id, index=index, types=types, link=link, routes=routes, numbers=numbers)


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.sha1(name.encode(), usedforsecurity=False).digest(), "big")


def _draw_structure(rng: Random, profile: Profile) -> tuple[tuple[HopType, ...], Link, tuple[tuple[int, int], ...]]:
    """Hop types, link and routes."""
    (n,) = rng.choices(list(profile.hops), weights=list(profile.hops.values()))
    colours = rng.randint(0, min(2 if n >= 6 else 1, n - 1))
    types: list[HopType] = ["order", *["attribute"] * colours]  # type: ignore[list-item]
    types += [rng.choice(_OTHERS) for _ in range(n - len(types))]
    rng.shuffle(types)
    (link,) = rng.choices([name for name, _ in _LINKS], weights=[weight for _, weight in _LINKS])
    return tuple(types), *_draw_link(rng, link, n)


def _draw_link(rng: Random, link: Link, n: int) -> tuple[Link, tuple[tuple[int, int], ...]]:
    """Routes of a link; two hops are too few for a chain and take one selector."""
    if link == "flat":
        return "flat", ()
    if link == "selector" or n < 3:
        routed = rng.randint(1, n - 1)
        return "selector", ((rng.randint(0, routed - 1), routed),)
    last = rng.randint(2, n - 1)
    middle = rng.randint(1, last - 1)
    return "chain", ((rng.randint(0, middle - 1), middle), (middle, last))


def _draw_numbers(rng: Random, n: int, highest: int) -> tuple[tuple[int, int], ...] | None:
    for _ in range(_TRIES):
        pairs = draw_pairs(rng, n, highest)
        if totals_distinct(pairs):
            return pairs
    return None


def draw_pairs(rng: Random, n: int, highest: int = 80) -> tuple[tuple[int, int], ...]:
    """One draw of n pairs of different numbers, before the test for distinct totals."""
    return tuple((pair[0], pair[1]) for pair in (rng.sample(range(1, highest + 1), 2) for _ in range(n)))
