"""What an ill-willed user tries: every fault is one line and status 1, or is counted and the run goes on; nothing is lost."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import headrace
from headrace.config import Config, ConfigError
from headrace.interrupt import Interrupt
from headrace.journal.report import build
from headrace.records import Question
from headrace.run_folder import claim_folder
from tests import runs
from tests.test_trainer import BARE, by_chance


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def bare(tmp_path: Path, store: Path) -> Callable[..., Config]:
    """The smallest run; takes overrides."""
    path = runs.write_config(tmp_path, store, BARE)
    return lambda *overrides: headrace.load_config(path, overrides)


def train(config: Config, **options: object) -> headrace.TrainResult:
    return headrace.Trainer(config, reward=by_chance, **options).train()


# ------------------------------------------------------------------------------------------------------ the run folder


def test_two_processes_never_share_a_run_folder(bare: Callable[..., Config]) -> None:
    config = bare("run.steps=1")
    with claim_folder(config, fresh=False):
        for fresh in (False, True):
            with pytest.raises(ConfigError, match="another process is training there"):
                train(config, fresh=fresh)
    assert train(config).step == 1, "the lock goes with its holder"
    assert train(bare("run.steps=2")).step == 2


def test_fresh_deletes_what_a_run_left_and_nothing_else(bare: Callable[..., Config], tmp_path: Path) -> None:
    config = bare("run.steps=1")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("precious")
    config.run_folder.parent.mkdir()
    config.run_folder.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="is not a run folder"):
        train(config, fresh=True)
    assert (elsewhere / "mine").read_text() == "precious"
    (elsewhere / "mine").rename(tmp_path / "mine")
    train(config)
    (elsewhere / "link").symlink_to(tmp_path / "mine")
    assert train(config, fresh=True).step == 1
    assert (tmp_path / "mine").read_text() == "precious"
    assert not (elsewhere / "link").is_symlink()


@pytest.mark.parametrize("content", [b"a: [", b"", b"- 1", b"\xff\xfe"])
def test_a_damaged_configuration_on_record_is_one_line(bare: Callable[..., Config], content: bytes) -> None:
    config = bare("run.steps=1")
    (config.run_folder / "checkpoints").mkdir(parents=True)
    (config.run_folder / "config.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.yaml: .*--fresh") as caught:
        train(config)
    assert "\n" not in str(caught.value)
    assert train(config, fresh=True).step == 1
    shutil.rmtree(config.run_folder)


def test_a_configuration_may_be_mended_until_the_run_has_done_something(bare: Callable[..., Config]) -> None:
    mistaken = bare("run.steps=1", "optimizer.learning_rate=0.5")
    claim_folder(mistaken, fresh=False).close()
    (mistaken.run_folder / "config.yaml").write_text(mistaken.model_dump_json())  # JSON is YAML
    assert train(bare("run.steps=1")).step == 1
    with pytest.raises(ConfigError, match=r"the run there has optimizer\.learning_rate"):
        train(bare("run.steps=2", "optimizer.learning_rate=0.5"))


# ------------------------------------------------------------------------------------------------------ signals and streams


@pytest.fixture
def hangup_heard() -> Iterator[None]:
    """SIGHUP as a terminal delivers it, also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup_heard")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_save_once_there_is_something_and_stop_at_once_before(number: int) -> None:
    with Interrupt() as interrupt:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        interrupt.guard()
        os.kill(os.getpid(), number)
        assert interrupt.requested
        os.kill(os.getpid(), signal.SIGTERM)  # a supervisor that repeats itself takes nothing away
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_launcher_that_passes_ctrl_c_on_is_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with Interrupt() as interrupt:
        interrupt.guard()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.requested


def test_nohup_stays() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupt.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_goes_on_when_nobody_reads_its_output(tmp_path: Path, store: Path) -> None:
    """As under ``2>&1 | head -1``: the reader is gone at once."""
    path = runs.write_config(tmp_path, store, BARE)
    reading, writing = os.pipe()
    os.close(reading)
    subprocess.run([sys.executable, "-m", "headrace", "train", str(path)], stdout=writing, stderr=writing, timeout=120, check=False)
    os.close(writing)
    folder = tmp_path / "runs" / "bare"
    assert '"finished"' in (folder / "outcome.json").read_text()
    assert (folder / "report.html").exists()


# ------------------------------------------------------------------------------------------------------ questions


@pytest.mark.parametrize("bad", ["ball " * 3000, "zebra"], ids=["beyond the context", "unknown word"])
def test_a_bad_question_of_two_is_left_out_however_often_it_comes_round(
    bare: Callable[..., Config], caplog: pytest.LogCaptureFixture, bad: str
) -> None:
    words = {"good": "ball > cone", "bad": bad}
    questions = [Question(id=name, messages=({"role": "user", "content": text},), answer="1") for name, text in words.items()]
    config = bare("run.steps=4", "run.questions_per_step=3")
    assert train(config, questions=questions).step == 4
    rows = runs.rows(config.run_folder / "metrics.jsonl")
    assert [row["questions/trained"] for row in rows] == [3] * 4
    assert sum(row.get("questions/unusable", 0) for row in rows) >= 4
    assert len([record for record in caplog.records if "question bad" in record.getMessage()]) == 1
    with pytest.raises(ValueError, match="question bad"):
        train(bare("run.name=none"), questions=questions[1:])


# ------------------------------------------------------------------------------------------------------ damaged files


@pytest.mark.parametrize(
    "change",
    [{"extra": {}}, {"extra": None}, {"parameters": []}, {"learner": {}}, {"learner": {"updates": "2"}}, {"step": "2"}],
    ids=str,
)
def test_an_edited_checkpoint_is_one_line(bare: Callable[..., Config], change: dict[str, object]) -> None:
    config = bare("run.steps=1")
    train(config)
    path = config.run_folder / "checkpoints" / "step_000001" / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=r"^(checkpoint|ledger).*") as caught:
        train(bare("run.steps=2"))
    assert "\n" not in str(caught.value)


def test_a_damaged_index_prints_no_traceback(bare: Callable[..., Config], caplog: pytest.LogCaptureFixture) -> None:
    train(bare("run.steps=1"))
    config = bare("run.steps=2")
    (config.run_folder / "checkpoints" / "step_000001" / ".metadata").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"checkpoint .* cannot be read"):
        train(config)
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("samples.jsonl", '{"step": 1, "rollouts": 5}'),
        ("samples.jsonl", '{"step": 1}'),
        ("mask_tokens.jsonl", '{"step": 1, "removed": 5}'),
        ("config.yaml", "run: 5"),
    ],
)
def test_a_report_of_edited_tables_is_one_line(bare: Callable[..., Config], name: str, content: str) -> None:
    config = bare("run.steps=1")
    train(config)
    (config.run_folder / name).write_text(content + "\n")
    with pytest.raises(ValueError, match="what no run writes") as caught:
        build([config.run_folder], config.run_folder / "report.html")
    assert "\n" not in str(caught.value)


def test_ranks_save_and_end_when_their_launcher_is_killed(tmp_path: Path, store: Path) -> None:
    path = runs.write_config(tmp_path, store, BARE)
    folder = tmp_path / "runs" / "bare"
    launcher = runs.start(path, "run.steps=100000", "run.checkpoint_every=100000", ranks=2)
    runs.wait_for(lambda: (folder / "metrics.jsonl").exists() and runs.rows(folder / "metrics.jsonl"), deadline=90)
    runs.kill(launcher)
    runs.wait_for(lambda: (folder / "outcome.json").exists(), deadline=60)
    assert '"interrupted"' in (folder / "outcome.json").read_text()
    assert (folder / "checkpoints" / "latest").exists()
