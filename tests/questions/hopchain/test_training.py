"""The questions train: as a task with traces, through the difficulty filter of a real policy, and in a whole run."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from headrace.config import HopchainSource, ScratchVisionModel
from headrace.policy.scratch import build_vision
from headrace.questions.hopchain.world.script import ACTIONS, COLOURS, PLACES, SIDES
from headrace.questions.rows import load_rows
from headrace.questions.sets import Split, TaskSet, load
from headrace.questions.tasks.hopchain import HopchainTask, keywords
from headrace.rewards import score
from tests.questions.hopchain.corpora import WORLD, built, content, lines

pytest.importorskip("torchvision")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("trained") / "corpus", WORLD, "difficulty=null").folder


def task(corpus: Path, split: Split = "train", evidence: str = "captions") -> HopchainTask:
    made = load(HopchainSource.model_validate({"kind": "hopchain", "folder": corpus, "evidence": evidence}), 0, split)
    assert isinstance(made, HopchainTask)
    return made


def test_a_corpus_is_a_task_set_of_its_rows(corpus: Path) -> None:
    questions, rows = task(corpus), load_rows(corpus / "train.parquet")
    assert isinstance(questions, TaskSet)
    assert len(questions) == len(rows)
    for index in range(len(rows)):
        mine, row = questions.question(index), rows.question(index)
        assert (mine.id, mine.answer, mine.extra["hops"]) == (row.id, row.answer, row.extra["hops"])
        text = iter(re.findall(r"[\w-]+|[;.]", row.messages[1]["content"]))
        evidence, _, asked = mine.messages[0]["content"].partition(" | ")
        *words, end = (word.partition("@")[0] for word in asked.split())
        assert end == "="
        assert all(word in text for word in words)  # in this order
        assert len(set(evidence.split())) == len(evidence.split())
        shown = task(corpus, evidence="video").question(index)
        assert shown.media == row.media
        assert shown.messages[0]["content"] == f"<video>\n{asked}"


def test_keywords_carry_their_hop_and_their_side() -> None:
    line = "If it falls, look at the sea; otherwise look at the sky. There, if red, let B be 5; otherwise let B be 2."
    assert keywords(line, "B") == "it@B falls@B sea@B ; sky@b . red@B 5@B ; 2@b ."
    assert keywords("Use check A to choose", "B") == "A@B"


def test_clean_traces_are_right_and_noisy_ones_consistent(corpus: Path) -> None:
    questions = task(corpus)
    wrong = 0
    for index in range(len(questions)):
        answer = questions.question(index).answer
        assert score(questions.trace(index, np.random.default_rng(0)), answer, contract="answer_tag").total == pytest.approx(1.0)
        noisy = questions.trace(index, np.random.default_rng(index), noise=0.5)
        values = [int(value) for value in re.findall(r" (?:yes|no) (\d+)@", noisy)]
        assert noisy.endswith(f"<answer> {sum(values)} </answer>")
        wrong += str(sum(values)) != answer
    assert wrong > 0


def test_a_routed_hop_follows_the_verdict_it_was_given(corpus: Path) -> None:
    """With every decision flipped, a routed hop looks at the other destination, whose truth is the opposite: flipped again, it agrees."""
    questions = task(corpus)
    records = {record["question_id"]: record for record in lines(corpus / "hops.jsonl")}
    seen = 0
    for index in range(len(questions)):
        record = records[questions.question(index).id]
        if [len(record["specification"]["routes"]), record["specification"]["routes"][:1]] != [1, [[0, 1]]]:
            continue
        hops, seen = record["hops"], seen + 1
        flipped = questions.trace(index, np.random.default_rng(0), noise=1.0)
        router = "no" if hops[0]["value"] == hops[0]["yes"] else "yes"
        half = len(hops[1]["scenes"]) // 2
        destination = hops[1]["scenes"][0 if router == "yes" else half]
        place = destination.removeprefix("the ")
        assert f"B A {router} {place}@{'B' if router == 'yes' else 'b'} {place} " in flipped
        assert f" {hops[1]['value']} sum " in flipped.split(" ; ")[1]
    assert seen > 0


def test_the_vocabulary_covers_both_splits(corpus: Path) -> None:
    words = {*task(corpus).vocabulary(), "<think>", "</think>", "<answer>", "</answer>", "<video>"}
    assert task(corpus).vocabulary() == task(corpus, "held_out").vocabulary()
    for split in ("train", "held_out"):
        for evidence in ("captions", "video"):
            questions = task(corpus, split, evidence)  # type: ignore[arg-type]
            for index in range(len(questions)):
                assert set(questions.question(index).messages[0]["content"].split()) <= words
                assert set(questions.trace(index, np.random.default_rng(1), 0.5).split()) <= words


def test_a_folder_that_is_no_corpus_is_one_line(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"corpus\.json: cannot be read .*headrace questions hopchain"):
        task(tmp_path)
    (tmp_path / "corpus.json").write_text("[]")
    (tmp_path / "hops.jsonl").touch()
    with pytest.raises(ValueError, match="is not a corpus' metadata"):
        task(tmp_path)


def test_a_real_policy_filters_by_difficulty(corpus: Path, tmp_path: Path) -> None:
    """A vision-language model with random weights sees every proxy and solves nothing: every question stays, none is unusable."""
    rows = load_rows(corpus / "train.parquet")
    texts = [message["content"] for index in range(len(rows)) for message in rows.question(index).messages]
    words = {word for text in texts for word in re.sub(r"</?(think|answer|video)>", " ", text).split()} | _world_words()
    source = ScratchVisionModel(kind="scratch_vision", hidden=32, layers=1, heads=1, vision_hidden=32, vision_layers=1)
    model = tmp_path / "model"
    build_vision(model, source, sorted(words), seed=0)
    folder = built(tmp_path / "corpus", WORLD, f"difficulty={{model: {model}, dtype: float32, rollouts: 2, max_tokens: 4}}").folder
    assert content(folder)["hops"] == content(corpus)["hops"]
    solved = [json.loads(path.read_text()) for path in (folder / "work").glob("*/difficulty.json")]
    assert {fate for record in solved for fate in record["fates"].values()} == {"kept"}
    assert {count for record in solved for count in record["answered"].values()} == {2}


def _world_words() -> set[str]:
    """Words that questions of the world may hold, with the punctuation that may follow them."""
    text = """In Compare two moments: and If is shown before let be otherwise Use check A B C to choose where look at which compare There,
    if the first-named moment of its second shape on in frame Report + as a single integer"""
    numbers = map(str, range(1, 10))
    every = (PLACES, COLOURS, SIDES, ACTIONS, numbers, text.split())
    return {f"{word}{mark}" for words in every for word in words for mark in ("", ",", ".", ";", ":")}
