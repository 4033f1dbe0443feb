"""Whole runs for the tests: a tiny configuration, a process that can be killed, and what must be equal afterwards."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TINY = """
run: {name: tiny, seed: 3, steps: 4, questions_per_step: 4, checkpoint_every: 1}
model: {source: {kind: scratch_text, hidden: 32, layers: 2, heads: 2}}
warm_start: {steps: 140, batch: 16, noisy_steps: 20, learning_rate: 1.0e-2}
questions:
  train: {kind: multi_hop, hops: [1], objects: 2, max_value: 4, count: 40}
  held_out: {kind: multi_hop, hops: [1], objects: 2, max_value: 4, count: 8}
sampling: {group_size: 4, max_tokens: 24, cge: {threshold: 0.9, token_filter: none, control_share: 0.25}}
reward: {contract: answer_tag}
optimizer: {learning_rate: 1.0e-3}
evaluation: {questions: 8, samples: 4}
"""


def write_config(folder: Path, cache: Path, text: str = TINY) -> Path:
    """A configuration file whose runs and cache lie below the given folders."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny.yaml"
    path.write_text(text.replace("run: {", f"run: {{folder: {folder / 'runs'}, cache: {cache}, ", 1))
    return path


def start(config: Path, *overrides: str, ranks: int = 1) -> "subprocess.Popen[str]":
    """``headrace train`` in a process group of its own, under torchrun where it has several ranks."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return subprocess.Popen(
        [sys.executable, *launch, "-m", "headrace", "train", str(config), *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def on_two_ranks(script: Path, folder: Path, *arguments: str, deadline: float = 240) -> None:
    """Run a script of the tests under torchrun, in ``folder``; it must end well."""
    result = subprocess.run(
        [*(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"), str(script), str(folder), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=deadline,
    )
    assert result.returncode == 0, result.stderr[-4000:]


def kill(process: "subprocess.Popen[str]") -> None:
    """kill -9 of the main process alone; its children must go by themselves."""
    process.send_signal(signal.SIGKILL)
    process.wait()


def finish(process: "subprocess.Popen[str]", deadline: float = 240) -> str:
    """Wait for a run that must end well; its output."""
    output, _ = process.communicate(timeout=deadline)
    assert process.returncode == 0, output
    return output


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def numbers(folder: Path) -> dict[str, Any]:
    """Everything of a run that must not depend on kills: all tables without timings, and the weights."""
    tables = {
        name: [{key: value for key, value in row.items() if not key.startswith(("time/", "machine/"))} for row in rows(folder / name)]
        for name in ("metrics.jsonl", "samples.jsonl", "mask_tokens.jsonl", "evaluations.jsonl")
    }
    return {**tables, "weights": (folder / "model" / "model.safetensors").read_bytes()}


def wait_for(condition: Any, deadline: float = 60) -> None:
    """Poll until ``condition()`` holds."""
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)
