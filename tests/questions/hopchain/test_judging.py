"""The loop of judging and rewriting, and the judge's replies."""

import asyncio
import json
from typing import Any

import pytest

from headrace.questions.hopchain.checks import check
from headrace.questions.hopchain.judging import Fault, Trial, read_judgement, settle
from headrace.questions.hopchain.question_stages import too_easy
from headrace.questions.hopchain.records import Candidate, Dropped
from tests.questions.hopchain.cases import FIGURE_2, rows

QUESTION = check(rows(63, 22, 41, 73), FIGURE_2)
FAULT = (Fault(hop=1, kind="VALUE_WRONG"),)


def loop(verdicts: list[tuple[Fault, ...]], rewritten: Any = QUESTION, start: Trial | None = None) -> tuple[Trial, list[Trial]]:
    steps: list[Trial] = []

    async def judge(candidate: Candidate, attempt: int) -> tuple[Fault, ...]:
        return verdicts[attempt - 1]

    async def rewrite(candidate: Candidate, attempt: int, faults: tuple[Fault, ...]) -> Candidate:
        assert faults == verdicts[attempt - 1]
        if isinstance(rewritten, Dropped):
            raise rewritten
        return rewritten

    return asyncio.run(settle(start or Trial(candidate=QUESTION), judge, rewrite, steps.append)), steps


@pytest.mark.parametrize(
    ("verdicts", "fate", "judgements", "rewrites"),
    [([()], "kept", 1, 0), ([FAULT, ()], "kept", 2, 1), ([FAULT, FAULT, ()], "kept", 3, 2), ([FAULT, FAULT, FAULT], "faulted", 3, 2)],
)
def test_ex_1_9(verdicts: list[tuple[Fault, ...]], fate: str, judgements: int, rewrites: int) -> None:
    trial, _ = loop(verdicts)
    assert (trial.fate, trial.judgements, trial.rewrites) == (fate, judgements, rewrites)
    assert (trial.candidate is None) == (fate == "faulted")


def test_a_rewrite_that_fails_the_checks_is_dropped_at_once() -> None:
    trial, _ = loop([FAULT, ()], Dropped("one_sided"))
    assert (trial.fate, trial.judgements, trial.rewrites, trial.candidate) == ("rewrite_one_sided", 1, 1, None)


def test_the_loop_goes_on_from_every_step_to_the_same_end() -> None:
    end, steps = loop([FAULT, FAULT, ()])
    for step in steps[:-1]:
        assert loop([FAULT, FAULT, ()], start=Trial.model_validate_json(step.model_dump_json()))[0] == end


def test_a_judgement_names_faults_and_passes_over_malformed_entries() -> None:
    entries = [
        {"hop": 1, "fits": [], "fault": None},
        {"hop": 2, "fault": "CIRCULAR", "why": "the scene says so"},
        {"hop": 3, "fault": "BORING"},
        {"hop": 9, "fault": "CIRCULAR"},
        "hop 4 is fine",
    ]
    assert read_judgement(json.dumps({"hops": entries}), 4) == (Fault(hop=2, kind="CIRCULAR", why="the scene says so"),)
    assert read_judgement(json.dumps({"hops": entries[:1]}), 4) == ()


@pytest.mark.parametrize("reply", ["All good!", "{}", '{"hops": {}}', '{"hops": []}', '{"hops": [{"hop": "1", "fault": null}]}'])
def test_a_judgement_that_examines_nothing_is_a_failed_attempt(reply: str) -> None:
    assert [fault.kind for fault in read_judgement(reply, 4)] == ["UNPARSABLE"]


def test_ex_1_10_six_of_eight_is_too_easy() -> None:
    assert [too_easy(right, 8) for right in range(9)] == [False] * 6 + [True] * 3
    assert too_easy(3, 4)  # fewer answers: the share counts
    assert not too_easy(0, 0)
