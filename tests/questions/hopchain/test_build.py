"""Whole builds: nothing is lost, they go on after kills and dead servers, and bad input is counted or one line."""

import itertools
import json
import multiprocessing
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.config import ConfigError, load_model
from headrace.generation import answered_integer, build
from headrace.questions.hopchain.accounts import table6
from headrace.questions.hopchain.prompt_texts import NAMES
from headrace.questions.hopchain.roles import ServerDown
from headrace.questions.hopchain.settings import CorpusConfig
from headrace.questions.rows import load_rows
from tests.questions.hopchain.chat_server import serving
from tests.questions.hopchain.conftest import write_clip
from tests.questions.hopchain.corpora import WORLD, built, configured, content, lines

SERVED = """
models:
  captioner: {url: "URL", model: eyes, patience: 1}
  writer: {url: "URL", model: words, max_tokens: 4096, patience: 1}
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("built") / "corpus").folder


def about(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "corpus.json").read_text())


def test_every_video_and_question_is_accounted_for(corpus: Path) -> None:
    accounts = {account["stage"]: account for account in about(corpus)["accounts"]}
    for account in accounts.values():
        assert account["entered"] == account["kept"] + sum(account["dropped"].values())
    order = ["videos", "admit", "segment", "caption"]
    assert [accounts[stage]["entered"] for stage in order] == [8] + [accounts[stage]["kept"] for stage in order[:-1]]
    assert accounts["write"]["entered"] == 3 * accounts["caption"]["kept"]
    for earlier, later in (("write", "judge"), ("judge", "difficulty"), ("difficulty", "assemble")):
        assert accounts[later]["entered"] == accounts[earlier]["kept"]
    tables = about(corpus)["table6"]
    assert accounts["assemble"]["kept"] == tables["train"]["questions"] + tables["held_out"]["questions"]
    assert accounts["caption"]["cost"]["calls"] == 8 * 8
    assert about(corpus)["cost"]["calls"] == sum(account["cost"]["calls"] for account in accounts.values())


def test_rows_are_what_the_trainer_reads(corpus: Path) -> None:
    rows = load_rows(corpus / "train.parquet", "stop")
    records = {record["question_id"]: record for record in lines(corpus / "hops.jsonl")}
    assert len(rows) == about(corpus)["table6"]["train"]["questions"] > 0
    for index in range(len(rows)):
        question = rows.question(index)
        record = records[question.id]
        assert int(question.answer) == sum(hop["value"] for hop in record["hops"])
        assert [message["role"] for message in question.messages] == ["system", "user"]
        assert question.messages[1]["content"].startswith("<video>\n")
        assert question.messages[1]["content"].endswith("as a single integer.")
        assert question.extra["hops"] == len(record["hops"])
        assert question.extra["tolerance"] == 0.0
        (clip,) = question.media
        assert (clip.kind, clip.frames, clip.max_pixels) == ("video", 8, 4096)
        assert Path(clip.path).is_file()
        assert not {"value", "quote", "scenes"} & question.extra.keys()  # hop records stay beside the rows


def test_columns_are_structured_and_carry_the_prompts_versions(corpus: Path) -> None:
    schema = pyarrow.parquet.read_schema(corpus / "train.parquet")
    assert str(schema.field("reward_model").type) == "struct<ground_truth: string, style: string>"
    prompts = json.loads(schema.metadata[b"headrace.hopchain"])["prompts"]
    assert set(prompts) == set(NAMES)
    assert all(entry["version"].isdigit() and len(entry["sha256"]) == 64 for entry in prompts.values())


def test_no_video_is_in_two_splits_and_held_out_videos_have_one_question(corpus: Path) -> None:
    videos: dict[str, list[str]] = {"train": [], "held_out": []}
    for record in lines(corpus / "hops.jsonl"):
        videos[record["split"]].append(record["video_id"])
    assert not set(videos["train"]) & set(videos["held_out"])
    assert 0 < len(videos["held_out"]) == len(set(videos["held_out"])) <= 2
    assert all(videos["train"].count(video) <= 2 for video in videos["train"])


def test_table_6_identities(corpus: Path) -> None:
    for split in ("train", "held_out"):
        rows = pyarrow.parquet.read_table(corpus / f"{split}.parquet").to_pylist()
        table = table6(rows)
        assert sum(n * count for n, count in table["hops"].items()) == sum(table["types"].values())
        answers = [int(row["reward_model"]["ground_truth"]) for row in rows]
        assert (table["answer_min"], table["answer_max"], table["answer_median"]) == (min(answers), max(answers), np.median(answers))


def test_the_same_build_again_changes_nothing_and_asks_nobody(corpus: Path) -> None:
    before, times = content(corpus), {path: path.stat().st_mtime_ns for path in (corpus / "work").rglob("*.json")}
    build(load_model(CorpusConfig, corpus.with_suffix(".yaml")))
    assert content(corpus) == before
    assert {path: path.stat().st_mtime_ns for path in (corpus / "work").rglob("*.json")} == times


def test_a_changed_configuration_is_refused_by_its_field(corpus: Path) -> None:
    config = load_model(CorpusConfig, corpus.with_suffix(".yaml"), ["draw.max_number=12"])
    with pytest.raises(ConfigError, match=r"begun with draw\.max_number = 9, now it is 12; give this one another folder, or .*--fresh"):
        build(config)
    assembled = load_model(CorpusConfig, corpus.with_suffix(".yaml"), ["at_once=1", "decoders=1"])
    assert build(assembled).folder == corpus


def test_killed_at_three_stages_the_same_command_ends_at_the_same_corpus(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    config = configured(folder)
    for stage in ("*/segment.json", "*/captions.jsonl", "*/judge.json"):
        process = multiprocessing.get_context("fork").Process(target=build, args=(config,))
        already = len(list((folder / "work").glob(stage)))
        process.start()
        deadline = time.monotonic() + 60
        while len(list((folder / "work").glob(stage))) <= already:
            assert process.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not (folder / "corpus.json").exists()
    build(config)
    assert content(folder) == content(corpus)


def test_the_commands_build_and_show(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    configured(folder)
    done = CliRunner().invoke(app, ["questions", "hopchain", str(folder.with_suffix(".yaml")), "videos.count=3", "held_out.size=0"])
    assert done.exit_code == 0, done.output
    for text in ("dropped for", "questions per video", "hops by type", "held out: 0 of 0 wanted"):
        assert text in done.output
    assert not (folder / "held_out.parquet").exists()
    shown = CliRunner().invoke(app, ["questions", "inspect", str(folder)])
    assert shown.exit_code == 0, shown.output
    assert len(list((folder / "pages").glob("*.html"))) == 1


def test_a_torn_caption_is_asked_for_again(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    built(folder)
    video = next(path for path in (folder / "work").iterdir() if (path / "captions.jsonl").exists())
    for later in ("caption", "write", "judge", "difficulty"):
        (video / f"{later}.json").unlink()
    captions = video / "captions.jsonl"
    captions.write_bytes(captions.read_bytes()[:-20])
    built(folder)
    assert content(folder) == content(corpus)


def test_real_client_against_a_real_server(tmp_path: Path) -> None:
    with serving() as server:
        folder = built(tmp_path / "corpus", WORLD + SERVED.replace("URL", server.url), "difficulty=null", "videos.count=4").folder
        requests = server.requests
    accounts = {account["stage"]: account for account in about(folder)["accounts"]}
    assert accounts["caption"]["cost"] == {"calls": 32, "prompt_tokens": 3200, "completion_tokens": 224}
    assert accounts["write"]["cost"]["calls"] == 4
    assert server.roles.count("judge") == accounts["judge"]["cost"]["calls"] >= accounts["judge"]["kept"] > 0
    assert {request["model"] for request in requests} == {"eyes", "words"}
    shown = [part for request in requests if request["model"] == "eyes" for part in request["messages"][0]["content"]]
    assert sum(part["type"] == "image_url" for part in shown) >= 32
    (_, written) = next(request["messages"] for request, role in zip(requests, server.roles, strict=True) if role == "write")
    assert {"segment", "start", "end", "digest", "text"} <= json.loads(written["content"])["timeline"][0].keys()


def test_a_server_that_dies_midway_costs_nothing_that_was_done(tmp_path: Path) -> None:
    """It dies at its 20th request; another one on the same port is asked only for the rest."""
    folder = tmp_path / "corpus"
    with serving(spoil=lambda number, role: 503 if number >= 20 else None) as server:
        port = server.server_port
        config = configured(folder, WORLD + SERVED.replace("URL", server.url), "difficulty=null", "videos.count=4")
        with pytest.raises(ServerDown, match=r"does not answer .*the same command goes on"):
            build(config)
        captioned = sum(len(lines(path)) for path in (folder / "work").glob("*/captions.jsonl"))
        first = server.roles[:20].count("caption")
    assert not list(folder.glob("*.parquet"))
    assert 0 < captioned <= first
    with serving(port) as server:
        build(config)
        assert server.roles.count("caption") == 32 - captioned
    assert about(folder)["table6"]["train"]["questions"] > 0


def test_replies_that_are_no_json_are_counted(tmp_path: Path) -> None:
    writes = itertools.count()

    def spoil(number: int, role: str) -> str | None:
        return "I cannot do that." if role == "write" and next(writes) % 2 else None

    with serving(spoil=spoil) as server:
        folder = built(tmp_path / "corpus", WORLD + SERVED.replace("URL", server.url), "difficulty=null", "at_once=1").folder
    write = next(account for account in about(folder)["accounts"] if account["stage"] == "write")
    assert write["dropped"] == {"not_json": 12}  # all three questions of a video come in one reply
    assert "no JSON object in the reply" in write["examples"]["not_json"]
    with (
        serving(spoil=lambda number, role: "Certainly!" if role == "judge" else None) as server,
        pytest.raises(ValueError, match=r"no question for training is left of 8 videos; .*judge"),
    ):
        built(tmp_path / "judge", WORLD + SERVED.replace("URL", server.url), "difficulty=null")
    assert server.roles.count("judge") > 0
    assert not list((tmp_path / "judge").glob("*.parquet"))


def test_a_request_that_a_server_refuses_drops_what_it_was_for(tmp_path: Path) -> None:
    with serving(spoil=lambda number, role: 400 if role == "caption" and number < 24 else None) as server:
        folder = built(tmp_path / "corpus", WORLD + SERVED.replace("URL", server.url), "difficulty=null", "at_once=1").folder
    caption = next(account for account in about(folder)["accounts"] if account["stage"] == "caption")
    assert caption["dropped"]["too_few_captions"] == 3
    assert "HTTP 400" in caption["examples"]["too_few_captions"]


def real_videos(folder: Path, bikes: Path) -> Path:
    """A real clip among files of every kind of trouble."""
    folder.mkdir()
    (folder / "street.mp4").write_bytes(bikes.read_bytes())
    (folder / "noise.mp4").write_bytes(np.random.default_rng(0).bytes(5000))
    (folder / "empty.mkv").touch()
    (folder / "notes.txt").write_text("no video")
    write_clip(folder / "short.mp4", frames=16)
    write_clip(folder / "still.mp4", frames=80)
    write_clip(folder / "still.mkv", frames=80)
    times = [*np.arange(40) * 0.2, *(8 + np.arange(40) * 0.1)]
    write_clip(folder / "variable.mp4", frames=80, colours=((200, 60, 60), (30, 60, 180)), times=times)
    return folder


def test_real_videos_and_trouble_of_every_kind(bikes: Path, tmp_path: Path) -> None:
    text = f"""
videos: {{kind: files, folders: [{{path: {real_videos(tmp_path / "videos", bikes)}, source: street}}]}}
min_duration: 9
frames: 140
draw: {{hops: {{2: 1}}, per_video: 3}}
difficulty: null
held_out: {{size: 0}}
{SERVED}"""
    with serving() as server:
        folder = built(tmp_path / "corpus", text.replace("URL", server.url)).folder
    accounts = {account["stage"]: account for account in about(folder)["accounts"]}
    assert accounts["videos"]["dropped"] == {"duplicate_id": 1}
    assert "still.mp4: id 'still' is already that of" in accounts["videos"]["examples"]["duplicate_id"]
    assert accounts["admit"]["dropped"] == {"unreadable": 2, "too_short": 1}
    assert accounts["segment"]["kept"] == 3
    captions = {entry["video_id"]: entry["captions"] for entry in lines(folder / "captions.jsonl")}
    assert [(caption["start"], caption["end"]) for caption in captions["street"]] == [(0.0, 3.04), (3.04, 5.48), (5.48, 7.48), (7.48, 10.0)]
    question = next(q for q in map(load_rows(folder / "train.parquet").question, range(3)) if q.extra["video_id"] == "street")
    assert question.media[0].frames == 140


@pytest.mark.parametrize(
    ("videos", "message"),
    [
        ("[{path: FOLDER/none}]", "videos.folders: .*/none is no folder and no .jsonl manifest"),
        ("[{path: FOLDER}]", "videos: no video in"),
        ("[{path: FOLDER/gone.jsonl}]", "gone.jsonl: cannot be read"),
    ],
)
def test_no_videos_are_one_line(tmp_path: Path, videos: str, message: str) -> None:
    text = f"videos: {{kind: files, folders: {videos.replace('FOLDER', str(tmp_path))}}}\ndifficulty: null\n" + SERVED.replace(
        "URL", "http://x"
    )
    with pytest.raises(ValueError, match=message):
        built(tmp_path / "corpus", text)


def test_a_manifest_names_videos_ids_and_sources(bikes: Path, tmp_path: Path) -> None:
    entries = [
        {"path": str(bikes), "id": "street 1", "source": "streets"},
        {"path": "gone.mp4"},
        {"file": "x"},
        {"path": str(bikes), "id": "street 1"},
    ]
    (tmp_path / "list.jsonl").write_text("\n".join([*map(json.dumps, entries), "{", ""]))
    text = f"videos: {{kind: files, folders: [{{path: {tmp_path}/list.jsonl}}]}}\nmin_duration: 5\nframes: 4\ndraw: {{hops: {{2: 1}}}}\n"
    text += "difficulty: null\nheld_out: {size: 0}\n"
    with serving() as server:
        folder = built(tmp_path / "corpus", text + SERVED.replace("URL", server.url)).folder
    accounts = {account["stage"]: account for account in about(folder)["accounts"]}
    assert accounts["videos"]["dropped"] == {"manifest": 2, "duplicate_id": 1}
    assert accounts["admit"]["dropped"] == {"unreadable": 1}
    assert {record["source"] for record in lines(folder / "hops.jsonl")} == {"streets"}


def test_an_empty_corpus_names_the_reasons_and_leaves_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no question for training is left of 8 videos; the commonest reasons: admit too_short 8 \(e\.g\. "
    ):
        built(tmp_path / "short", WORLD, "min_duration=180")
    with pytest.raises(ValueError, match=r"write specification 1 .*no 6 pairs of numbers from 1 to 25 with distinct totals"):
        built(tmp_path / "colliding", WORLD, "videos.count=1", "draw.hops={6: 1}", "draw.max_number=25", "draw.per_video=1")
    assert not list(tmp_path.rglob("*.parquet"))


def test_fresh_deletes_only_what_a_build_left(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "holiday.jpg").touch()
    with pytest.raises(ConfigError, match="--fresh does not delete it"):
        built(folder, fresh=True)
    assert (folder / "holiday.jpg").exists()


def test_two_builds_of_one_corpus_exclude_each_other(corpus: Path) -> None:
    from headrace.run_folder import lock

    held = lock(corpus / ".lock", wait=False)
    assert held is not None
    try:
        with pytest.raises(ConfigError, match="another process builds this corpus"):
            build(load_model(CorpusConfig, corpus.with_suffix(".yaml")))
    finally:
        held.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("videos: {kind: files, folders: [{path: x}]}\ndifficulty: null", "models: real videos need a captioner"),
        (
            "videos: {kind: files, folders: [{path: x}]}" + SERVED.replace("URL", "http://x"),
            "the filter needs the base policy's model directory",
        ),
        ("videos: {kind: scripted}\ndraw: {profile: release, hops: {4: 1}}", "give profile or hops, not both"),
        ("videos: {kind: scripted}\nvideo: 3", "video: no such field; is videos meant?"),
    ],
)
def test_configurations_that_cannot_work_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(tmp_path / "corpus", text)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<think>a</think><answer>\\boxed{199}</answer>", 199),
        ("<think>a</think><answer>\\boxed{1,024}</answer>", 1024),
        ("<think>a</think><answer>\\boxed{19.5}</answer>", None),
        ("<think>a</think><answer>\\boxed{many}</answer>", None),
        ("nothing", None),
    ],
)
def test_integers_of_the_base_policys_answers(response: str, answer: int | None) -> None:
    assert answered_integer(response) == answer
