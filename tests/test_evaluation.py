"""Held-out accuracy: mean of samples, greedy, majority vote."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from headrace.config import Config
from headrace.evaluation.measure import evaluate, majority
from headrace.records import Completion, Prompt, Question, SampleRequest
from headrace.rewards.pool import ScoringPool


@pytest.mark.parametrize(
    ("votes", "winner"),
    [
        (["12", "12", "7", "12", None, "7", "9", "12"], "12"),
        (["A", "B", "B", "A", "C", "C", "D", "D"], "A"),
        ([None] * 8, None),
        ([None] * 7 + ["3"], "3"),
    ],
)
def test_ex_5_12_majority(votes: list[str | None], winner: str | None) -> None:
    first = majority(votes)
    assert (None if first is None else votes[first]) == winner


RESPONSES = {
    "a": ["5", "5", "6", "5.0", "7"],  # greedy and majority right, two of four samples
    "b": ["6", "5", "-0", "0.0", None],  # greedy and majority wrong, one of four
}


class Engine:
    """Answers from the table; notes what it was asked for."""

    def __init__(self) -> None:
        self.requests: list[SampleRequest] = []

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        self.requests += requests
        return [self._completion(request) for request in requests]

    @staticmethod
    def _completion(request: SampleRequest) -> Completion:
        ids = np.array([ord(request.prompt.question.id), request.index, 0], dtype=np.int32)
        return Completion(ids, np.zeros(3, np.float32), np.zeros(3, bool), np.zeros(3, np.int32), "stop")


def text_of(prompt: Prompt, ids: np.ndarray) -> str:
    answer = RESPONSES[chr(ids[0])][ids[1]]
    return "<think>x" if answer is None else f"<think>x</think><answer>{answer}</answer>"


def test_every_rate_counts_what_it_says() -> None:
    config = Config.model_validate(
        {
            "model": {"source": {"kind": "directory", "path": "m"}},
            "sampling": {"max_tokens": 3, "cge": {}},
            "reward": {"contract": "answer_tag"},
            "evaluation": {"samples": 4},
        }
    )
    prompts = [Prompt(Question(name, (), "5", extra={"hops": hops}), np.array([1])) for hops, name in enumerate(RESPONSES, 1)]
    engine = Engine()
    with ScoringPool(config.reward) as scorer:
        result = asyncio.run(evaluate(prompts, engine, scorer, SimpleNamespace(response_text=text_of), config))
    assert result["questions"] == 2
    assert result["mean_accuracy"] == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert result["greedy_accuracy"] == result["maj_accuracy"] == 0.5
    assert result["format_rate"] == 7 / 8
    assert result["length_mean"] == 3
    assert {hops: row["mean_accuracy"] for hops, row in result["by_hops"].items()} == {"1": 0.5, "2": 0.25}
    assert all(request.mask is None for request in engine.requests)
    assert [request.parameters.temperature for request in engine.requests[:5]] == [0, 1, 1, 1, 1]
