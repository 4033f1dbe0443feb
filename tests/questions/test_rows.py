"""Rows of JSONL and Parquet files: both forms, and everything that can be wrong with one."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from headrace.config import RowsSource
from headrace.questions.rows import RowSet, load_rows
from headrace.questions.sets import QuestionSet, load
from headrace.records import Media

GOOD = {"question": "17 + 25?", "answer": "42"}


def write(folder: Path, *rows: Any, name: str = "data.jsonl") -> Path:
    """A JSONL file; strings and bytes are written as lines of their own."""
    lines = [row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode() for row in rows]
    path = folder / name
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def full_row(**changes: Any) -> dict[str, Any]:
    """A row in the full form."""
    row = {
        "prompt": [{"role": "system", "content": "Think.\r\n\tThen <answer>.  "}, {"role": "user", "content": "<video>\nHow many?"}],
        "images": [],
        "videos": [{"video": "clip.mp4", "nframes": 140, "max_pixels": 50176}],
        "data_source": "hopchain",
        "ability": "video",
        "reward_model": {"ground_truth": "199", "style": "rule"},
        "extra_info": {"answer": "199", "hops": 4, "hop_types": ["order", "spatial"], "question_id": "v1/3", "tolerance": 0.0},
    }
    return row | changes


def check_full(rows: RowSet, folder: Path) -> None:
    assert len(rows) == 1, rows.problems
    question = rows.question(0)
    assert question.id == "v1/3"
    assert question.messages[0] == {"role": "system", "content": "Think.\r\n\tThen <answer>.  "}  # byte for byte
    assert question.messages[1] == {"role": "user", "content": "<video>\nHow many?"}
    assert question.media == (Media("video", str(folder / "clip.mp4"), 140, 50176),)
    assert (question.answer, question.source) == ("199", "hopchain")
    assert question.extra["hops"] == 4
    assert question.extra["ability"] == "video"
    assert question.extra["tolerance"] == 0.0


def test_full_form(tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").touch()
    check_full(load_rows(write(tmp_path, full_row())), tmp_path)
    check_full(
        load_rows(write(tmp_path, full_row(videos=[{"video": (tmp_path / "clip.mp4").as_uri(), "nframes": 140, "max_pixels": 50176}]))),
        tmp_path,
    )


def test_parquet(tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").touch()
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([full_row()]), path)
    check_full(load_rows(path), tmp_path)
    rows = [{"question": f"{i}?", "answer": i if i % 2 else None, "id": None} for i in range(3000)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    mixed = load_rows(path)
    assert (len(mixed), mixed.skipped) == (1500, {"answer": 1500})
    assert mixed.problems[1] == f"{path}:3: answer: missing; expected answer or reward_model.ground_truth"
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(ValueError, match=r"data\.parquet: is not a sound Parquet file"):
        load_rows(path)


def test_short_form(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "c.mp4"):
        (tmp_path / name).touch()
    path = write(
        tmp_path,
        GOOD,
        {"question": "Same?", "answer": 3, "images": ["a.png", {"path": "b.png"}], "id": 7, "system": "Be brief.", "level": "hard"},
        {
            "question": "Left <image>, right <video>?",
            "answer": -0.5,
            "image": "a.png",
            "video": {"video": "c.mp4", "frames": 8.0},
            "tolerance": 0.1,
        },
        {"question": "<video> then <image>", "answer": "B", "images": ["a.png"], "videos": "c.mp4", "source": "mine"},
    )
    rows = load_rows(path, "stop")
    assert isinstance(rows, QuestionSet)
    first, second, third, fourth = (rows.question(i) for i in range(4))
    assert (first.messages, first.answer, first.source) == (({"role": "user", "content": "17 + 25?"},), "42", "data")
    assert (second.id, second.answer, second.extra) == ("7", "3", {"level": "hard"})
    assert second.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "<image>\n<image>\nSame?"})
    assert (third.answer, third.extra["tolerance"]) == ("-0.5", 0.1)
    assert third.media == (Media("image", str(tmp_path / "a.png")), Media("video", str(tmp_path / "c.mp4"), 8))
    assert [item.kind for item in fourth.media] == ["video", "image"]  # as the text names them
    assert fourth.source == "mine"
    with pytest.raises(IndexError):
        rows.question(4)


def test_content_ids_are_stable_wherever_the_file_lies(tmp_path: Path) -> None:
    ids = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "a.png").touch()
        rows = load_rows(write(folder, {"question": "x", "answer": "1", "image": "a.png"}, GOOD))
        ids.append([question.id for question in rows.questions])
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 2


def test_odd_but_sound_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        b"\xef\xbb\xbf" + json.dumps(GOOD).encode(),
        "",
        "   \t",
        '{"question": "Grüße \u2028 \\u00e9 \\ud83d\\ude00 日本", "answer": "ja"}\r',
        {"question": "x" * 5_000_000, "answer": 10**300},
        {"question": "null\u0000byte", "answer": "1"},
    )
    rows = load_rows(path, "stop")
    assert len(rows) == 4
    assert rows.question(1).messages[0]["content"] == "Grüße \u2028 é 😀 日本"
    assert rows.question(2).answer == "1" + "0" * 300


BAD_ROWS: list[tuple[Any, str, str]] = [
    ("{", "json", "expected a JSON object on one line"),
    ("[1, 2]", "json", "expected an object, got list"),
    ("null", "json", "expected an object, got null"),
    ("[" * 100_000, "json", "expected a JSON object"),
    ('{"answer": ' + "1" * 5000 + "}", "json", "expected a JSON object"),
    (b'{"question": "\xff", "answer": "1"}', "json", "expected UTF-8"),
    ({}, "question", "missing; expected question"),
    ({"question": 3, "answer": "1"}, "question", "expected text, got int"),
    ({"question": " ", "answer": "1"}, "question", "is blank"),
    ('{"question": "\\ud800", "answer": "1"}', "question", "half of a surrogate pair"),
    ({"question": "x"}, "answer", "missing"),
    ({"question": "x", "answer": None}, "answer", "missing"),
    ({"question": "x", "answer": ""}, "answer", "is blank"),
    ({"question": "x", "answer": True}, "answer", "expected text or a finite number, got bool"),
    ({"question": "x", "answer": ["1"]}, "answer", "got list"),
    ('{"question": "x", "answer": NaN}', "answer", "got float"),
    ({"question": "x", "answer": "1", "system": 3}, "system", "expected text, got int"),
    ({"question": "x", "answer": "1", "id": 1.5}, "id", "expected text or an integer"),
    ({"question": "x", "answer": "1", "id": ""}, "id", "is blank"),
    ({"question": "x", "answer": "1", "tolerance": -1}, "tolerance", "at least 0"),
    ({"question": "x", "answer": "1", "tolerance": "0"}, "tolerance", "expected a number"),
    ({"question": "x", "answer": "1", "extra_info": 3}, "extra_info", "expected an object, got int"),
    ({"question": "x", "answer": "1", "image": "no.png"}, "image", "does not exist"),
    ({"question": "x", "answer": "1", "image": "a\u0000.png"}, "image", "does not exist"),
    ({"question": "x", "answer": "1", "images": [3]}, "images", "images[0]: expected a path"),
    ({"question": "x", "answer": "1", "images": 3}, "images", "expected a list, got int"),
    ({"question": "x", "answer": "1", "images": ["a.png"], "image": "a.png"}, "images", "got both"),
    ({"question": "x", "answer": "1", "images": ["https://a/b.png"]}, "images", "expected a path or a file:// URL"),
    ({"question": "x", "answer": "1", "images": ["http://[b.png"]}, "images", "is no URL"),
    ({"question": "x", "answer": "1", "images": [{"image": "a.png", "nframes": 3}]}, "images", "nframes is for videos"),
    ({"question": "x", "answer": "1", "video": {"video": "a.png", "nframes": 0}}, "video", "whole number of at least 1"),
    ({"question": "x <image> <image>", "answer": "1", "image": "a.png"}, "images", "name <image> 2 times, the row brings 1"),
    ({"question": "x <image>", "answer": "1"}, "images", "name <image> 1 times, the row brings 0"),
    (full_row(prompt="How many?"), "prompt", "expected a list of messages, got str"),
    (full_row(prompt=[]), "prompt", "expected a list of messages"),
    (full_row(prompt=["hi"]), "prompt", "prompt[0]: expected role and content"),
    (full_row(prompt=[{"role": "tool", "content": "x"}]), "prompt", "expected role and content"),
    (
        full_row(prompt=[{"role": "user", "content": [{"type": "text", "text": "x"}]}]),
        "prompt",
        "prompt[0].content: expected text, got list",
    ),
    (full_row(prompt=[{"role": "system", "content": "x"}], videos=[]), "prompt", "expected the last message to be the user's"),
    (full_row(videos=[]), "videos", "name <video> 1 times, the row brings 0"),
    (full_row(videos=[{"video": "gone.mp4"}]), "videos", "videos[0]: file"),
    (full_row(reward_model="199", videos=["a.png"]), "reward_model", "expected an object with ground_truth"),
    (full_row(reward_model={"style": "rule"}, videos=["a.png"]), "answer", "missing"),
    (full_row(data_source=3, videos=["a.png"]), "data_source", "expected text, got int"),
]


@pytest.mark.parametrize(("row", "reason", "message"), BAD_ROWS, ids=range(len(BAD_ROWS)))
def test_a_bad_row_is_one_line_counted_or_raised(tmp_path: Path, row: Any, reason: str, message: str) -> None:
    (tmp_path / "a.png").touch()
    path = write(tmp_path, GOOD, row)
    rows = load_rows(path)
    assert (len(rows), rows.skipped) == (1, {reason: 1})
    (problem,) = rows.problems
    assert problem.startswith(f"{path}:2: {reason}")
    assert message in problem
    assert "\n" not in problem
    assert len(problem) < 600
    with pytest.raises(ValueError, match=r"data\.jsonl:2: ") as error:
        load_rows(path, "stop")
    assert str(error.value) == problem


def test_repeated_ids_and_rows_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, GOOD | {"id": "a"}, {"question": "y", "answer": 1, "id": "a"}, GOOD, GOOD | {"id": "b"})
    rows = load_rows(path)
    assert (len(rows), rows.skipped) == (3, {"duplicate": 2})
    assert rows.problems == (f"{path}:3: duplicate: id 'a' is already that of row 2", f"{path}:4: duplicate: the same question as row 1")


def test_skipped_rows_are_one_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, "{", {"question": "x"}, {"question": "y"}, GOOD)
    load_rows(path)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{path}: 3 of 4 rows skipped (answer 2, json 1); the first: {path}:1: json: ")


def test_nothing_usable_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.jsonl: has no rows"):
        load_rows(write(tmp_path, "", " "))
    with pytest.raises(ValueError, match=r"none of its 2 rows can be used; the first: .*data\.jsonl:1: answer: missing"):
        load_rows(write(tmp_path, {"question": "x"}, "{"))
    with pytest.raises(ValueError, match=r"gone\.jsonl: cannot be read \(No such file or directory\)"):
        load_rows(tmp_path / "gone.jsonl")
    with pytest.raises(ValueError, match=r"cannot be read \(Is a directory\)"):
        load_rows(tmp_path)
    with pytest.raises(ValueError, match=r"gone\.parquet: cannot be read"):
        load_rows(tmp_path / "gone.parquet")


def test_answers_may_be_left_out_for_an_own_reward(tmp_path: Path) -> None:
    assert load_rows(write(tmp_path, {"question": "x"}), require_answer=False).question(0).answer == ""


def test_a_configured_source_loads_rows(tmp_path: Path) -> None:
    assert len(load(RowsSource(kind="rows", path=write(tmp_path, GOOD)), seed=0, split="train")) == 1


def test_the_rows_of_the_documentation_load(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"```jsonl\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    for name in ("pictures/cats.png", "pictures/ball.png", "clips/throw.mp4"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert len(load_rows(write(tmp_path, *lines), "stop")) == len(lines) == 5
