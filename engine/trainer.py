"""The learning side: one loop."""

import asyncio
import resource
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from headrace import checkpoint
from headrace.assembly import Parts, assemble
from headrace.config import Config, VLLMEngineConfig
from headrace.controller import Drawn
from headrace.interrupt import Interrupt
from headrace.policy import parallel as ranks
from headrace.policy.parallel import Parallel
from headrace.profiling import Window, capturing
from headrace.ranges import span
from headrace.records import Question
from headrace.rollout.side import RewardFunction, RolloutState

T = TypeVar("T")
_PATIENCE = 0.5  # seconds between two looks whether an engine came back


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a run came to."""

    folder: Path
    step: int
    """Optimizer batches trained; below ``run.steps`` when the run was interrupted."""
    report: Path | None
    """The HTML report; None on ranks other than 0."""
    evaluations: tuple[dict[str, Any], ...] = ()
    """Every evaluation on record, first to last (``evaluation.evaluate``)."""


class Trainer:
    """Trains a policy; the same configuration goes on where an earlier run of it stopped.

    Args:
        config: the whole run.
        reward: ``reward(question, text) -> float | Reward`` instead of the configured verifier; ``text`` is the whole
            response, a pre-filled think tag included. The accuracy of a plain score is ``score >= 1``. Given by name,
            ``"module:function"``, it runs in a process of its own that can be killed.
        questions: questions to train on instead of ``config.questions.train``.
        fresh: delete what an earlier run of this name left.
        profile: steps to capture (docs/profiling.md).
    """

    def __init__(
        self,
        config: Config,
        *,
        reward: RewardFunction | str | None = None,
        questions: Sequence[Question] | None = None,
        fresh: bool = False,
        profile: Window | None = None,
    ) -> None:
        self.config = config
        self.reward = reward
        self.questions = questions
        self.fresh = fresh
        self.profile = profile

    def train(self) -> TrainResult:
        """Run to ``run.steps``; after Ctrl-C or SIGTERM it returns early with everything saved.

        Raises:
            ValueError: configuration, data, or a loss that is not finite; one line that names the cause.
            OSError: the run folder cannot be written.
        """
        with Interrupt() as interrupt:  # around the loop, or asyncio would keep the first Ctrl-C to itself
            if not _inside_a_loop():
                return asyncio.run(self._train(interrupt))
            with ThreadPoolExecutor(max_workers=1) as own_thread:
                return own_thread.submit(asyncio.run, self._train(interrupt)).result()

    async def _train(self, interrupt: Interrupt) -> TrainResult:
        run = self.config.run
        engine = self.config.engine
        parallel = ranks.start(engine.rollout_ranks if isinstance(engine, VLLMEngineConfig) else 0)
        if not parallel.is_learner:
            interrupt.guard()  # the launcher signals all ranks: this one serves until rank 0 has finished its step
            return _look_after_server(self.config, parallel)
        async with assemble(self.config, parallel, self.reward, self.questions, fresh=self.fresh) as parts:
            step = saved = await _resume(parts)
            interrupt.guard()
            if self.profile is not None:
                self.profile.check(step, run.steps)
            await _evaluate(parts, step)
            with capturing(self.profile, self.config.run_folder / "profile", parts.parallel.rank) as profiler:
                while step < run.steps and not parts.parallel.broadcast_json(interrupt.requested):
                    step += 1
                    with profiler.step(step):
                        await _step(parts, step)
                        await _evaluate(parts, step)
                        if step == run.steps or step % run.checkpoint_every == 0:
                            saved = await _save(parts, step)
            if saved < step:
                await _save(parts, step)
            return _finish(parts, step)


def _inside_a_loop() -> bool:
    """Whether an event loop runs in this thread, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _look_after_server(config: Config, parallel: Parallel) -> TrainResult:
    """All that a rollout rank does in a run."""
    from headrace.rollout.servers import serve

    assert isinstance(config.engine, VLLMEngineConfig)
    assert parallel.store is not None
    serve(config, config.engine, parallel.rank - parallel.world_size, parallel.store)
    return TrainResult(config.run_folder, config.run.steps, None)


async def _resume(parts: Parts) -> int:
    """Take up the newest checkpoint, or begin, and give the engine the weights; the step it was made after."""
    restored = checkpoint.restore(parts.config.run_folder / "checkpoints", parts.learner)
    step = 0 if restored is None else restored.step
    if restored is None:
        parts.journal.start()
    else:
        if parts.rollouts is not None:
            await parts.rollouts.restore(RolloutState.from_checkpoint(restored.extra, restored.groups))
        parts.journal.resume(step)
        for line in restored.damaged:
            parts.journal.warn(line)
    await _refresh(parts, step)
    return step


async def _refresh(parts: Parts, step: int, *, always: bool = False) -> dict[str, float]:
    """Give the engine the weights if that is due, and tell the rollout side; collective."""
    metrics = parts.weights.refresh(step, always=always)
    if metrics is None:
        return {}
    parts.version = step // parts.config.schedule.sync_interval
    if parts.rollouts is not None:
        await parts.rollouts.release()
    return metrics


async def _step(parts: Parts, step: int) -> None:
    """Draw a batch, learn from it, give the engine the weights, write the row."""
    with span("step"):
        drawn = await _draw(parts, step)
        metrics = _learn(parts, drawn)
        lag = parts.version
        if drawn is not None and parts.rollouts is not None:
            await parts.rollouts.settle(drawn.fates)
        with parts.journal.phase("sync"):
            metrics |= await _refresh(parts, step)
        if drawn is not None:
            parts.journal.log(step, {**metrics, **drawn.counts(lag), **_peak_memory()}, drawn.sampled, parts.encoder.decode)


async def _draw(parts: Parts, step: int) -> Drawn | None:
    """The groups of one step, on rank 0."""
    with parts.journal.phase("sampling"):
        return await _beside_engine(parts, step - 1, parts.rollouts.draw() if parts.rollouts else None)


async def _beside_engine(parts: Parts, step: int, work: Coroutine[Any, Any, T] | None) -> T | None:
    """What rank 0's ``work`` with the engine gives, on rank 0. Collective: all ranks stand by to push the weights after ``step`` batches
    again, should an engine come back without them."""
    task = None if work is None else asyncio.ensure_future(work)
    try:
        while True:
            if task is not None:
                await asyncio.wait({task}, timeout=_PATIENCE)
            event = "wait"
            if task is not None:
                event = "done" if task.done() else "push" if parts.weights.overdue() else "wait"
            event = parts.parallel.broadcast_json(event)
            if event == "done":
                return None if task is None else task.result()
            if event == "push":
                parts.weights.push(step)
    finally:
        if task is not None:
            task.cancel()


def _learn(parts: Parts, drawn: Drawn | None) -> dict[str, float]:
    """Update on the batch that rank 0 drew; nothing when every group of it was filtered."""
    with parts.journal.phase("update"):
        if not parts.parallel.broadcast_json(drawn is not None and drawn.batch is not None):
            return {"learner/empty_batches": 1.0}
        return parts.learner.update(parts.parallel.broadcast_batch(drawn.batch if drawn else None))


def _peak_memory() -> dict[str, float]:
    """Most memory that this process has held so far, GiB."""
    peaks = {"machine/peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    if torch.cuda.is_available():
        peaks["machine/peak_gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return peaks


async def _evaluate(parts: Parts, step: int) -> None:
    """Evaluate when it is due and not on record yet."""
    run = parts.config.run
    due = step in (0, run.steps) or (run.evaluate_every and step % run.evaluate_every == 0)
    name = "before" if step == 0 else "after" if step == run.steps else "held_out"
    if not due or parts.config.questions.held_out is None:
        return
    with parts.journal.phase("evaluation"):
        if not parts.parallel.broadcast_json(parts.rollouts is not None and not parts.journal.evaluated(step, name)):
            return
        await _refresh(parts, step, always=True)
        result = await _beside_engine(parts, step, parts.rollouts.evaluate() if parts.rollouts else None)
        if result is not None:
            parts.journal.log_evaluation(step, {"step": step, "name": name, **result})


async def _save(parts: Parts, step: int) -> int:
    """Checkpoint everything that the rest of the run depends on; the step."""
    with parts.journal.phase("checkpoint"):
        extra, groups = (await parts.rollouts.state()).for_checkpoint() if parts.rollouts else ({}, b"")
        folder = parts.config.run_folder / "checkpoints"
        checkpoint.save(folder, step, parts.learner, extra, keep=parts.config.run.keep_checkpoints, groups=groups)
    return step


def _finish(parts: Parts, step: int) -> TrainResult:
    """Write the report and say where everything is."""
    folder, complete = parts.config.run_folder, step >= parts.config.run.steps
    if complete:
        with parts.journal.phase("checkpoint"):
            checkpoint.export(parts.policy, parts.encoder, folder / "model")
    if parts.rollouts is None:
        return TrainResult(folder, step, None)
    parts.journal.finish("finished" if complete else "interrupted")
    from headrace.journal import report  # brings matplotlib, which the run itself does not need

    page = report.build([folder], folder / "report.html")
    if complete:
        print(f"report: {page}\nmodel:  {folder / 'model'}")
    else:
        print(f"stopped after step {step} of {parts.config.run.steps}; the same command goes on from there\nreport: {page}")
    return TrainResult(folder, step, page, tuple(parts.journal.evaluations.rows()))
