"""The text control: what a claim loses when words of the question are hidden, the picture being whole.

A policy may come to hold on to its claims whatever is taken from its prompt. How far a checkpoint moved on the degraded picture beyond
how far it moved on a degraded question is what is particular to the picture (the difference in differences of paper 003, E.1, whose
text control is not specified further).
"""

import re
from dataclasses import replace

import numpy as np

from headrace.credit.intervention import intervention_seed
from headrace.records import Question

WORD_SHARE = 0.5  # of the words hidden, as of the picture's patches
_WORD = re.compile(r"(?:<(?:image|video)>|\S)+\s*")
_PLACEHOLDER = re.compile(r"<image>|<video>")


def degraded_text(question: Question) -> Question:
    """The question without half of the user's words, the same ones every time; placeholders of media stay."""
    rng = np.random.default_rng(intervention_seed(f"{question.id}:text"))

    def hide(match: re.Match[str]) -> str:
        hidden = rng.random() < WORD_SHARE
        return match.group() if not hidden or _PLACEHOLDER.search(match.group()) else ""

    messages = tuple(
        {**message, "content": _WORD.sub(hide, message["content"])} if message["role"] == "user" else message
        for message in question.messages
    )
    return replace(question, messages=messages)
