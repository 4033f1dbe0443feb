"""Questions from reasoning-gym, scored by its own generators."""

import json
import pickle

import pytest

from headrace.config import ReasoningGymSource
from headrace.questions import QuestionSet, TaskSet, load
from headrace.questions.tasks.reasoning_gym import verify
from headrace.records import Question

pytest.importorskip("reasoning_gym")


def reasoning_gym(*names, split="train", seed=0, count=12):
    return load(ReasoningGymSource(kind="reasoning_gym", datasets=names, count=count), seed, split)


def test_generators_take_turns_and_score_their_own_answers():
    questions = reasoning_gym("chain_sum", "leg_counting", "gsm_symbolic")
    assert isinstance(questions, QuestionSet)
    assert not isinstance(questions, TaskSet)  # no traces: nothing to warm-start on
    assert [questions.question(i).source for i in range(4)] == ["chain_sum", "leg_counting", "gsm_symbolic", "chain_sum"]
    for index in range(len(questions)):
        question = questions.question(index)
        assert verify(question, question.answer) == 1.0
        assert verify(question, "no idea") < 1.0
        json.dumps(dict(question.extra))


def test_verify_travels_to_a_worker_process():
    questions = reasoning_gym("chain_sum")
    question, there = pickle.loads(pickle.dumps((questions.question(0), questions.verify)))
    assert there(question, question.answer) == 1.0


def test_questions_repeat_by_seed_and_differ_by_split():
    first = reasoning_gym("chain_sum", seed=1)
    assert [first.question(i) for i in range(12)] == [reasoning_gym("chain_sum", seed=1).question(i) for i in range(12)]
    shown = [
        {q.messages[0]["content"] for q in map(reasoning_gym("chain_sum", split=s, count=200).question, range(200))}
        for s in ("train", "held_out")
    ]
    assert not shown[0] & shown[1]


def test_an_unknown_generator_lists_near_matches():
    with pytest.raises(ValueError, match=r"'chainsum'; did you mean chain_sum"):
        reasoning_gym("chainsum")


def test_no_generator_is_refused():
    with pytest.raises(ValueError, match=r"questions\.train\.datasets"):
        reasoning_gym()


def test_a_question_of_another_source_cannot_be_verified():
    with pytest.raises(ValueError, match="question 7: it carries no reasoning-gym entry"):
        verify(Question(id="7", messages=(), answer="1"), "1")
