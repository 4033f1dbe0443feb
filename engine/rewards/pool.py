"""Scores rollouts beside the engine: a hung verifier is killed, a failure is counted and never a reward of 0."""

import asyncio
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

from headrace.config import RewardConfig
from headrace.records import Question, Reward, Rollout
from headrace.rewards.judge import Judge, Outcome, RewardFunction, VerifyFunction, name_of, resolve
from headrace.rewards.shaping import overlong_penalty
from headrace.rewards.worker import WorkerProcess

log = logging.getLogger(__name__)

_ALARM_AFTER = 1024  # responses scored before a pass rate of exactly 0 or 1 is worth a line
_JOIN_SECONDS = 1.0  # a thread that sits in the user's function for longer is left behind
_DETAIL = 300  # characters of a failure that a message shows


class ScoringError(ValueError):
    """A response could not be scored and ``reward.on_failure`` is ``stop``."""


class ScoringPool:
    """Scores rollouts by the configured rules or by the user's own function (a ``records.Scorer``).

    Where the scoring runs:

    * string and number comparison (``verifier: exact``): at once, in the caller's thread. It is linear in the text, so
      nothing can hang, and takes about 12 microseconds where a trip to another process takes hundreds.
    * Math-Verify, the scorers of task generators, and functions given by the name ``module:function``: in ``workers``
      processes. One that takes longer than ``timeout`` seconds for a response is killed and replaced; a crash costs
      one response. A named function's module may define ``warm_up()``: each process calls it once, outside the clock.
    * functions given as objects (lambdas, closures, anything that holds state): on ``workers`` threads of this process, so
      that they see and keep their state. One that takes too long is left behind and its response counted; it cannot be
      killed, and one that never lets go of the interpreter stalls the engine.
    * ``workers`` = 0: at once, in the caller's thread, without a clock.

    A response that cannot be scored gets no reward but a ``failure``: ``timeout``, ``error`` (the function raised or
    returned no number, the worker died) or ``non_finite``. ``counts`` holds how many ended each way, scored ones under
    ``scored``; the first of each kind is logged.

        with ScoringPool(RewardConfig(contract="boxed")) as pool:
            rollouts = await pool.score(question, rollouts)
    """

    def __init__(
        self, config: RewardConfig, reward: RewardFunction | str | None = None, verify: VerifyFunction | str | None = None
    ) -> None:
        """Start the workers.

        Args:
            config: contract, mode, verifier, time limit.
            reward: ``reward(question, text) -> float | Reward`` in place of all rules. A plain score s is the total;
                its accuracy is 1 where s >= 1.
            verify: ``verify(question, answer_text) -> float`` in [0, 1], in place of the comparison; used by
                ``verifier: task``.

        Raises:
            ValueError: ``verifier: task`` without ``verify``, or a named function that a worker cannot import.
        """
        if config.verifier != "task":
            verify = None
        elif reward is None and verify is None:
            raise ValueError("reward.verifier = task: this question set has no scorer of its own; use exact or math_verify")
        self.config = config
        self.counts: Counter[str] = Counter()
        self._right = 0.0
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        workers = 0 if config.verifier == "exact" and reward is None else config.workers
        make_runner = _runner_factory(config.model_copy(update={"workers": workers}), reward, None if reward is not None else verify)
        self._direct = None if workers else make_runner()
        self._runners = [make_runner() for _ in range(workers)]
        started: list[Future[None]] = [Future() for _ in self._runners]
        self._threads = [threading.Thread(target=self._serve, args=pair, daemon=True) for pair in zip(self._runners, started, strict=True)]
        for thread in self._threads:
            thread.start()
        if started and (isinstance(reward, str) or isinstance(verify, str)):
            try:
                started[0].result()
            except ValueError:
                self.close()
                raise

    async def score(self, question: Question, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The same rollouts with ``reward`` or ``failure`` set; overlong shaping is added to the total.

        Raises:
            ScoringError: a response could not be scored and ``on_failure`` is ``stop``.
        """
        outcomes = await asyncio.gather(*(self._outcome(question, rollout.text) for rollout in rollouts))
        return [self._settled(question, rollout, outcome) for rollout, outcome in zip(rollouts, outcomes, strict=True)]

    def close(self) -> None:
        """End the workers; responses still waiting are cancelled. Safe to call twice."""
        self._closed = True
        for _ in self._threads:
            self._jobs.put(None)
        for runner in self._runners:
            runner.stop()
        for thread in self._threads:
            thread.join(timeout=_JOIN_SECONDS)

    def __enter__(self) -> "ScoringPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _outcome(self, question: Question, text: str) -> Outcome:
        if self._closed:
            raise ValueError("the scoring pool is closed")
        if self._direct is not None:
            return self._direct.call(question, text)
        job = _Job(question, text)
        self._jobs.put(job)
        return await asyncio.wrap_future(job.future)

    def _serve(self, runner: "_Runner", started: "Future[None]") -> None:
        """Life of one thread: its runner takes the next response until the pool closes."""
        try:
            runner.start()
            started.set_result(None)
        except ValueError as error:  # tried again, and reported, with the first response
            started.set_exception(error)
        while (job := self._jobs.get()) is not None:
            if self._closed:
                job.future.cancel()
            elif job.future.set_running_or_notify_cancel():
                try:
                    job.future.set_result(runner.call(job.question, job.text))
                except BaseException as error:  # the waiting coroutine must learn of a fault of ours
                    job.future.set_exception(error)
        runner.stop()

    def _settled(self, question: Question, rollout: Rollout, outcome: Outcome) -> Rollout:
        reward = outcome.reward
        if reward is None:
            self._failed(question, rollout, outcome)
            return replace(rollout, reward=None, failure=outcome.failure)
        self._passed(reward)
        overlong = self.config.overlong
        if overlong is not None:
            penalty = overlong_penalty(len(rollout.completion.token_ids), overlong.max_length, overlong.buffer)
            reward = replace(reward, total=reward.total + penalty)
        return replace(rollout, reward=reward, failure="")

    def _failed(self, question: Question, rollout: Rollout, outcome: Outcome) -> None:
        self.counts[outcome.failure] += 1
        detail = " ".join(outcome.detail.split()).encode("utf-8", "backslashreplace").decode()[:_DETAIL]
        fault = f"reward: question {question.id}, rollout {rollout.index}: {outcome.failure} ({detail})"
        if self.config.on_failure == "stop":
            raise ScoringError(f"{fault}; reward.on_failure = skip would leave such rollouts out")
        if self.counts[outcome.failure] == 1:
            log.warning("%s; the rollout leaves its group, further ones of this kind are only counted", fault)

    def _passed(self, reward: Reward) -> None:
        self.counts["scored"] += 1
        self._right += reward.accuracy >= 1
        if self.counts["scored"] == _ALARM_AFTER and self._right in (0, _ALARM_AFTER):
            verdict = "right" if self._right else "wrong"
            log.warning("reward: the first %d responses were all %s; check reward.contract and the answers", _ALARM_AFTER, verdict)


class _Job:
    """A response that waits for its outcome."""

    __slots__ = ("future", "question", "text")

    def __init__(self, question: Question, text: str) -> None:
        self.question, self.text = question, text
        self.future: Future[Outcome] = Future()


class _Runner(Protocol):
    """Scores one response at a time: a worker process, a thread with a clock, or the caller's own thread."""

    def start(self) -> None: ...
    def call(self, question: Question, text: str) -> Outcome: ...
    def stop(self) -> None: ...


def _runner_factory(
    config: RewardConfig, reward: RewardFunction | str | None, verify: VerifyFunction | str | None
) -> "Callable[[], _Runner]":
    """Makes runners of the kind that suits the functions."""
    named = name_of(verify) if callable(verify) else verify
    if config.workers and not callable(reward) and (verify is None or named):
        return lambda: WorkerProcess(config, reward, named)
    judge = Judge(config, resolve(reward) if isinstance(reward, str) else reward, resolve(verify) if isinstance(verify, str) else verify)
    return lambda: _ThreadRunner(judge) if config.workers else _DirectRunner(judge)


class _DirectRunner:
    """No protection: the caller waits."""

    def __init__(self, judge: Judge) -> None:
        self.call = judge

    def start(self) -> None: ...

    def stop(self) -> None: ...


class _ThreadRunner:
    """Every response on a thread of its own, left behind when its time is up."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    def start(self) -> None: ...

    def call(self, question: Question, text: str) -> Outcome:
        answers: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        threading.Thread(target=lambda: answers.put(self._judge(question, text)), daemon=True).start()
        timeout = self._judge.config.timeout
        try:
            return answers.get(timeout=timeout)
        except queue.Empty:
            return Outcome(None, "timeout", f"no verdict within {timeout:g} s, its thread was left behind")

    def stop(self) -> None: ...
