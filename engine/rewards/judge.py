"""One response in, one outcome out: the same code in a worker process, on a thread and in the engine's own process."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from math import isfinite
from numbers import Real
from typing import Literal

from headrace.config import RewardConfig
from headrace.records import Question, Reward
from headrace.rewards.scoring import score

RewardFunction = Callable[[Question, str], "float | Reward"]
VerifyFunction = Callable[[Question, str], float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A reward, or why there is none."""

    reward: Reward | None
    failure: Literal["", "error", "non_finite", "timeout"] = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Judge:
    """Scores by a reward function, or else by the configured rules with ``verify`` in place of the comparison."""

    config: RewardConfig
    reward: RewardFunction | None = None
    verify: VerifyFunction | None = None

    def __call__(self, question: Question, text: str) -> Outcome:
        """Never raises: what the functions raise is an outcome of kind ``error``."""
        try:
            return _checked(self._reward(question, text))
        except (Exception, SystemExit) as error:
            return Outcome(None, "error", f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)

    def _reward(self, question: Question, text: str) -> Reward:
        if self.reward is not None:
            return _as_reward(self.reward(question, text))
        config, verify = self.config, self.verify
        return score(
            text,
            question.answer,
            config.contract,
            config.mode,
            tolerance=float(question.extra.get("tolerance") or 0.0),
            verifier="math_verify" if config.verifier == "math_verify" else "exact",
            format_term=config.format_term,
            verify=(lambda answer: verify(question, answer)) if verify is not None else None,
        )


def _as_reward(value: "float | Reward") -> Reward:
    """A plain score s becomes total s with accuracy 1 where s >= 1; numbers of numpy and torch count as plain."""
    if isinstance(value, Reward):
        return Reward(float(value.total), float(value.accuracy), float(value.format))
    if not isinstance(value, Real) and not hasattr(value, "__float__"):
        raise TypeError(f"the reward function returned {type(value).__name__}, expected a number or a Reward")
    total = float(value)
    return Reward(total=total, accuracy=float(total >= 1))


def _checked(reward: Reward) -> Outcome:
    if isfinite(reward.total) and isfinite(reward.accuracy) and isfinite(reward.format):
        return Outcome(reward)
    return Outcome(None, "non_finite", f"total {reward.total}, accuracy {reward.accuracy}, format {reward.format}")


def name_of(function: Callable) -> str | None:
    """``module:function`` of a plain function of this package, which every worker can import; None for all others.

    The scorers of the task generators are such functions: they hold no state, so a process may run them.
    """
    module, name = getattr(function, "__module__", None) or "", getattr(function, "__qualname__", "")
    if not module.startswith("headrace."):
        return None
    try:
        return f"{module}:{name}" if resolve(f"{module}:{name}") is function else None
    except ValueError:
        return None


def resolve(name: str) -> Callable:
    """The function that ``module:function`` names.

    Raises:
        ValueError: it cannot be imported.
    """
    module, colon, path = name.partition(":")
    if not (module and colon and path):
        raise ValueError(f"reward function {name!r}: expected module:function")
    try:
        function = reduce(getattr, path.split("."), importlib.import_module(module))
    except Exception as error:  # an import runs any code
        raise ValueError(f"reward function {name!r}: cannot be imported ({type(error).__name__}: {error})") from error
    if not callable(function):
        raise ValueError(f"reward function {name!r}: is {type(function).__name__}, expected a function")
    return function
