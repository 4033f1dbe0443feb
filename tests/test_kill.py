"""Nothing is lost: killed at any moment, the same command goes on to the same numbers, bit for bit."""

import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests import runs


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, float]:
    """Numbers of a run that nobody disturbs, and the seconds it takes, warm start included."""
    folder = tmp_path_factory.mktemp("whole")
    config = runs.write_config(folder, folder / "cache")
    began = time.monotonic()
    runs.finish(runs.start(config))
    return runs.numbers(folder / "runs" / "tiny"), time.monotonic() - began


def run_with_kills(folder: Path, moments: list[float]) -> dict:
    """Kill the run that many seconds after each start, then let it end."""
    config = runs.write_config(folder, folder / "cache")
    for seconds in moments:
        process = runs.start(config)
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            runs.kill(process)
    runs.finish(runs.start(config))
    return runs.numbers(folder / "runs" / "tiny")


def test_three_random_kills_change_nothing(uninterrupted: tuple[dict, float], tmp_path: Path) -> None:
    whole, seconds = uninterrupted
    rng = random.Random(11)
    start_up = 0.35 * seconds  # interpreter, imports
    assert run_with_kills(tmp_path, [rng.uniform(start_up, seconds) for _ in range(3)]) == whole


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(4))
def test_many_kills_across_all_phases(uninterrupted: tuple[dict, float], tmp_path: Path, seed: int) -> None:
    whole, seconds = uninterrupted
    rng = random.Random(seed)
    assert run_with_kills(tmp_path, sorted((rng.uniform(0.2, 1.05 * seconds) for _ in range(6)), reverse=True)) == whole


def test_ctrl_c_saves_and_says_how_to_resume(uninterrupted: tuple[dict, float], tmp_path: Path) -> None:
    config = runs.write_config(tmp_path, tmp_path / "cache")
    folder = tmp_path / "runs" / "tiny"
    process = runs.start(config, "run.steps=400", "run.checkpoint_every=400")
    runs.wait_for(lambda: (folder / "metrics.jsonl").exists() and len(runs.rows(folder / "metrics.jsonl")) >= 2)
    process.send_signal(signal.SIGINT)
    output = runs.finish(process)
    assert "the same command goes on from there" in output
    assert (folder / "report.html").exists()
    saved = len(runs.rows(folder / "metrics.jsonl"))
    assert "resuming" in runs.finish(runs.start(config, f"run.steps={saved + 1}"))
    assert len(runs.rows(folder / "metrics.jsonl")) == saved + 1
