"""One line of a diagnosis."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, what was found, and what to do about it."""

    name: str
    state: State
    """``fail``: a run that needs it will not work; ``warn``: it works, but slowly, or may not."""
    found: str
    advice: str = ""

    @classmethod
    def of(cls, name: str, good: bool, found: str, advice: str, *, bad: State = "fail") -> "Check":
        """``ok`` without advice, or ``bad`` with it."""
        return cls(name, "ok", found) if good else cls(name, bad, found, advice)
