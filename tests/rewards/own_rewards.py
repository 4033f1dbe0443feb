"""Reward functions that a worker imports by name."""

import os
import re
import sys
import time

from headrace.records import Question, Reward


def by_text(question: Question, text: str) -> float | Reward:
    """Does what the text says."""
    match text:
        case "hang":
            time.sleep(600)
        case "hold":  # exponential back-tracking never lets go of the interpreter
            re.match(r"(a+)+$", "a" * 40 + "b")
        case "die":
            os._exit(3)
        case "exit":
            sys.exit("bye")
        case "raise":
            raise RuntimeError("no luck\nat all \ud800")
        case "pid":
            return float(os.getpid())
        case "torch":
            return float("torch" in sys.modules)
        case "print":
            print("noise on stdout")
            return float(len(sys.stdin.read()))
        case "reward":
            return Reward(total=0.5, accuracy=1.0, format=0.25)
    return {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1", "bool": True}.get(text, 0.5)  # type: ignore[return-value]


def answer_is_even(question: Question, answer: str) -> float:
    return float(int(answer) % 2 == 0)


not_a_function = 3
