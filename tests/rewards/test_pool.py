"""The scoring pool: protection, failures that are no zeros, what is left behind when the engine is killed."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.config import OverlongConfig, RewardConfig
from headrace.records import Completion, Question, Reward, Rollout
from headrace.rewards.pool import ScoringError, ScoringPool

QUESTION = Question("q7", ({"role": "user", "content": "100 + 99?"},), "199")
RIGHT = "<think>easy</think><answer>\\boxed{199}</answer>"
OWN = "own_rewards:by_text"
VERIFY = "own_rewards:answer_is_even"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)


def rollouts(*texts: str, length: int = 3) -> list[Rollout]:
    tokens = np.zeros(length, np.int32)
    completion = Completion(tokens, tokens.astype(np.float32), tokens.astype(bool), tokens, "stop")
    return [Rollout(index, 1, "free", completion, text) for index, text in enumerate(texts)]


def score(pool: ScoringPool, *texts: str, length: int = 3) -> list[Rollout]:
    return asyncio.run(pool.score(QUESTION, rollouts(*texts, length=length)))


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture(scope="module")
def named() -> Iterator[ScoringPool]:
    sys.path.insert(0, str(Path(__file__).parent))
    with ScoringPool(RewardConfig(workers=2, timeout=1.0), reward=OWN) as pool:
        yield pool
    sys.path.pop(0)


def test_the_rules_need_no_process() -> None:
    with ScoringPool(RewardConfig()) as pool:
        threads = threading.active_count()
        first, second = score(pool, RIGHT, "nonsense")
        assert threading.active_count() == threads
    assert (first.reward, first.failure) == (Reward(1.0, 1.0, 1.0), "")
    assert second.reward == Reward(0.0, 0.0, 0.0)
    assert pool.counts == {"scored": 2}


def test_math_verify_runs_in_a_worker() -> None:
    with ScoringPool(RewardConfig(verifier="math_verify", contract="boxed")) as pool:
        assert [r.reward.accuracy for r in score(pool, "<think>x</think>\\boxed{\\frac{398}{2}}", RIGHT, "\ud800\x00")] == [1, 1, 0]


def test_a_hung_verifier_is_killed_and_costs_one_response(named: ScoringPool) -> None:
    before = {r.reward.total for r in score(named, *["pid"] * 20)}
    start = time.monotonic()
    result = score(named, "x", "hang", "x", "hold", *["x"] * 8)
    assert time.monotonic() - start < 10
    assert [r.failure for r in result] == ["", "timeout", "", "timeout", *[""] * 8]
    assert [r.reward is None for r in result] == [bool(r.failure) for r in result]
    after = {r.reward.total for r in score(named, *["pid"] * 20)}
    assert not before & after
    assert not any(alive(int(pid)) for pid in before)


def test_a_dead_worker_is_replaced(named: ScoringPool) -> None:
    assert [r.failure for r in score(named, "die", "x", "die", "x", "exit", "x")] == ["error", "", "error", "", "error", ""]


def test_failures_are_no_zeros(named: ScoringPool) -> None:
    names = ["raise", "nan", "inf", "none", "text", "bool", "reward"]
    by_name = dict(zip(names, score(named, *names), strict=True))
    assert [by_name[n].failure for n in names] == ["error", "non_finite", "non_finite", "error", "error", "", ""]
    assert by_name["bool"].reward == Reward(1.0, 1.0)
    assert by_name["reward"].reward == Reward(0.5, 1.0, 0.25)


def test_workers_import_no_torch_and_survive_prints_and_reads(named: ScoringPool) -> None:
    assert [r.reward.total for r in score(named, "torch", "print", "torch")] == [0, 0, 0]


def test_warm_up_is_outside_the_clock() -> None:
    with ScoringPool(RewardConfig(timeout=0.5), reward="own_slow_rewards:is_ready") as pool:
        assert score(pool, "x")[0].reward == Reward(1.0, 1.0)


def test_a_megabyte_response_reaches_the_worker(named: ScoringPool) -> None:
    assert score(named, "\ud800\x00é" * 1_000_000)[0].reward == Reward(0.5, 0.0)


def test_task_verifier_replaces_the_comparison() -> None:
    with ScoringPool(RewardConfig(verifier="task"), verify=VERIFY) as pool:
        assert [r.reward.total for r in score(pool, RIGHT, RIGHT.replace("199", "200"), RIGHT.replace("199", "x"))[:2]] == [0.2, 1.0]
        assert pool.counts == {"scored": 2, "error": 1}
    with ScoringPool(RewardConfig(verifier="task"), verify=lambda question, answer: float(answer == "7")) as pool:
        assert score(pool, RIGHT.replace("199", "7"))[0].reward == Reward(1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"reward\.verifier = task"):
        ScoringPool(RewardConfig(verifier="task"))


@pytest.mark.parametrize("workers", [0, 1])
def test_own_function_may_be_a_closure_with_state(workers: int) -> None:
    seen: list[str] = []

    def reward(question: Question, text: str) -> float:
        seen.append(f"{question.id} {text}")
        if text == "bad":
            raise KeyError("x")
        return np.float32(1.5)

    with ScoringPool(RewardConfig(workers=workers), reward=reward) as pool:
        result = score(pool, "a", "bad", "c")
    assert seen == ["q7 a", "q7 bad", "q7 c"]
    assert [r.failure for r in result] == ["", "error", ""]
    assert result[0].reward == Reward(1.5, 1.0)


def test_own_function_that_hangs_is_left_behind() -> None:
    release = threading.Event()
    with ScoringPool(RewardConfig(timeout=0.3), reward=lambda question, text: release.wait(60) if text == "hang" else 1.0) as pool:
        start = time.monotonic()
        assert [r.failure for r in score(pool, "a", "hang", "b")] == ["", "timeout", ""]
        assert time.monotonic() - start < 5
    release.set()


def test_on_failure_stop_names_the_question() -> None:
    pool = ScoringPool(RewardConfig(workers=0, on_failure="stop"), reward=lambda question, text: float("nan"))
    with pytest.raises(ScoringError, match=r"question q7, rollout 0: non_finite \(total nan"):
        score(pool, "a")


def test_each_kind_of_failure_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def reward(question: Question, text: str) -> float:
        raise RuntimeError("no luck\nat all \ud800")

    with caplog.at_level(logging.WARNING), ScoringPool(RewardConfig(workers=0), reward=reward) as pool:
        score(pool, "a", "b", "c")
    assert pool.counts == {"error": 3}
    assert [record.getMessage() for record in caplog.records] == [
        "reward: question q7, rollout 0: error (RuntimeError: no luck at all \\ud800); "
        "the rollout leaves its group, further ones of this kind are only counted"
    ]


def test_a_pass_rate_of_exactly_zero_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), ScoringPool(RewardConfig()) as pool:
        score(pool, *["no"] * 2000)
    assert [record.getMessage() for record in caplog.records] == [
        "reward: the first 1024 responses were all wrong; check reward.contract and the answers"
    ]


def test_overlong_shaping_is_added_to_the_total_alone() -> None:
    config = RewardConfig(overlong=OverlongConfig(max_length=20, buffer=10))
    with ScoringPool(config) as pool:
        assert score(pool, RIGHT, length=15)[0].reward == Reward(0.5, 1.0, 1.0)
        assert score(pool, RIGHT, length=10)[0].reward == Reward(1.0, 1.0, 1.0)


def test_row_tolerance_is_used() -> None:
    question = Question("q", (), "200", extra={"tolerance": 1.0})
    with ScoringPool(RewardConfig()) as pool:
        assert asyncio.run(pool.score(question, rollouts(RIGHT)))[0].reward == Reward(1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_rewards", "expected module:function"),
        ("no_such_module:f", "cannot be imported"),
        ("own_rewards:missing", "cannot be imported"),
        ("own_rewards:not_a_function", "is int, expected a function"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_wrong_name_is_refused_at_once(name: str, message: str, workers: int) -> None:
    with pytest.raises(ValueError, match=message):
        ScoringPool(RewardConfig(workers=workers), reward=name)


def test_close_ends_a_hung_worker_and_what_waits() -> None:
    pool = ScoringPool(RewardConfig(timeout=60), reward=OWN)
    pid = int(score(pool, "pid")[0].reward.total)

    async def run() -> list:
        tasks = [asyncio.create_task(pool.score(QUESTION, rollouts(text))) for text in ("hang", "x", "x")]
        await asyncio.sleep(0.3)
        await asyncio.to_thread(pool.close)
        return await asyncio.gather(*tasks, return_exceptions=True)

    start = time.monotonic()
    hung, *waiting = asyncio.run(run())
    assert time.monotonic() - start < 10
    assert hung[0].failure == "error"
    assert all(isinstance(result, asyncio.CancelledError) for result in waiting)
    assert not alive(pid)
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        score(pool, "x")


@pytest.mark.parametrize("state", ["idle", "hang", "hold"])
def test_kill_9_of_the_engine_leaves_no_worker(state: str) -> None:
    """The engine's script has no main guard: a worker must not run it again."""
    script = textwrap.dedent(f"""
        import asyncio, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_pool import *
        pool = ScoringPool(RewardConfig(timeout=60), reward=OWN)
        print(int(score(pool, "pid")[0].reward.total), flush=True)
        if {state!r} == "idle":
            time.sleep(60)
        score(pool, {state!r})
    """)
    engine = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    worker = int(engine.stdout.readline())
    assert alive(worker)
    time.sleep(0.5)
    os.kill(engine.pid, signal.SIGKILL)
    assert engine.communicate()[0] == ""
    assert wait_for(lambda: not alive(worker))
