"""A reward function whose module needs a second before the first response."""

import time

from headrace.records import Question

ready = False


def warm_up() -> None:
    global ready
    time.sleep(1)
    ready = True


def is_ready(question: Question, text: str) -> float:
    return float(ready)
