"""Generated questions: deterministic, split without overlap, and every trace scores as it should."""

import json
import re

import numpy as np
import pytest

from headrace.config import MultiHopSource
from headrace.questions import QuestionSet, TaskSet, load
from headrace.questions.tasks import split_of
from headrace.rewards import score


def multi_hop(split="train", seed=0, **fields):
    return load(MultiHopSource(kind="multi_hop", **{"count": 64, **fields}), seed, split)


def content(question):
    return question.messages[-1]["content"]


def solved(text):
    """The answer, worked out from the question's text alone."""
    evidence, checks = text.removesuffix(" =").split(" | ")
    values = {name: int(value) for name, value in (item.split("=") for item in evidence.split(" ; "))}
    total = 0
    for check in checks.split(" ; "):
        _, left, _, right, _, yes, _, no = check.split()
        total += int(yes if values[left] > values[right] else no)
    return str(total)


def test_multi_hop_is_a_task_set():
    assert isinstance(multi_hop(), TaskSet)
    assert isinstance(multi_hop(), QuestionSet)


def test_multi_hop_answers_follow_from_the_text():
    questions = multi_hop()
    for index in range(len(questions)):
        question = questions.question(index)
        assert solved(content(question)) == question.answer
        assert content(question).count("?") == question.extra["hops"]


def test_multi_hop_repeats_by_seed_split_and_index():
    first, second = multi_hop(seed=3), multi_hop(seed=3, count=8)
    assert [first.question(i) for i in (5, 2)] == [second.question(i) for i in (5, 2)]
    assert first.question(0) != multi_hop(seed=4).question(0)
    assert first.question(0) != first.question(1)


def test_multi_hop_splits_share_no_question():
    train = {content(multi_hop(count=400).question(i)) for i in range(400)}
    held_out = {content(multi_hop("held_out", seed=9, count=400).question(i)) for i in range(400)}
    assert not train & held_out
    assert {split_of(text) for text in train} == {"train"}
    assert {split_of(text) for text in held_out} == {"held_out"}


def test_multi_hop_splits_share_no_question_of_a_tiny_world():
    tiny = {"objects": 2, "max_value": 2, "hops": (1,), "count": 300}
    train, held_out = (multi_hop(split, **tiny) for split in ("train", "held_out"))
    assert not {content(train.question(i)) for i in range(300)} & {content(held_out.question(i)) for i in range(300)}


@pytest.mark.parametrize("fields", [{"objects": 9, "max_value": 9}, {"objects": 2, "max_value": 2}])
def test_multi_hop_values_and_numbers_differ(fields):
    questions = multi_hop(**fields)
    for index in range(len(questions)):
        scene = questions.scene(index)
        assert len(set(scene.values.values())) == fields["objects"]
        assert all(hop.yes != hop.no and hop.left != hop.right for hop in scene.hops)


def test_a_clean_trace_scores_full():
    questions = multi_hop()
    for index in range(len(questions)):
        trace = questions.trace(index, np.random.default_rng(index))
        reward = score(trace, questions.question(index).answer, contract="answer_tag")
        assert (reward.accuracy, reward.format) == (1.0, 1.0)


def test_a_flipped_decision_is_followed_through():
    questions = multi_hop(hops=(4,))
    wrong = 0
    for index in range(len(questions)):
        trace, scene = questions.trace(index, np.random.default_rng(index), noise=1.0), questions.scene(index)
        taken = sum(hop.no if scene.holds(hop) else hop.yes for hop in scene.hops)
        assert trace.endswith(f"sum {taken} </think> <answer> {taken} </answer>")
        wrong += taken != scene.answer
    assert wrong > 0.8 * len(questions)  # the rest sum to the right answer by accident


def test_noise_flips_its_share_of_decisions():
    questions = multi_hop(hops=(4,), count=400)
    flipped = 0
    for index in range(len(questions)):
        scene, trace = questions.scene(index), questions.trace(index, np.random.default_rng(index), noise=0.25)
        verdicts = re.findall(r"\b(yes|no)\b", trace)
        flipped += sum((verdict == "yes") != scene.holds(hop) for verdict, hop in zip(verdicts, scene.hops, strict=True))
    assert abs(flipped / 1600 - 0.25) < 4 * (0.25 * 0.75 / 1600) ** 0.5


def test_vocabulary_covers_questions_and_traces():
    questions = multi_hop(count=300)
    words = questions.vocabulary()
    assert len(set(words)) == len(words)
    known = {*words, "<think>", "</think>", "<answer>", "</answer>"}
    for index in range(len(questions)):
        assert set(content(questions.question(index)).split()) <= known
        assert set(questions.trace(index, np.random.default_rng(index), noise=0.5).split()) <= known


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"objects": 6, "max_value": 5}, "objects = 6"),
        ({"objects": 13, "max_value": 20}, "12 names"),
        ({"hops": ()}, "hops"),
        ({"hops": (0, 2)}, "hops"),
    ],
)
def test_an_impossible_source_is_refused_by_field(fields, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        multi_hop(**fields)


def test_an_index_outside_is_an_index_error():
    with pytest.raises(IndexError):
        multi_hop(count=4).question(4)


def test_extra_is_json():
    assert json.loads(json.dumps(dict(multi_hop().question(0).extra))) == multi_hop().question(0).extra
