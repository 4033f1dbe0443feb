"""The run folder: what is written, what survives a kill, what a resume leaves."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml
from journal_builders import config, group
from rich.console import Console

from headrace.config import Config
from headrace.journal.journal import Journal
from headrace.journal.progress import Screen
from headrace.journal.store import JournalError, Table, write_text

GROUPS = [group([0, 0], [1, 0], name="a"), group([1, 0], [1, 0], name="b"), group([1, 1], [1, 0], "control", name="c")]
TABLES = ("metrics.jsonl", "samples.jsonl", "mask_tokens.jsonl", "evaluations.jsonl")


def decode(tokens) -> str:
    return " ".join(f"w{token}" for token in tokens)


def run(journal: Journal, steps: range) -> None:
    for step in steps:
        with journal.phase("sampling"):
            pass
        journal.log(step, {"policy/entropy": 1 / step, "grad_norm": float("nan")}, GROUPS, decode)
        if step % 2 == 0:
            journal.log_evaluation(step, {"name": "held_out", "mean_accuracy": step / 10, "questions": 4})


def deterministic(folder: Path) -> dict[str, list]:
    """Every table without timings."""
    return {
        name: [{key: value for key, value in row.items() if not key.startswith("time/")} for row in Table(folder / name).rows()]
        for name in TABLES
    }


def test_a_run_leaves_its_files(tmp_path):
    made = config(tmp_path)
    journal = Journal(made, 3, quiet=True)
    journal.start()
    run(journal, range(1, 4))
    journal.finish({"status": "finished", "note": "well"})
    folder = tmp_path / "run"
    rows = list(Table(folder / "metrics.jsonl").rows())
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0]["cge/restored"] == 1.0
    assert rows[0]["grad_norm"] is None, "a number that is not finite is null: the file stays JSON"
    assert {"time/sampling", "time/step", "time/wall", "time/tokens_per_s"} <= rows[0].keys()
    assert Config.model_validate(yaml.safe_load((folder / "config.yaml").read_text())) == made
    assert json.loads((folder / "outcome.json").read_text()) == {"note": "well", "status": "finished", "step": 3}


def test_rows_are_lines_with_sorted_keys(tmp_path):
    journal = Journal(config(tmp_path), 2, quiet=True)
    journal.start()
    run(journal, range(1, 3))
    for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        keys = list(json.loads(text))
        assert keys == sorted(keys)


def test_samples_show_every_arm_and_what_the_mask_exchanged(tmp_path):
    journal = Journal(config(tmp_path), 1, quiet=True)
    journal.start()
    run(journal, range(1, 2))
    rows = list(Table(tmp_path / "run" / "samples.jsonl").rows())
    assert [row["arm"] for row in rows] == ["masked", "control"], "two groups a step by default, one per arm first"
    pieces = rows[0]["rollouts"][2]["pieces"]
    assert pieces[0] == "w0 w1"
    assert pieces[1] == {"position": 2, "drawn": " w2", "removed": "w102", "top_prob": pytest.approx(0.97), "rank": 2}
    assert "".join(piece if isinstance(piece, str) else piece["drawn"] for piece in pieces) == decode(range(10))
    counts = next(iter(Table(tmp_path / "run" / "mask_tokens.jsonl").rows()))
    assert counts["removed"] == [["w102", 2], ["w105", 2]]
    assert counts["positions"] == [[2, 2], [5, 2]]


@pytest.mark.parametrize("stop", [0, 1, 3, 5])
def test_resume_drops_later_rows_and_ends_equal_to_an_uninterrupted_run(tmp_path, stop):
    whole, broken = config(tmp_path / "whole"), config(tmp_path / "broken")
    journal = Journal(whole, 6, quiet=True)
    journal.start()
    run(journal, range(1, 7))
    journal = Journal(broken, 6, quiet=True)
    journal.start()
    run(journal, range(1, 6))
    for name in TABLES:  # as a kill in the middle of an append leaves it
        with open(broken.run_folder / name, "a") as file:
            file.write('{"step": 6, "torn": ')
    journal = Journal(broken, 6, quiet=True)
    journal.resume(stop)
    assert [row["step"] for row in journal.metrics.rows()] == list(range(1, stop + 1))
    run(journal, range(stop + 1, 7))
    assert deterministic(broken.run_folder) == deterministic(whole.run_folder)


def test_start_clears_an_earlier_attempt_and_resume_at_zero_keeps_the_first_evaluation(tmp_path):
    made = config(tmp_path)
    for begin, kept in ((lambda journal: journal.resume(0), 1), (lambda journal: journal.start(), 0)):
        journal = Journal(made, 2, quiet=True)
        journal.start()
        journal.log_evaluation(0, {"name": "before", "mean_accuracy": 0.3})
        run(journal, range(1, 2))
        again = Journal(made, 2, quiet=True)
        begin(again)
        assert len(list(again.evaluations.rows())) == kept
        assert again.evaluated(0, "before") is bool(kept)
        assert not list(again.metrics.rows())


def test_an_evaluation_logged_twice_is_there_once(tmp_path):
    journal = Journal(config(tmp_path), 2, quiet=True)
    journal.start()
    for accuracy in (0.1, 0.2):
        journal.log_evaluation(2, {"name": "held_out", "mean_accuracy": accuracy})
    assert [row["mean_accuracy"] for row in journal.evaluations.rows()] == [0.2]


def test_kill_9_while_appending_leaves_a_readable_table(tmp_path):
    code = (
        "import sys, pathlib; from headrace.journal.store import Table\n"
        "table = Table(pathlib.Path(sys.argv[1]))\n"
        "for step in range(10**9): table.append({'step': step, 'text': 'x' * 5000})\n"
    )
    path = tmp_path / "rows.jsonl"
    with subprocess.Popen([sys.executable, "-c", code, str(path)]) as process:
        while not path.exists() or path.stat().st_size < 200_000:
            assert process.poll() is None
        process.kill()
    steps = [row["step"] for row in Table(path).rows()]
    assert steps == list(range(len(steps)))
    assert len(steps) > 30


def test_a_damaged_row_in_the_middle_is_named_by_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnot json\n{"step": 3}\n')
    with pytest.raises(JournalError, match=r"metrics\.jsonl: line 2 is not a row"):
        list(Table(path).rows())
    path.write_text('{"step": 1}\nnot json\n')
    assert [row["step"] for row in Table(path).rows()] == [1], "the last line may be damaged"


def test_truncation_is_atomic(tmp_path, monkeypatch):
    table = Table(tmp_path / "metrics.jsonl")
    for step in range(5):
        table.append({"step": step})
    before = table.path.read_bytes()

    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(JournalError, match=r"metrics\.jsonl: cannot be written \(No space left on device\)"):
        table.truncate(2)
    assert table.path.read_bytes() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_one_clear_line():
    with pytest.raises(JournalError, match=r"^/dev/full: cannot be written \(No space left on device\); free the disk[^\n]*$"):
        Table(Path("/dev/full")).append({"step": 1})


def test_an_unwritable_folder_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    journal = Journal(config(tmp_path / "file"), 1, quiet=True)
    with pytest.raises(JournalError, match=r"run: cannot be written \(Not a directory\)[^\n]*$"):
        journal.start()


def test_an_inactive_journal_touches_nothing(tmp_path):
    journal = Journal(config(tmp_path), 3, active=False)
    journal.start()
    run(journal, range(1, 4))
    journal.finish()
    assert not (tmp_path / "run").exists()


def test_inner_phases_are_not_counted_twice(tmp_path, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("headrace.journal.journal.time.perf_counter", lambda: next(clock))
    journal = Journal(config(tmp_path), 3, quiet=True)  # second 0
    with journal.phase("evaluation"), journal.phase("sampling"):  # 1, 2
        pass  # 3, 4
    row = journal._timings(100.0)  # 5
    assert (row["time/sampling"], row["time/evaluation"], row["time/wall"]) == (1, 2, 5)
    assert row["time/step"] == 3
    assert row["time/tokens_per_s"] == pytest.approx(100 / 3)


def test_a_warm_start_before_the_run_opens_is_logged_but_is_no_step_time(tmp_path, monkeypatch):
    clock = iter([0, 0, 50, 60, 60, 63, 64])
    monkeypatch.setattr("headrace.journal.journal.time.perf_counter", lambda: next(clock))
    journal = Journal(config(tmp_path), 3, quiet=True)  # second 0
    with journal.phase("warm start"):  # 0 to 50
        pass
    journal.start()  # 60
    with journal.phase("sampling"):  # 60 to 63
        pass
    row = journal.log(1, {})  # 64
    assert {name: row[f"time/{name}"] for name in ("warm_start", "sampling", "wall", "step")} == {
        "warm_start": 50,
        "sampling": 3,
        "wall": 4,
        "step": 4,
    }


def test_missing_wandb_is_refused_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    journal = Journal(config(tmp_path, journal={"tensorboard": False, "wandb": "project"}), 1, quiet=True)
    with pytest.raises(JournalError, match=r"pip install 'headrace\[wandb\]'"):
        journal.start()


def test_wandb_gets_finite_metrics_with_their_step(tmp_path, monkeypatch):
    calls: list[dict] = []
    stub = types.SimpleNamespace(define_metric=lambda *_, **__: None, log=calls.append, finish=lambda: calls.append({"finished": True}))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: stub))
    journal = Journal(config(tmp_path, journal={"tensorboard": False, "wandb": "project"}), 1, quiet=True)
    journal.start()
    run(journal, range(1, 2))
    journal.finish()
    assert calls[0]["step"] == 1
    assert "grad_norm" not in calls[0]
    assert calls[-1] == {"finished": True}


def test_tensorboard_events_hold_the_metrics_and_survive_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = config(tmp_path, journal={"tensorboard": True})
    journal = Journal(made, 4, quiet=True)
    journal.start()
    run(journal, range(1, 4))
    journal.close()
    journal = Journal(made, 4, quiet=True)
    journal.resume(2)
    run(journal, range(3, 5))
    journal.finish()
    events = EventAccumulator(str(made.run_folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("policy/entropy")] == [1, 2, 3, 4]


def test_growing_responses_with_falling_format_are_warned_about_once(tmp_path, capsys):
    journal = Journal(config(tmp_path), 60)
    journal.start()
    for step in range(1, 61):
        journal.log(step, {"len/mean": 100.0 + 10 * step, "reward/format": 1 - step / 70})
    lines = [text for text in capsys.readouterr().err.splitlines() if "warning" in text]
    assert len(lines) == 1
    assert "format rate falls" in lines[0]


def test_a_mask_that_never_fires_is_warned_about(tmp_path, capsys):
    journal = Journal(config(tmp_path), 12)
    journal.start()
    for step in range(1, 13):
        journal.log(step, {"mask/responses_n": 4.0, "mask/positions_n": 0.0})
    assert sum("removed no token" in text for text in capsys.readouterr().err.splitlines()) == 1


def test_without_a_terminal_a_run_prints_about_twenty_plain_lines(tmp_path, capsys):
    journal = Journal(config(tmp_path), 200)
    journal.start()
    for step in range(1, 201):
        journal.log(step, {"reward/mean": 0.5, "policy/entropy": 0.25})
    out = capsys.readouterr()
    lines = out.err.splitlines()
    assert out.out == ""
    assert 20 <= len(lines) <= 22
    assert lines[0].startswith("run: step 1/200  reward 0.500  entropy 0.25")
    assert not any("\x1b" in text for text in lines)


def test_a_long_phase_says_where_it_is_without_a_terminal(tmp_path, capsys):
    journal = Journal(config(tmp_path), 10)
    with journal.phase("warm start") as tick:
        for done in range(1, 101):
            tick(done, 100, "loss 0.5")
    assert capsys.readouterr().err.splitlines() == [f"run: warm start {done}/100  loss 0.5" for done in (25, 50, 75, 100)]


def test_on_a_terminal_the_live_line_shows_phase_step_and_metrics():
    console = Console(force_terminal=True, width=140, file=open(os.devnull, "w"), record=True)  # noqa: SIM115
    screen = Screen("run", 10, console=console)
    screen.advance(3, {"reward/mean": 0.5, "time/wall": 2.0, "policy/entropy": 0.3})
    screen.begin("sampling")
    assert screen._live is not None
    console.print(screen._live.get_renderable())
    screen.close()
    text = console.export_text()
    assert all(part in text for part in ("sampling", "step 3/10", "reward 0.500", "entropy 0.30", "0:14 left"))


def test_write_text_replaces_the_whole_file(tmp_path):
    path = tmp_path / "a.json"
    write_text(path, "old")
    write_text(path, "new")
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]
