"""What a response earns: accuracy by comparison with the reference, format by contract (paper 000, Eq. 1)."""

import functools
import re
from collections.abc import Callable
from decimal import Decimal, localcontext
from math import isfinite
from typing import Literal

from headrace.records import Reward
from headrace.rewards.extraction import Contract, Mode, check, draft, extract, format_score, primary

Verifier = Literal["exact", "math_verify"]

ACCURACY_SHARE, FORMAT_SHARE = 0.8, 0.2  # paper 000, Eq. 1
EQUAL = Decimal("1e-6")  # numbers this close are one number
_LONGEST_NUMBER = 400  # characters; decimal arithmetic stays cheap
_LONGEST_EXPRESSION = 2_000  # characters handed to Math-Verify
_NUMBER = re.compile(r"([+-]?) *([0-9]{1,3}(?:[, ][0-9]{3})+(?:\.[0-9]*)?|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")
_LETTER = re.compile(r"[(\[]?([A-Za-z])(?:[)\].:]+(?:\s.*)?)?", re.DOTALL)  # B, (B), B., B) the red one
_WORD = re.compile(r"[^\W\d_]{2,}(?:[\s-]+[^\W\d_]{2,})*")


def number(text: str) -> Decimal | None:
    """The number that ``text`` writes, or None.

    ``$`` signs, outer space, one trailing period and separators between groups of three digits are taken off.
    """
    if len(text) > _LONGEST_NUMBER:
        return None
    match = _NUMBER.fullmatch(text.replace("$", "").replace("−", "-").strip().removesuffix(".").rstrip())
    if match is None:
        return None
    sign, digits, exponent = match.groups(default="")
    return Decimal(sign + digits.replace(",", "").replace(" ", "") + exponent)


def answers_match(candidate: str, answer: str, tolerance: float = 0.0, verifier: Verifier = "exact") -> bool:
    """Whether two answers are the same.

    Equal strings; else numbers within max(1e-6, ``tolerance``), absolute; else, for a one-letter reference, the option
    letter however it is bracketed; else, if asked for, Math-Verify (never for two plain numbers, nor for references
    that are words: it reads a word as a product of letters, so ``red`` would equal ``der``).
    """
    candidate, answer = candidate.strip(), answer.strip()
    if candidate == answer:
        return bool(answer)
    ours, theirs = number(candidate), number(answer)
    if ours is not None and theirs is not None:
        with localcontext(prec=2 * _LONGEST_NUMBER, Emax=999_999, Emin=-999_999):
            return abs(ours - theirs) <= max(EQUAL, Decimal(tolerance))
    if len(answer) == 1 and answer.isascii() and answer.isalpha():
        letter = _LETTER.fullmatch(candidate)
        return letter is not None and letter[1].upper() == answer.upper()
    if verifier == "math_verify" and not _WORD.fullmatch(answer) and max(len(candidate), len(answer)) <= _LONGEST_EXPRESSION:
        return _math_verify(candidate, answer)
    return False


def score(
    text: str,
    answer: str | int | float,
    contract: Contract = "answer_boxed",
    mode: Mode = "strict",
    *,
    tolerance: float = 0.0,
    verifier: Verifier = "exact",
    format_term: bool = True,
    verify: Callable[[str], float] | None = None,
) -> Reward:
    """Score one response: total = 0.8 accuracy + 0.2 format.

    Args:
        text: whole response, a pre-filled think tag included.
        answer: the reference.
        contract: shape the response should have (docs/rewards.md).
        mode: ``strict`` or ``code``, the graded format and the draft fallback of the release.
        tolerance: absolute tolerance of numbers; what is below 1e-6 counts as 1e-6.
        verifier: ``exact``, or ``math_verify`` as a last resort.
        format_term: False leaves total = accuracy.
        verify: replaces the comparison. It takes the extracted answer and returns a score in [0, 1], which enters the
            total as it is; accuracy is 1 where the score is 1. No answer is a score of 0 and is not asked about.

    Raises:
        ValueError: unknown contract or mode, or ``verify`` returned something else than a number in [0, 1].
    """
    check(contract, mode)
    grade = _graded(verify) if verify else lambda candidate: float(answers_match(candidate, str(answer), tolerance, verifier))
    shape = format_score(text, contract, mode)
    candidate = primary(text, mode)
    correct = grade(candidate) if candidate else 0.0
    if mode == "code" and correct == 0 and shape == 0 and (candidate := draft(text)):
        correct = grade(candidate)
    total = ACCURACY_SHARE * correct + FORMAT_SHARE * shape if format_term else correct
    return Reward(total=total, accuracy=float(correct >= 1), format=shape)


def _graded(verify: Callable[[str], float]) -> Callable[[str], float]:
    """``verify`` with its result checked; what is not finite passes, so that the pool can count it."""

    def grade(candidate: str) -> float:
        value = float(verify(candidate))
        if isfinite(value) and not 0 <= value <= 1:
            raise ValueError(f"the verifier returned {value!r}, expected a score in [0, 1]")
        return value

    return grade


@functools.cache
def _math_verify_functions() -> tuple[Callable, Callable]:
    """Parse and compare functions of Math-Verify, imported on first use, its alarms off: the pool has its own clock."""
    import logging

    import math_verify

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)  # one line per call about the missing alarm
    targets = [math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig()]
    return (
        functools.partial(math_verify.parse, extraction_config=targets, parsing_timeout=None),
        functools.partial(math_verify.verify, timeout_seconds=None),
    )


def _math_verify(candidate: str, answer: str) -> bool:
    parse, verify = _math_verify_functions()
    return bool(verify(parse(f"\\boxed{{{answer}}}"), parse(f"\\boxed{{{candidate}}}")))


__all__ = ["answers_match", "extract", "number", "score"]
