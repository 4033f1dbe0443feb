"""Dynamic sampling (DAPO): only groups with some right and some wrong answers train."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Generic, Literal, TypeVar

T = TypeVar("T")


def keep(accuracies: Sequence[float | None], bounds: tuple[float, float] | None = None) -> bool:
    """Whether a group has something to learn from.

    Unscored rollouts (None or NaN) do not count.

    Args:
        accuracies: [G], 1 where the answer is right.
        bounds: None keeps a group whose accuracies are not all equal; (low, high) keeps one whose mean accuracy lies
            strictly between them (EasyR1: 0.01 and 0.99).
    """
    known = [float(accuracy) for accuracy in accuracies if accuracy is not None and accuracy == accuracy]
    if not known:
        return False
    if bounds is None:
        return min(known) != max(known)
    low, high = bounds
    return low < fsum(known) / len(known) < high


@dataclass(slots=True)
class Refill(Generic[T]):
    """Collects the kept groups of one batch over rounds of drawing.

    Life cycle: ``open`` while groups are missing and rounds are left; then ``full``, or ``exhausted`` when the rounds
    ran out first. The first ``need`` groups in the order of drawing train; later ones are surplus.

        refill = Refill(need=8, max_rounds=10)
        while refill.status == "open":
            refill.add([group for group in draw(refill.missing) if keep(group)])
        batch, surplus = refill.take()
    """

    need: int
    """Groups of one batch."""
    max_rounds: int = 10
    """Rounds of drawing; 0 is no limit."""
    kept: list[T] = field(default_factory=list)
    rounds: int = 0

    @property
    def missing(self) -> int:
        """Groups still to be found."""
        return max(0, self.need - len(self.kept))

    @property
    def status(self) -> Literal["open", "full", "exhausted"]:
        if not self.missing:
            return "full"
        return "exhausted" if 0 < self.max_rounds <= self.rounds else "open"

    def add(self, groups: Sequence[T]) -> None:
        """Count one round that kept ``groups``."""
        if self.status != "open":
            raise ValueError(f"dynamic sampling: the batch is {self.status}, no further round may be added")
        self.kept.extend(groups)
        self.rounds += 1

    def take(self, partial: bool = False) -> tuple[list[T], list[T]]:
        """Batch and surplus.

        Raises:
            ValueError: groups are missing and ``partial`` is False.
        """
        if self.missing and not partial:
            raise ValueError(
                f"dynamic sampling: {self.rounds} rounds kept {len(self.kept)} of the {self.need} groups of a batch; "
                "the questions are too easy or too hard for the policy, or the number of rounds is too small"
            )
        return self.kept[: self.need], self.kept[self.need :]
