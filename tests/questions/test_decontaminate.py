"""Decontamination: EX-5.11, the candidate rate of the bands, pictures, and that files come out whole."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from PIL import Image

from headrace.decontamination import clean
from headrace.questions.decontaminate import BAND_ROWS, BANDS, decontaminate, jaccard, normalised, shingles
from headrace.questions.rows import load_rows
from headrace.records import Media, Question

pytest.importorskip("datasketch")
pytest.importorskip("imagehash")

BASE = "In triangle ABC, AB = 5, BC = 7 and angle B = 60 degrees. Find AC."
VARIANTS = {
    "In triangle ABC, AB = 5, BC = 7 and angle B = 60 degrees. Find the length AC.": (48, 63),
    "In triangle ABC, AB = 6, BC = 8 and angle B = 60 degrees. Find AC.": (40, 60),
    "In triangle ABC, AB=5, BC=7, and angle B=60 degrees; find AC": (50, 50),
}


def question(name: str, text: str, *media: Media) -> Question:
    return Question(name, ({"role": "system", "content": "shared by all"}, {"role": "user", "content": text}), "1", media)


@pytest.mark.parametrize(("text", "fraction"), VARIANTS.items())
def test_ex_5_11_jaccard(text: str, fraction: tuple[int, int]) -> None:
    mine, base = shingles(text), shingles(BASE)
    assert (len(mine & base), len(mine | base)) == fraction
    assert jaccard(mine, base) == fraction[0] / fraction[1]


def test_ex_5_11_removes_the_last_alone() -> None:
    train = [question(f"t{number}", text) for number, text in enumerate(VARIANTS)]
    findings = decontaminate(train, [question("other", "Something else entirely, at length."), question("base", BASE)])
    assert findings.removed == {2}
    assert (findings.matches[0].evaluation, findings.matches[0].score) == (1, 1.0)
    assert [(match.train, round(match.score, 4)) for match in findings.near] == [(0, 0.7619), (1, 0.6667)]


def test_the_threshold_is_strict() -> None:
    train, base = [question("t", next(iter(VARIANTS)))], [question("b", BASE)]
    assert decontaminate(train, base, threshold=48 / 63).removed == set()
    assert decontaminate(train, base, threshold=48 / 63 - 1e-9).removed == {0}


def test_bands_let_few_pairs_slip() -> None:
    """Register 17: at Jaccard 0.8 the bands must find all but 5e-5 of the pairs; measured on pairs just above the threshold."""
    assert pytest.approx(0.99995, abs=1e-5) == 1 - (1 - 0.8**BAND_ROWS) ** BANDS
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz0123456789"))
    train, base = [], []
    for number in range(200):
        text = rng.choice(letters, 240)
        changed = text.copy()
        changed[rng.choice(48, 5, replace=False) * 5] = "z"
        base.append(question(f"b{number}", "".join(text)))
        train.append(question(f"t{number}", "".join(changed)))
    alike = {
        n
        for n, (one, other) in enumerate(zip(train, base, strict=True))
        if jaccard(*(shingles(q.messages[1]["content"]) for q in (one, other))) > 0.8
    }
    assert len(alike) > 50
    assert decontaminate(train, base).removed == alike


def test_texts_of_any_length_and_script() -> None:
    assert normalised("  Größe: 5 cm²! ") == "gr e 5 cm"
    assert shingles("a b") == {"a b"}
    assert shingles("¿?") == frozenset()
    assert decontaminate([question("t", "?")], [question("b", "!")]).removed == set()
    assert decontaminate(
        [
            question(
                "t",
                "<image> 7?",
            )
        ],
        [question("b", "7")],
    ).removed == {0}


def picture(path: Path, seed: int, noise: float = 0.0) -> Path:
    rng = np.random.default_rng(seed)
    coarse = rng.random((8, 8, 3)).repeat(16, 0).repeat(16, 1)
    Image.fromarray((255 * np.clip(coarse + noise * rng.standard_normal(coarse.shape), 0, 1)).astype(np.uint8)).save(path)
    return path


def test_pictures_and_clips(tmp_path: Path) -> None:
    for seed in range(6):
        picture(tmp_path / f"{seed}.png", seed)
    picture(tmp_path / "again.jpg", 3, noise=0.02)
    (tmp_path / "broken.png").write_bytes(b"no picture")
    (tmp_path / "a.mp4").write_bytes(b"clip")
    shutil.copy(tmp_path / "a.mp4", tmp_path / "copy.mp4")
    (tmp_path / "b.mp4").write_bytes(b"clap")

    def shown(name: str, kind: Literal["image", "video"], file: str, text: str) -> Question:
        return question(name, f"<{kind}> {text}", Media(kind, str(tmp_path / file)))

    train = [shown(f"t{n}", "image", name, f"number {n * 1111}") for n, name in enumerate(("again.jpg", "0.png", "broken.png"))]
    train += [shown(f"v{n}", "video", name, f"clip {n * 1111}") for n, name in enumerate(("copy.mp4", "b.mp4"))]
    asked = [shown(f"e{n}", "image", f"{n}.png", f"what is this, {n * 99}?") for n in (2, 3, 4, 5)]
    asked.append(shown("clip", "video", "a.mp4", "what happens here?"))
    findings = decontaminate(train, asked)
    assert {(match.train, match.evaluation, match.kind) for match in findings.matches} == {(0, 1, "image"), (3, 4, "clip")}
    assert findings.unreadable == [str(tmp_path / "broken.png")]
    assert findings.pictures_within[8] >= findings.pictures_within[4] == 1


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_clean_rows_are_the_rows_as_they_stood(tmp_path: Path, suffix: str) -> None:
    rows = [
        {"id": f"q{n}", "question": f"How much is {n} times {n + 71}, and why so?", "answer": n * (n + 71), "note": "é"} for n in range(30)
    ]
    asked = [{"question": rows[n]["question"].upper(), "answer": 1} for n in (4, 17)]
    train, out = tmp_path / f"train.{suffix}", tmp_path / "deep" / f"clean.{suffix}"
    if suffix == "jsonl":
        train.write_text("\n".join([*(json.dumps(row) for row in rows[:20]), "", "{broken", *(json.dumps(row) for row in rows[20:])]))
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), train)
    (tmp_path / "bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    out.parent.mkdir()
    findings = clean(train, [tmp_path / "bench.jsonl"], out)
    assert findings.removed == {4, 17}
    assert [each.id for each in load_rows(out).questions] == [f"q{n}" for n in range(30) if n not in (4, 17)]
    assert load_rows(out).questions[0] == replace(load_rows(train).questions[0], source="clean")
    report = json.loads((out.parent / "clean.decontamination.json").read_text())
    assert (report["removed"], report["removed_by"]) == (2, {"text": 2})
    assert [match["id"] for match in report["matches"]] == ["q4", "q17"]
    html = (out.parent / "clean.decontamination.html").read_text()
    assert "HOW MUCH IS 4 TIMES 75" in html
    assert "<script" not in html


def test_nothing_is_overwritten_and_media_keep_their_paths(tmp_path: Path) -> None:
    picture(tmp_path / "0.png", 0)
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "What?", "answer": 1, "image": "0.png"}))
    (tmp_path / "bench.jsonl").write_text(json.dumps({"question": "Else?", "answer": 1}))
    with pytest.raises(ValueError, match="is one of the files compared"):
        clean(tmp_path / "train.jsonl", [tmp_path / "bench.jsonl"], tmp_path / "bench.jsonl")
    with pytest.raises(ValueError, match="write the clean rows beside"):
        clean(tmp_path / "train.jsonl", [tmp_path / "bench.jsonl"], tmp_path / "other" / "clean.jsonl")
    with pytest.raises(ValueError, match="expected the format of"):
        clean(tmp_path / "train.jsonl", [tmp_path / "bench.jsonl"], tmp_path / "clean.parquet")
    with pytest.raises(ValueError, match="threshold"):
        clean(tmp_path / "train.jsonl", [tmp_path / "bench.jsonl"], tmp_path / "clean.jsonl", threshold=2)
