"""A whole step with credit rules against the same step without, in one process.

    python -m headrace.bench step --credit pacg [--prompts 16] [--rollouts 8] [--tokens 48] [--router 0.34]

A step draws, routes, builds the batch and updates, on a tiny vision-language model with random weights and pictures. The router is a
clock: it answers ``--router`` of the parent's step after it was asked (paper 003 waited 0.34). Half of the rollouts have a positive
advantage, all of them with a claim. ``synchronous`` waits for it between drawing and updating. ``pipelined`` updates one batch while the
router reads the next, as a staleness of 1 allows. Compute in processor seconds, the least of the repeats; waiting apart from it, by the
clock, medians.
"""

import asyncio
import statistics
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from headrace.config import Config, CreditConfig, ScratchVisionModel
from headrace.credit.advantage import group_advantages
from headrace.credit.claims import Quote
from headrace.credit.routing import ClaimRouting
from headrace.credit.rules import credit_rules
from headrace.encoding import Encoder
from headrace.policy.model import Policy
from headrace.policy.packing import build_batch
from headrace.policy.scratch import build_vision
from headrace.policy.update import Learner
from headrace.records import Group, Media, Prompt, Question, Reward, Rollout, SampleRequest, SamplingParameters
from headrace.sampling.local import LocalEngine

CLAIM = slice(2, 6)
"""Words of a response that are its claim."""
MOST = 0.75  # a random response may open an answer tag, in which no claim counts
ROUTER = {"kind": "server", "url": "http://127.0.0.1:9", "model": "a clock", "concurrency": 1 << 16, "deadline": 3600}
CREDITS: dict[str, dict[str, Any]] = {"pacg": {"pacg": {"router": ROUTER}}, "vppo": {"vppo": {}}}
CREDITS["vppo+pacg"] = CREDITS["vppo"] | CREDITS["pacg"]


class ClockRouter:
    """Finds one claim in every response, after a while."""

    seconds = 0.0

    async def route(self, question: Question, response: str) -> list[Quote]:
        await asyncio.sleep(self.seconds)
        return [Quote(" ".join(response.removeprefix("<think> ").split(" ")[CLAIM]))]

    async def close(self) -> None:
        """Nothing is open."""


@dataclass
class Side:
    """One way to make steps."""

    learner: Learner
    routing: ClaimRouting | None
    pipelined: bool = False
    compute: list[float] = field(default_factory=list)
    """Processor seconds of each step."""
    wall: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    waiting_batch: list[Group] | None = None
    """Drawn and being routed while another batch trains."""


class Bench:
    """A model, its questions and what a step is made of."""

    def __init__(self, folder: Path, prompts: int, rollouts: int, tokens: int) -> None:
        source = ScratchVisionModel(kind="scratch_vision")
        build_vision(folder, source, [f"w{number}" for number in range(200)], seed=0)
        self.config = Config.model_validate(
            {
                "model": {"source": {"kind": "directory", "path": str(folder)}},
                "sampling": {"group_size": rollouts, "max_tokens": tokens},
                "optimizer": {"learning_rate": 1e-6},
            }
        )
        self.encoder = Encoder.load(folder, think_prefill=True, system_prompt=None, max_prompt_tokens=1 << 20)
        self.prompts = [self._prompt(folder, number) for number in range(prompts)]
        self.parameters = SamplingParameters(max_tokens=tokens)
        self.rollouts = rollouts
        self.engine = LocalEngine(self._policy(), replace(self.encoder, eos_ids=()), batch_rows=prompts * rollouts)
        self.router = ClockRouter()
        self.drawn = 0

    def side(self, credit: dict[str, Any], pipelined: bool = False) -> Side:
        """A learner of its own under these rules."""
        config = CreditConfig.model_validate(credit)
        routing = ClaimRouting(config, self.encoder, self.rollouts, self.router) if config.pacg is not None else None
        return Side(Learner(self._policy(), self.config, self.encoder.banned_ids, rules=credit_rules(config)), routing, pipelined)

    async def step(self, side: Side) -> dict[str, float]:
        """One step, timed; a pipelined one trains the batch that the step before drew. The learner's metrics."""
        started, worked = time.perf_counter(), time.process_time()
        groups = await self._draw()
        if side.routing is not None:
            for group in groups:
                side.routing.start(group.prompt, group.rollouts)
        if side.pipelined:
            groups, side.waiting_batch = side.waiting_batch or groups, groups
        elif side.routing is not None:
            groups = [await side.routing.collect(group) for group in groups]
        batch = build_batch(groups, self.config.loss, self.config.sampling)
        metrics = await asyncio.to_thread(side.learner.update, batch)
        if side.pipelined and side.routing is not None and side.waiting_batch is not None:
            side.waiting_batch = [await side.routing.collect(group) for group in side.waiting_batch]
        side.compute.append(time.process_time() - worked)
        side.wall.append(time.perf_counter() - started)
        side.waits.append(side.routing.metrics()["time/router_wait"] if side.routing is not None else 0.0)
        return metrics

    def _policy(self) -> Policy:
        return Policy.load(Path(self.config.model.source.path), self.config.model, torch.device("cpu"))  # type: ignore[union-attr]

    def _prompt(self, folder: Path, number: int) -> Prompt:
        path = folder / f"{number}.png"
        rng = np.random.default_rng(number)
        Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)
        words = " ".join(f"w{word}" for word in rng.integers(0, 200, 24))
        question = Question(f"q{number}", ({"role": "user", "content": f"<image> {words}"},), "", (Media("image", str(path)),))
        return self.encoder.encode(question)

    async def _draw(self) -> list[Group]:
        """New responses, every other one right."""
        self.drawn += 1
        requests = [
            SampleRequest(prompt, index, 1_000_000 * self.drawn + 1000 * number + index, self.parameters)
            for number, prompt in enumerate(self.prompts)
            for index in range(self.rollouts)
        ]
        completions = iter(await self.engine.sample(requests))
        rewards = [Reward(float(index % 2), float(index % 2)) for index in range(self.rollouts)]
        advantages = group_advantages([reward.total for reward in rewards]).astype(np.float32)
        drawn = [tuple(Rollout(i, 1, "free", next(completions), reward=reward) for i, reward in enumerate(rewards)) for _ in self.prompts]
        return [Group(prompt, group, advantages=advantages) for prompt, group in zip(self.prompts, drawn, strict=True)]


def compare_credit(credit: str, prompts: int, rollouts: int, tokens: int, router: float, repeats: int) -> None:
    """Print a whole step with credit rules in steps without any.

    Args:
        credit: ``pacg``, ``vppo`` or ``all``.
        router: seconds until the router answers, in steps of the parent.
    """
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_compare(Bench(Path(folder), prompts, rollouts, tokens), credit, router, repeats))


async def _compare(bench: Bench, credit: str, router: float, repeats: int) -> None:
    sides = {"parent": bench.side({})}
    if credit in ("pacg", "all"):
        sides["pacg, synchronous"] = bench.side(CREDITS["pacg"])
        sides["pacg, pipelined"] = bench.side(CREDITS["pacg"], pipelined=True)
    if credit in ("vppo", "all"):
        sides["vppo"] = bench.side(CREDITS["vppo"])
        sides["vppo + pacg, pipelined"] = bench.side(CREDITS["vppo+pacg"], pipelined=True)
    await bench.step(sides["parent"])  # first calls of everything
    await bench.step(sides["parent"])
    bench.router.seconds = router * sides["parent"].wall[-1]
    for side in sides.values():
        for _ in range(1 + side.pipelined):
            await bench.step(side)
        for taken in (side.compute, side.wall, side.waits):
            taken.clear()
    for number in range(repeats):
        order = list(sides.values())
        for side in order if number % 2 == 0 else reversed(order):
            metrics = await bench.step(side)
            if side.routing is not None and min(metrics["pacg/routed_rollouts"], metrics["pacg/intervention_valid"]) < MOST:
                raise ValueError(f"step: fewer than {MOST} of the claims were routed and judged")
    rows = len(bench.prompts) * bench.rollouts
    print(f"{rows} rows x {bench.parameters.max_tokens} tokens, {torch.get_num_threads()} threads, router {bench.router.seconds:.3f} s")
    for name, side in sides.items():
        print(_line(name, side, sides["vppo"] if "vppo +" in name else sides["parent"], "vppo" if "vppo +" in name else "parent"))


def _line(name: str, side: Side, baseline: Side, called: str) -> str:
    """A step's compute and wait in steps of another. Compute is processor time, which a busy machine does not stretch."""
    compute = min(side.compute) / min(baseline.compute)
    waited = statistics.median(side.waits) / statistics.median(baseline.wall)
    return (
        f"{name:<24} {min(side.compute):.3f} s = {compute:.3f} x {called}, waits {waited:.3f} of its step: "
        f"{compute + waited:.3f} x together (wall {statistics.median(side.wall):.3f} s)"
    )
