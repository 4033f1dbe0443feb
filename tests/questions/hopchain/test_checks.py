"""Checks by code, on the paper's Figure 2."""

from typing import Any

import pytest

from headrace.questions.hopchain.checks import check, mapping
from headrace.questions.hopchain.question_stages import written_question
from headrace.questions.hopchain.records import Dropped
from headrace.questions.hopchain.replies import Unparsable, json_object
from tests.questions.hopchain.cases import FIGURE_2, rows


def reason(broken: Any) -> str:
    with pytest.raises(Dropped) as drop:
        check(broken, FIGURE_2)
    return drop.value.reason


def test_ex_1_8_values() -> None:
    assert check(rows(63, 22, 41, 73), FIGURE_2).answer == 199
    assert reason(rows(63, 63, 64, 79)) == "one_sided"  # every one the larger
    assert reason(rows(10, 22, 41, 73)) == "one_sided"  # every one the smaller
    assert check(rows(63, 22, 64, 73), FIGURE_2).answer == 222  # every one yes, yet not all the larger
    assert reason(rows(62, 22, 41, 73)) == "not_an_option"


def test_the_arithmetic_row_is_no_hop() -> None:
    assert len(check(rows(63, 22, 41, 73), FIGURE_2).hops) == 4
    assert reason([{"type": "arithmetic", "mapping": ""}]) == "no_hops"


def changed(number: int, **fields: Any) -> list[dict[str, Any]]:
    every = rows(63, 22, 41, 73)
    every[number] |= fields
    return every


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (None, "no_hops"),
        ([], "no_hops"),
        (rows(63, 22, 41, 73)[1:], "hop_count"),
        (changed(0, type="action"), "hop_type"),
        (changed(1, mapping="it depends"), "mapping"),
        (changed(1, mapping=None), "mapping"),
        (["a hop", *rows(63, 22, 41, 73)[1:]], "mapping"),
        (changed(0, value="sixty"), "value"),
        (changed(0, value=True), "value"),
        (changed(0, value=63.5), "value"),
        (changed(1, scenes=["the firework"]), "scenes"),
        (changed(2, scenes=["the room", " "]), "scenes"),
        (changed(0, segments=["3"]), "scenes"),
        (changed(0, mapping="if so then 64 else 10", value=64), "numbers"),
        (changed(2, mapping="if so then 22 else 63", value=22), "collision"),
    ],
)
def test_every_failure_has_its_reason(broken: Any, expected: str) -> None:
    assert reason(broken) == expected


def test_numbers_written_as_text_are_numbers() -> None:
    assert check(changed(0, value="63"), FIGURE_2).hops[0].value == 63


def test_mappings_as_models_write_them() -> None:
    assert mapping("if the tree is left then 63 else 10") == ("the tree is left", 63, 10)
    assert mapping("If the tree, if any, is left, then 63; otherwise 10.") == ("the tree, if any, is left", 63, 10)


def test_json_is_found_behind_thoughts_and_fences() -> None:
    assert json_object('<think>maybe {"a": 0}</think>Here:\n```json\n{"a": 1}\n```\nDone.') == {"a": 1}
    assert json_object('{broken {"a": {"b": 2}}') == {"a": {"b": 2}}
    for text in ("", "no", "[1, 2]", "{" * 50_000, '{"cut": "of'):
        with pytest.raises(Unparsable, match="no JSON object"):
            json_object(text)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("I would rather not.", "not_json"),
        ('{"questions": "none"}', "not_json"),
        ('{"questions": []}', "skipped"),
        ('{"questions": [{"specification": 1, "hops": []}, 7]}', "skipped"),
        ('{"questions": [{"specification": 0, "skip": true}]}', "skipped"),
        ('{"questions": [{"specification": 0}]}', "no_hops"),
    ],
)
def test_what_is_wrong_with_a_reply_is_counted(reply: str, expected: str) -> None:
    with pytest.raises(Dropped) as drop:
        written_question(reply, FIGURE_2)
    assert drop.value.reason == expected
