"""The page of a question: everything in one file, nothing escaped wrongly."""

import base64
import io
import re
from pathlib import Path

import pytest
from PIL import Image

from headrace.files import write_whole
from headrace.questions.hopchain.page import write_page
from headrace.questions.hopchain.records import Candidate
from headrace.questions.hopchain.render import render
from headrace.questions.rows import load_rows
from tests.questions.hopchain.corpora import WORLD, built, lines


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("paged") / "corpus", WORLD, "videos.count=3", "held_out.size=0", "difficulty=null").folder


def test_it_shows_text_hops_and_a_frame_of_every_moment(corpus: Path) -> None:
    record = max(lines(corpus / "hops.jsonl"), key=lambda record: len(record["specification"]["routes"]))
    page = write_page(corpus, record["question_id"]).read_text(encoding="utf-8")
    candidate = Candidate.model_validate({name: record[name] for name in Candidate.model_fields})
    for line in render(candidate.specification, candidate.hops).splitlines():
        assert line in page
    named = {segment for hop in record["hops"] for segment in hop["segments"]}
    frames = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', page)
    assert len(frames) == len(named)
    assert all(Image.open(io.BytesIO(base64.b64decode(frame))).size == (64, 64) for frame in frames)
    assert f"{' + '.join(str(hop['value']) for hop in record['hops'])} = <b>{candidate.answer}</b>" in page
    assert "not word for word" not in page
    assert not re.search(r'(src|href)="(?!data:)', page)  # nothing from elsewhere


def test_the_frames_are_of_the_shots_that_are_named(corpus: Path) -> None:
    from headrace.questions.hopchain.world.script import PLACES

    record = lines(corpus / "hops.jsonl")[0]
    page = write_page(corpus, record["question_id"]).read_text(encoding="utf-8")
    moments = re.findall(r'base64,([^"]+)".*?<div class="quote">The (\w+) shows', page, re.DOTALL)
    for frame, place in moments:
        corner = Image.open(io.BytesIO(base64.b64decode(frame))).convert("RGB").getpixel((1, 1))
        nearest = min(PLACES, key=lambda name: sum(abs(a - b) for a, b in zip(PLACES[name], corner, strict=True)))
        assert nearest == place


def test_what_a_model_wrote_is_text_and_an_invented_quote_is_marked(corpus: Path, tmp_path: Path) -> None:
    changed = tmp_path / "corpus"
    changed.mkdir()
    for name in ("hops.jsonl", "captions.jsonl"):
        write_whole(
            changed / name,
            (corpus / name).read_text().replace('"quote":"The', '"quote":"<script>The').replace('"quote": "The', '"quote": "<script>The'),
        )
    page = write_page(changed, out=tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "&lt;script&gt;The" in page
    assert "not word for word in the captions" in page


def test_a_page_without_its_video_still_comes(corpus: Path, tmp_path: Path) -> None:
    moved = tmp_path / "corpus"
    moved.mkdir()
    for name in ("hops.jsonl", "captions.jsonl"):
        write_whole(moved / name, (corpus / name).read_text().replace(str(corpus), "/nowhere"))
    assert "no frame" in write_page(moved).read_text(encoding="utf-8")


def test_unknown_questions_and_folders_are_one_line(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no question 'x/9'; its \d+ ids look like 'scripted-00000\d/\d'"):
        write_page(corpus, "x/9")
    with pytest.raises(ValueError, match=r"hops\.jsonl: cannot be read .*expected the folder of a corpus"):
        write_page(tmp_path)


def test_every_row_has_its_page(corpus: Path) -> None:
    rows = load_rows(corpus / "train.parquet")
    pages = {write_page(corpus, rows.question(index).id) for index in range(len(rows))}
    assert len(pages) == len(rows)
