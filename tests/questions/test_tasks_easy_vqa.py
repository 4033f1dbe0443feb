"""Composed questions over real pictures."""

import builtins
from pathlib import Path

import numpy as np
import pytest

from headrace.config import EasyVQASource
from headrace.questions import TaskSet, load
from headrace.questions.tasks import easy_vqa as task
from headrace.rewards import score

pytest.importorskip("easy_vqa")


def easy_vqa(split="train", seed=0, pictures=None, **fields):
    pictures = pictures or ("train" if split == "train" else "test")
    return load(EasyVQASource(kind="easy_vqa", **{"count": 64, "split": pictures, **fields}), seed, split)


def test_it_is_a_task_set_with_pictures_by_reference():
    questions = easy_vqa()
    assert isinstance(questions, TaskSet)
    question = questions.question(0)
    assert [media.kind for media in question.media] == ["image"]
    assert Path(question.media[0].path).is_file()
    assert question.messages[0]["content"].count("<image>") == 1


def test_checks_agree_with_what_the_picture_shows():
    for picture in task.pictures("test"):
        for check in picture.checks:
            assert check.holds == ((check.attribute in (picture.colour, picture.shape)) != check.negated)


def test_clean_traces_score_full_and_name_the_picture_first():
    questions = easy_vqa()
    for index in range(len(questions)):
        composed, trace = questions.composed(index), questions.trace(index, np.random.default_rng(0))
        assert trace.startswith(f"<think> {composed.picture.colour} {composed.picture.shape} ;")
        assert score(trace, questions.question(index).answer, contract="answer_tag").total == pytest.approx(1.0)


def test_flipped_decisions_take_the_other_number():
    questions = easy_vqa(hops=(1,))
    for index in range(16):
        composed = questions.composed(index)
        ((yes, no),) = composed.numbers
        other = no if composed.checks[0].holds else yes
        assert questions.trace(index, np.random.default_rng(0), noise=1.0).endswith(f"<answer> {other} </answer>")


def test_splits_share_no_question_and_the_test_pictures_are_others():
    train, held_out = easy_vqa(), easy_vqa("held_out", seed=7)
    assert not {media for i in range(64) for media in train.question(i).media} & {
        media for i in range(64) for media in held_out.question(i).media
    }
    same = easy_vqa("held_out", pictures="train")
    shown = [{(q.messages[0]["content"], q.media) for q in map(s.question, range(64))} for s in (train, same)]
    assert not shown[0] & shown[1]


def test_vocabulary_covers_both_sets_of_pictures():
    words = set(easy_vqa().vocabulary()) | {"<think>", "</think>", "<answer>", "</answer>", "<image>"}
    for questions in (easy_vqa(), easy_vqa("held_out")):
        for index in range(len(questions)):
            assert set(questions.question(index).messages[0]["content"].split()) <= words
            assert set(questions.trace(index, np.random.default_rng(0), 0.5).split()) <= words
    assert easy_vqa().vocabulary() == easy_vqa("held_out").vocabulary()


def test_questions_repeat():
    assert easy_vqa(seed=2).question(5) == easy_vqa(seed=2).question(5)
    assert easy_vqa(seed=2).question(5) != easy_vqa(seed=3).question(5)


def test_too_many_hops_are_refused():
    with pytest.raises(ValueError, match="no picture has 40"):
        easy_vqa(hops=(40,))


def test_a_missing_package_is_one_line(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "easy_vqa":
            raise ModuleNotFoundError("No module named 'easy_vqa'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match="pip install easy-vqa"):
        task.pictures.__wrapped__("train")
