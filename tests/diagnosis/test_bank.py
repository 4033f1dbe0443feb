"""Banks: written and read, bad rows by name; made blind, gone on with, labelled by the scene, by a router, by a file."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from headrace import cli
from headrace.config import ConfigError, EasyVQASource, ScratchVisionModel
from headrace.diagnosis import build as building
from headrace.diagnosis.bank import Claim, Entry, Response, bank_row, digest, read_bank, write_bank
from headrace.diagnosis.build import Plan, build
from headrace.diagnosis.scoring import _encoder, fixed_responses
from headrace.evaluation.job import prepare
from headrace.policy.sources import materialise
from headrace.questions.support import load_labels
from headrace.records import Media, Question
from tests.credit.router_server import completion, serving, span

pytest.importorskip("easy_vqa")
from headrace.questions.tasks.easy_vqa import COLOURS, SHAPES, EasyVQA

SETTINGS = """
run: {seed: 3}
model: {source: {kind: scratch_vision}}
questions: {train: {kind: easy_vqa, count: 8}, held_out: {kind: easy_vqa, hops: [1], split: test, count: 24}, system_prompt: sum}
sampling: {max_tokens: 8, batch_rows: 4}
"""
WORDS = f"credit.pacg.router={{kind: rules, patterns: ['({'|'.join(COLOURS + SHAPES)})']}}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = ScratchVisionModel(kind="scratch_vision", hidden=32, layers=1, heads=1, vision_hidden=32, vision_layers=1)
    words = EasyVQA(EasyVQASource(kind="easy_vqa", hops=(1,), count=8), 0, "train").vocabulary()
    return materialise(source, tmp_path_factory.mktemp("cache"), 0, words)


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    path = tmp_path / "settings.yaml"
    path.write_text(SETTINGS)
    return path


@pytest.fixture
def picture(tmp_path: Path) -> Media:
    Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
    return Media("image", str(tmp_path / "red.png"), max_pixels=4096)


def plan(model: Path, settings: Path, out: Path, *overrides: str, **options: Any) -> Plan:
    job = prepare(model, settings, overrides=overrides or (WORDS,), out=out.with_name("work"), credit=True)
    return Plan(job, out, **{"questions": 3, "responses": 2, **options})


# ------------------------------------------------------------------------------------------------------ the file


@pytest.mark.parametrize("name", ["bank.jsonl", "bank.parquet"])
def test_what_is_written_is_read(tmp_path: Path, picture: Media, name: str) -> None:
    question = Question("q1", ({"role": "system", "content": "s"}, {"role": "user", "content": "<image> red ?"}), "yes", (picture,), "set")
    responses = (
        Response("red circle", [4, 5], False, [Claim("red", 1, "supported"), Claim("circle", 2)]),
        Response("", [3], claims=[]),
        Response("none", claims=None),
    )
    write_bank([bank_row(Entry(question, responses, True))], tmp_path / name)
    (entry,) = read_bank(tmp_path / name).entries
    assert (entry.responses, entry.think_prefill) == (responses, True)
    assert (entry.question.id, entry.question.messages, entry.question.media) == ("q1", question.messages, (picture,))
    assert entry.question.answer == ""


def row(picture: Media, **fields: Any) -> dict[str, Any]:
    return {"id": "q", "question": "red ?", "image": picture.path, "responses": [{"text": "red", "claims": [{"text": "red"}]}], **fields}


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"responses": None}, "responses: missing"),
    ({"responses": "red"}, "responses: expected `array`, got `str`"),
    ({"responses": [{"claims": []}]}, r"responses\[0\]: object missing required field `text`"),
    (
        {"responses": [{"text": "a", "claims": [{"text": "a", "label": "right"}]}]},
        r"responses\[0\].claims\[0\].label: invalid enum value 'right'",
    ),
    ({"responses": [{"text": "a", "claims": [{"text": "a", "occurrence": 0}]}]}, r"claims\[0\].occurrence: expected `int` >= 1"),
    ({"responses": [{"text": "a", "token_ids": [1, -2]}]}, r"token_ids\[1\]: expected `int` >= 0"),
    ({"think_prefill": "yes"}, "think_prefill: expected true or false"),
    ({"image": "nowhere.png"}, "image: file .* does not exist"),
    ({"image": None}, "images: a bank needs a picture or a clip"),
]


@pytest.mark.parametrize(("fields", "words"), FAULTS)
def test_a_bad_row_is_one_line_and_the_others_stay(tmp_path: Path, picture: Media, fields: dict[str, Any], words: str) -> None:
    path = tmp_path / "bank.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (row(picture), row(picture, id="bad", **fields))))
    bank = read_bank(path)
    (problem,) = bank.problems
    assert (len(bank.entries), bank.left_out) == (1, 1)
    with pytest.raises(ValueError, match=words):
        raise ValueError(problem)
    assert problem.startswith(f"{path}:2: ")
    assert "\n" not in problem


def test_a_bank_without_a_usable_row_is_refused(tmp_path: Path, picture: Media) -> None:
    path = tmp_path / "bank.jsonl"
    path.write_text(json.dumps(row(picture, responses=[])) + "\n")
    with pytest.raises(ValueError, match=r"none of its 1 rows can be used; the first: .*responses: missing"):
        read_bank(path)


def test_labels_do_not_change_what_was_scored(picture: Media) -> None:
    def entry(label: Any, text: str = "red") -> Entry:
        return Entry(Question("q", (), "", (picture,)), (Response("red", claims=[Claim(text, 1, label)]),))

    assert digest([entry(None)]) == digest([entry("supported")])
    assert digest([entry(None)]) != digest([entry(None, "re")])


def test_token_ids_count_where_they_spell_the_text(model: Path, tmp_path: Path, picture: Media) -> None:
    """Other ids, as of another tokenizer, are made anew from the text; both end with the model's end token."""
    path = tmp_path / "bank.jsonl"
    path.write_text(json.dumps(row(picture)) + "\n")
    encoder = _encoder(model, read_bank(path))
    ids = encoder.tokenizer.encode("red circle", add_special_tokens=False)
    ended = [*ids, encoder.eos_ids[0]]
    responses = [{"text": "red circle", "token_ids": given} for given in (ended, ids[::-1], [10**9], [encoder.banned_ids[0], *ids], None)]
    path.write_text(json.dumps(row(picture, responses=responses)) + "\n")
    (entry,) = read_bank(path).entries
    fixed = fixed_responses(entry, encoder)
    assert [each.token_ids.tolist() for each in fixed] == [ended] * 5
    assert [each.retokenized for each in fixed] == [False, True, True, True, True]


# ------------------------------------------------------------------------------------------------------ building


def test_a_build_goes_on_where_it_was(model: Path, settings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tmp_path / "whole.jsonl"
    build(plan(model, settings, whole))
    stopped, shown = tmp_path / "stopped.jsonl", []

    def stop(done: int, total: int) -> None:
        shown.append(done)
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(plan(model, settings, stopped), progress=stop)
    assert not stopped.exists()
    with (tmp_path / ".stopped.jsonl.partial").open("a") as file:
        file.write('{"id": "torn')
    with pytest.raises(ConfigError, match="half made with another max_tokens"):
        build(plan(model, settings, stopped, WORDS, "sampling.max_tokens=9"))
    build(plan(model, settings, stopped), progress=lambda done, _: shown.append(done))
    assert shown == [0, 2, 2, 3]
    assert stopped.read_text() == whole.read_text()
    with pytest.raises(ConfigError, match="exists"):
        build(plan(model, settings, stopped))
    bank = read_bank(whole)
    assert [message["role"] for message in bank.entries[0].question.messages] == ["system", "user"]
    assert len({entry.question.id for entry in bank.entries}) == 3
    assert all(len(entry.responses) == 2 for entry in bank.entries)


def test_neither_answers_nor_scores_choose(model: Path, settings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every right answer changed, the bank is the same to the byte."""
    build(plan(model, settings, tmp_path / "one.jsonl"))
    monkeypatch.setattr(building, "load", lambda *rest, **options: _Wrong(load(*rest, **options)))
    build(plan(model, settings, tmp_path / "two.jsonl"))
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()


load = building.load


class _Wrong:
    def __init__(self, questions: Any) -> None:
        self.questions = questions
        self.supports = questions.supports

    def __len__(self) -> int:
        return len(self.questions)

    def question(self, index: int) -> Question:
        from dataclasses import replace

        return replace(self.questions.question(index), answer="wrong")


def test_a_served_router_may_label(model: Path, settings: Path, tmp_path: Path) -> None:
    """Contradicted is unsupported; what cannot be told has no label; what is no direct claim is none; the answer is not sent."""
    texts: list[str] = []

    def behave(number: int, request: dict[str, Any]) -> Any:
        said = request["messages"][1]["content"][-1]["text"]
        response = [word for word in said.split("<response>\n")[1].split() if word.isalnum()]
        texts.append(said)
        statuses = ("supported", "contradicted", "unverifiable", "supported")
        return completion(
            {
                "spans": [
                    span(word, 1, k != 3, status) for k, (word, status) in enumerate(zip(dict.fromkeys(response), statuses, strict=False))
                ]
            }
        )

    with serving(behave) as server:
        router = f"credit.pacg.router={{kind: server, url: '{server.url}', model: m}}"
        built = build(plan(model, settings, tmp_path / "bank.jsonl", router, labels="router"))
    labels = {
        tuple(claim.label for claim in response.claims or ())
        for entry in read_bank(tmp_path / "bank.jsonl").entries
        for response in entry.responses
    }
    assert ("supported", "unsupported", None) in labels
    assert built.counts["responses"] == len(texts) == 6


def test_a_dead_router_costs_claims_and_is_counted(model: Path, settings: Path, tmp_path: Path) -> None:
    with serving(lambda number, request: (400, b"no")) as server:
        router = f"credit.pacg.router={{kind: server, url: '{server.url}', model: m}}"
        built = build(plan(model, settings, tmp_path / "bank.jsonl", router))
    assert built.counts["not routed: refused"] == 6
    assert all(response.claims is None for entry in read_bank(tmp_path / "bank.jsonl").entries for response in entry.responses)


def test_labels_from_a_file(model: Path, settings: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.jsonl"
    build(plan(model, settings, plain))
    claims = [
        (entry.question.id, number, claim)
        for entry in read_bank(plain).entries
        for number, response in enumerate(entry.responses)
        for claim in response.claims or ()
    ]
    question, number, claim = claims[0]
    labels = tmp_path / "labels.jsonl"
    given = {"id": question, "response": number, "text": claim.text, "occurrence": claim.occurrence, "label": "unsupported", "by": "me"}
    labels.write_text(json.dumps(given) + "\n")
    build(plan(model, settings, tmp_path / "bank.jsonl", labels=labels))
    found = [
        claim.label
        for entry in read_bank(tmp_path / "bank.jsonl").entries
        for response in entry.responses
        for claim in response.claims or ()
    ]
    assert found == ["unsupported", *[None] * (len(claims) - 1)]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"label": "yes"}, "label: expected supported or unsupported, got 'yes'"),
        ({"response": "0"}, "response: expected a number from 0"),
        ({"id": 3}, "id: expected the id of a question"),
        ({"occurrence": 0}, "occurrence: expected a whole number"),
    ],
)
def test_bad_labels_are_named(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    path = tmp_path / "labels.jsonl"
    path.write_text(json.dumps({"id": "q", "response": 0, "text": "red", "label": "supported"} | fields) + "\n")
    with pytest.raises(ValueError, match=f"labels.jsonl:1: {words}"):
        load_labels(path)


def test_what_cannot_be_built_is_said(model: Path, settings: Path, tmp_path: Path) -> None:
    out = tmp_path / "bank.jsonl"
    with pytest.raises(ConfigError, match=r"credit\.pacg\.router: nothing finds claims"):
        build(plan(model, settings, out, "run.seed=4"))
    with pytest.raises(ConfigError, match="patterns do not look at pictures"):
        build(plan(model, settings, out, labels="router"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "red ?", "answer": "yes"}) + "\n")
    job = prepare(model, rows, overrides=(WORDS,), out=tmp_path / "work", credit=True)
    with pytest.raises(ConfigError, match="do not know what their pictures show"):
        build(Plan(job, out, 3, 2, "scene"))
    with pytest.raises(ConfigError, match="no question with a picture"):
        build(Plan(job, out, 3, 2))


def test_the_command_line(
    model: Path, settings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def headrace(*words: Any) -> tuple[Any, str]:
        monkeypatch.setattr("sys.argv", ["headrace", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        shown = capsys.readouterr()
        return ended.value.code, shown.out + shown.err

    bank, out = tmp_path / "bank.jsonl", tmp_path / "out"
    status, told = headrace("diagnose", "build-bank", model, settings, bank, WORDS, "--questions", 3, "--responses", 2)
    assert (status or 0, "3 questions" in told) == (0, True), told
    status, told = headrace("diagnose", bank, model, "--out", out, "--intervention", "grey", "--no-text-control")
    assert (status or 0, f"report: {out / 'diagnosis.html'}" in told) == (0, True), told
    report = json.loads((out / "diagnosis.json").read_text())
    assert report["settings"]["intervention"] == "grey"
    assert report["checkpoints"][0]["text"]["overall"]["claims"] == 0
    assert "Text control" not in (out / "diagnosis.html").read_text()
    status, told = headrace("diagnose", tmp_path / "none.jsonl", model, "--out", out)
    assert (status, told) == (1, f"headrace: {tmp_path / 'none.jsonl'}: cannot be read (No such file or directory)\n")
    status, told = headrace("diagnose", bank, tmp_path, "--out", out)
    assert status == 1
    assert "is neither a model directory (config.json) nor a run folder" in told
