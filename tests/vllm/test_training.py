"""Training on real servers: what a killed part costs, in numbers, is nothing."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import runs

ENGINE = "engine: {kind: vllm, memory: 0.0625, max_num_seqs: 32, start_deadline: 280}\n"
STEPS = 5


@pytest.fixture(scope="module")
def config(needs_vllm: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    text = runs.TINY.replace("sampling: {", "sampling: {batch_rows: 64, ", 1).replace(
        "  held_out", "  max_prompt_tokens: 64\n  held_out", 1
    )
    return runs.write_config(folder, folder / "cache", text + ENGINE)


def children(process: "subprocess.Popen[str]", part: str) -> list[psutil.Process]:
    """Processes below a run that Python started with ``part``, a script or a module."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if any(word.endswith(part) for word in child.cmdline()[1:4]):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_for_step(folder: Path, step: int, process: "subprocess.Popen[str]", deadline: float = 280) -> None:
    """Until the run has written the row of a step."""
    give_up = time.monotonic() + deadline
    metrics = folder / "metrics.jsonl"
    while not (metrics.exists() and any(row["step"] >= step for row in runs.rows(metrics))):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < give_up, f"no step {step} after {deadline:.0f} s"
        time.sleep(0.05)


def numbers(folder: Path) -> list[dict[str, Any]]:
    """What must be the same in two runs: all but times, machine and what the asynchronous side was doing when it was asked."""
    other = ("time/", "machine/", "schedule/", "sync/", "learner/tokens")
    return [{name: value for name, value in row.items() if not name.startswith(other)} for row in runs.rows(folder / "metrics.jsonl")]


def assert_same(first: Path, second: Path) -> None:
    one, two = numbers(first), numbers(second)
    assert [row["step"] for row in one] == [row["step"] for row in two] == list(range(1, STEPS + 1))
    for left, right in zip(one, two, strict=True):
        assert left.keys() == right.keys()
        for name, value in left.items():
            assert right[name] == pytest.approx(value, rel=1e-3, abs=1e-4), f"step {left['step']}: {name}"


def ledger(folder: Path) -> dict[str, Any]:
    """The ledger of the newest checkpoint."""
    newest = (folder / "checkpoints" / "latest").read_text().strip()
    found: dict[str, Any] = json.loads((folder / "checkpoints" / newest / "state.json").read_text())["extra"]["ledger"]
    return found


@pytest.fixture(scope="module")
def undisturbed(config: Path) -> Path:
    """A synchronous run that nothing happens to."""
    output = runs.finish(runs.start(config, "run.name=undisturbed", f"run.steps={STEPS}"), deadline=400)
    assert "report:" in output
    return config.parent / "runs" / "undisturbed"


@pytest.mark.vllm
def test_kills_of_every_part_cost_no_number(config: Path, undisturbed: Path) -> None:
    folder = config.parent / "runs" / "killed"
    arguments = ["run.name=killed", f"run.steps={STEPS}"]
    process = runs.start(config, *arguments)
    wait_for_step(folder, 1, process)
    (server,) = children(process, "startup/api_server.py")[:1]
    server.send_signal(signal.SIGKILL)
    wait_for_step(folder, 2, process)
    (rollouts,) = children(process, "headrace.rollout.process")[:1]
    rollouts.send_signal(signal.SIGKILL)
    wait_for_step(folder, 3, process)
    left = psutil.Process(process.pid).children(recursive=True)
    runs.kill(process)
    _, alive = psutil.wait_procs(left, timeout=60)
    assert not alive, "processes outlive a killed run"
    output = runs.finish(runs.start(config, *arguments), deadline=400)
    assert re.search("resuming after step [234]", output), output
    assert_same(undisturbed, folder)
    accounts = ledger(folder)
    assert accounts["counts"]["trained"] == STEPS * 4
    assert len(accounts["open"]) <= 4, "the next version's questions may be under way when a step is saved, and no others"


@pytest.mark.vllm
def test_staleness_zero_is_the_synchronous_run_and_lag_is_bounded(config: Path, undisturbed: Path) -> None:
    for row in runs.rows(undisturbed / "metrics.jsonl"):
        assert row["staleness/max"] == 0
        assert row["sync/canary_gap"] < 1e-3
    folder = config.parent / "runs" / "ahead"
    ahead = ["schedule.staleness=1.5", "run.name=ahead", f"run.steps={STEPS}"]
    runs.finish(runs.start(config, *ahead), deadline=400)
    rows = runs.rows(folder / "metrics.jsonl")
    assert max(row["staleness/max"] for row in rows) in (1, 2), "S = 1.5 lets tokens lag by at most ceil(2.5) - 1 = 2 versions"
    accounts = ledger(folder)
    assert accounts["counts"]["trained"] == STEPS * 4
    assert len(accounts["open"]) <= 10, "floor((1 + 1.5) * 4) slots"


@pytest.mark.soak
@pytest.mark.vllm
def test_a_rollout_rank_serves_a_learner_rank(config: Path, undisturbed: Path) -> None:
    output = runs.finish(runs.start(config, "engine.rollout_ranks=1", "run.name=ranks", f"run.steps={STEPS}", ranks=2), deadline=500)
    assert len(re.findall("report:", output)) == 1
    assert_same(undisturbed, config.parent / "runs" / "ranks")


@pytest.mark.soak
@pytest.mark.vllm
def test_a_killed_learner_rank_is_started_again_by_the_launcher(config: Path, undisturbed: Path) -> None:
    folder = config.parent / "runs" / "restarted"
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2", "-m", "headrace", "train"]
    process = subprocess.Popen(
        [sys.executable, *command, str(config), "run.name=restarted", f"run.steps={STEPS}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    wait_for_step(folder, 2, process)
    ranks = [child for child in children(process, "headrace") if child.parent().pid == process.pid]  # type: ignore[union-attr]
    ranks[-1].send_signal(signal.SIGKILL)
    runs.finish(process, deadline=600)
    assert_same(undisturbed, folder)
