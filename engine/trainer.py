"""The learning side: one loop."""

import asyncio
import resource
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace import checkpoint
from headrace.assembly import Parts, RewardFunction, assemble
from headrace.config import Config
from headrace.controller import Drawn
from headrace.evaluation import evaluate
from headrace.interrupt import Interrupt
from headrace.profiling import Window, capturing
from headrace.ranges import span
from headrace.records import Question


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
        with assemble(self.config, self.reward, self.questions, fresh=self.fresh) as parts:
            step = saved = _resume(parts)
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
                            saved = _save(parts, step)
            if saved < step:
                _save(parts, step)
            return _finish(parts, step)


def _inside_a_loop() -> bool:
    """Whether an event loop runs in this thread, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _resume(parts: Parts) -> int:
    """Take up the newest checkpoint, or begin; the step it was made after."""
    restored = checkpoint.restore(parts.config.run_folder / "checkpoints", parts.learner)
    if restored is None:
        parts.journal.start()
        return 0
    for fault in restored.damaged:
        parts.journal.warn(f"{fault}; an older one is taken")
    parts.version = restored.step
    if parts.rollouts is not None:
        parts.rollouts.controller.ledger.restore(restored.extra.get("ledger"))
    parts.journal.resume(restored.step)
    return restored.step


async def _step(parts: Parts, step: int) -> None:
    """Draw a batch, learn from it, write the row."""
    with span("step"):
        drawn = await _draw(parts)
        metrics = _learn(parts, drawn)
        _record(parts, step, drawn, metrics)


async def _draw(parts: Parts) -> Drawn | None:
    """The groups of one step, on rank 0."""
    with parts.journal.phase("sampling"):
        parts.refresh_engine()
        return await parts.rollouts.controller.draw() if parts.rollouts else None


def _learn(parts: Parts, drawn: Drawn | None) -> dict[str, float]:
    """Update on the batch that rank 0 drew; nothing when every group of it was filtered."""
    with parts.journal.phase("update"):
        if not parts.parallel.broadcast_json(drawn is not None and drawn.batch is not None):
            return {"learner/empty_batches": 1.0}
        return parts.learner.update(parts.parallel.broadcast_batch(drawn.batch if drawn else None))


def _record(parts: Parts, step: int, drawn: Drawn | None, metrics: dict[str, float]) -> None:
    """Settle the step's questions and write its row."""
    parts.version = step
    if drawn is None or parts.rollouts is None:
        return
    parts.rollouts.controller.settle(drawn)
    parts.journal.log(step, {**metrics, **drawn.counts(step - 1), **_peak_memory()}, drawn.sampled, parts.encoder.decode)


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
        parts.refresh_engine()
        side = parts.rollouts
        if side is not None and side.held_out and not parts.journal.evaluated(step, name):
            result = await evaluate(side.held_out, side.engine, side.scorer, parts.encoder, parts.config)
            parts.journal.log_evaluation(step, {"step": step, "name": name, **result})


def _save(parts: Parts, step: int) -> int:
    """Checkpoint everything that the rest of the run depends on; the step."""
    with parts.journal.phase("checkpoint"):
        extra = {"ledger": parts.rollouts.controller.ledger.state()} if parts.rollouts else {}
        checkpoint.save(parts.config.run_folder / "checkpoints", step, parts.learner, extra, keep=parts.config.run.keep_checkpoints)
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
