"""Studies: what runs, how it goes on, and what the page says; training itself is replaced by a small script."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from headrace.config import ConfigError
from headrace.journal.intervals import mean_t
from headrace.study import page as study_page
from headrace.study import run as study
from headrace.study.run import execute, load_study, paired_seeds

ROOT = Path(__file__).parents[1]
BASE = """
model: {source: {kind: scratch_text}}
questions: {train: {kind: multi_hop}}
sampling: {max_tokens: 16, group_size: 4}
journal: {tensorboard: false}
"""
TRAIN = """
import json, sys, pathlib, yaml
config = yaml.safe_load(open(sys.argv[1]))
run, cge = config["run"], config["sampling"]["cge"]
folder = pathlib.Path(run["folder"]) / run["name"]
folder.mkdir(parents=True, exist_ok=True)
with open(folder / "started", "a") as file:
    file.write("x")
if (folder / "fail").exists():
    sys.exit("headrace: it broke\\nsecond line")
gain = 0.0 if cge is None else 0.1
rows = []
for step in range(1, 5):
    row = {"step": step, "reward/accuracy": 0.1 * step + gain + 0.01 * run["seed"]}
    row |= {"group/grad_both": 0.5, "group/grad_both_n": 2, "group/n": 4}
    if cge:
        row |= {"cge/restored_n": 3, "cge/groups_n": 4, "control/restored_n": 1, "control/groups_n": 4}
        row |= {"paqm/control_n": 4, "paqm/paired_reclaimed_n": 3, "paqm/control_reclaimed_n": 1}
        row |= {"paqm/only_hint_n": 3, "paqm/only_control_n": 0}
    rows.append(row)
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
(folder / "config.yaml").write_text(yaml.safe_dump(config))
evaluations = [{"step": step, "name": name, "questions": 2, "mean_accuracy": value} for step, name, value in
               ((0, "before", 0.2), (4, "after", 0.5 + gain + 0.01 * run["seed"]))]
(folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in evaluations))
(folder / "outcome.json").write_text(json.dumps({"step": 4, "status": "finished"}))
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study of two arms and three seeds whose runs last a moment."""
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "train.py").write_text(TRAIN)
    plain = subprocess.Popen
    monkeypatch.setattr(
        study.subprocess, "Popen", lambda command, **options: plain([sys.executable, str(tmp_path / "train.py"), command[-1]], **options)
    )
    monkeypatch.setattr(study, "_POLL_SECONDS", 0.02)
    tree = {
        "name": "two", "title": "Two arms", "question": "Is it better?", "base": "base.yaml", "folder": str(tmp_path / "studies"),
        "common": {"run.steps": 4}, "baseline": "plain",
        "arms": [{"name": "plain"}, {"name": "cge", "label": "with <mask>", "overrides": {"sampling.cge": {"control_share": 0.5}}}],
        "measures": [
            {"metric": "evaluation/mean_accuracy"}, {"metric": "gain/mean_accuracy", "label": "gain"},
            {"metric": "reward/accuracy", "part": "later"}, {"metric": "group/grad_both"}, {"metric": "no/such"},
        ],
        "curves": ["reward/accuracy", "no/such"],
    }  # fmt: skip
    path = tmp_path / "two.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def started(planned: study.Study) -> list[int]:
    return [len((run.folder / "started").read_text()) if (run.folder / "started").exists() else 0 for run in planned.runs]


def test_a_study_trains_what_is_missing_and_pairs_seeds(file: Path) -> None:
    planned = load_study(file)
    assert [run.name for run in planned.runs[:3]] == ["plain-seed0", "cge-seed0", "plain-seed1"]
    assert {run.config.run.seed for run in planned.runs} == {0, 1, 2}
    (planned.runs[3].folder).mkdir(parents=True)
    (planned.runs[3].folder / "fail").touch()
    failures = execute(planned)
    assert len(failures) == 1
    assert "cge-seed1: ended with status 1: second line" in failures[0]
    assert paired_seeds(planned, "cge") == [0, 2]
    (planned.runs[3].folder / "fail").unlink()
    assert execute(planned) == []
    assert started(planned) == [1, 1, 1, 2, 1, 1]
    html = study_page.write(planned).read_text()
    found = json.loads((planned.folder / "study.json").read_text())["measures"]
    assert found["gain"]["cge"] == pytest.approx({"0": 0.4, "1": 0.41, "2": 0.42})
    assert found["reward/accuracy, later half"]["plain"] == pytest.approx({"0": 0.35, "1": 0.36, "2": 0.37})
    assert found["no/such"]["plain"] == {"0": None, "1": None, "2": None}
    assert "+0.100" in html  # the paired difference has no spread over seeds
    assert "with &lt;mask&gt;" in html
    assert "36/48" in html  # masked groups of three seeds and four steps, pooled
    assert "The hint against a second try" in html
    assert "<script" not in html


def test_a_page_of_a_study_under_way_says_what_is_missing(file: Path) -> None:
    planned = load_study(file)
    html = study_page.write(_made(planned)).read_text()
    assert "6 of 6 runs are not finished" in html


def _made(planned: study.Study) -> study.Study:
    planned.folder.mkdir(parents=True)
    return planned


def test_a_run_that_takes_too_long_is_stopped(file: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\ntime.sleep(60)")
    tree = yaml.safe_load(file.read_text()) | {"run_minutes": 0.005, "seeds": [0]}
    file.write_text(yaml.safe_dump(tree))
    failures = execute(load_study(file))
    assert len(failures) == 2
    assert "was stopped after 0.005 minutes at step 0" in failures[0]


def test_grids_and_overrides(file: Path) -> None:
    tree = yaml.safe_load(file.read_text())
    tree |= {"grid": {"sampling.cge.threshold": [0.9, 0.8], "loss.clip_low": [0.1]}, "seeds": [4]}
    file.write_text(yaml.safe_dump(tree, sort_keys=False))
    planned = load_study(file, ["run.steps=9", "run.seed=77"])
    assert [run.arm.name for run in planned.runs] == ["plain", "cge", "threshold=0.9+clip_low=0.1", "threshold=0.8+clip_low=0.1"]
    assert planned.runs[2].config.sampling.cge is not None
    assert (planned.runs[2].config.sampling.cge.threshold, planned.runs[2].config.loss.clip_low) == (0.9, 0.1)
    assert {(run.config.run.steps, run.config.run.seed) for run in planned.runs} == {(9, 4)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"baseline": "none"}, "baseline 'none' is none of the arms"),
        ({"seeds": [1, 1]}, "different seeds"),
        ({"arms": [{"name": "plain"}]}, "at least two arms"),
        ({"common": {"run.stepz": 3}}, "arm plain, override: run.stepz: no such field; is steps meant"),
        ({"base": "gone.yaml"}, "gone.yaml: cannot be read"),
        ({"arms": [{"name": "a/b"}, {"name": "plain"}]}, "pattern"),
    ],
)
def test_faults_are_named(file: Path, change: dict, words: str) -> None:
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | change))
    with pytest.raises(ConfigError, match=words):
        load_study(file)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "studies").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_studies_load(path: Path) -> None:
    planned = load_study(path)
    assert len({run.seed for run in planned.runs}) >= 3
    assert len({run.name for run in planned.runs}) == len(planned.runs)


def test_students_interval() -> None:
    assert mean_t([1.0]) is None
    assert mean_t([1.0, 2.0, 3.0]) == pytest.approx((2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5))
    low, high = mean_t([0.0, 1.0] * 20)
    assert high - 0.5 == pytest.approx(2.0227 * 0.50637 / 40**0.5, rel=1e-3)
    assert low == pytest.approx(1 - high)
