"""Capturing steps: what a trace holds, and what a wrong request says."""

import gzip
import json
import re
from pathlib import Path

import pytest
import torch

import headrace
from headrace import ranges
from headrace.profiling import Window
from headrace.ranges import PREFIX, span
from headrace.records import Question
from tests import runs

CONFIG = """
run: {name: traced, seed: 1, steps: 3, questions_per_step: 2}
model: {source: {kind: scratch_text, hidden: 32, layers: 1, heads: 2}}
questions: {train: {kind: multi_hop, hops: [1], objects: 2, max_value: 3, count: 8}}
sampling: {group_size: 4, max_tokens: 4, cge: {threshold: 0.9, token_filter: none}}
reward: {contract: answer_tag}
loss: {kl_coef: 0.1}
journal: {tensorboard: false}
"""


def by_length(question: Question, text: str) -> float:
    return 1.0 if len(text.split()) % 2 else 0.0


def spans(trace: Path) -> list[str]:
    """Names of our ranges in a chrome trace, without the prefix."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return [event["name"].removeprefix(PREFIX) for event in events if str(event.get("name", "")).startswith(PREFIX)]


def documented() -> set[str]:
    """The names in the table of `headrace.ranges`."""
    assert ranges.__doc__ is not None
    names = set(re.findall(r"``([a-z0-9 ]+)``", ranges.__doc__.split("\n===")[1]))
    assert {"step", "wave 2", "optimizer"} <= names
    return names


def test_a_trace_of_a_window_holds_every_documented_range(tmp_path: Path) -> None:
    config = headrace.load_config(runs.write_config(tmp_path, tmp_path, CONFIG))
    headrace.Trainer(config, reward=by_length, profile=Window.parse("torch", "2:3")).train()
    folder = config.run_folder / "profile"
    found = spans(folder / "steps_2-3_rank0.json.gz")
    assert found.count("step") == 2
    elsewhere = {"evaluation", "counterfactual", "proximal"}  # this run has no held-out questions, credit rules or corrections
    assert documented() - elsewhere <= set(found) <= documented()
    assert "aten::mm" in (folder / "steps_2-3_rank0.txt").read_text()


def test_a_range_costs_nothing_to_results_and_passes_errors_on() -> None:
    assert not torch.autograd._profiler_enabled()
    with pytest.raises(KeyError), span("step"):
        raise KeyError
    with torch.profiler.profile() as profiler, pytest.raises(KeyError), span("step"):
        raise KeyError
    assert [event.key for event in profiler.key_averages() if event.key.startswith(PREFIX)] == [PREFIX + "step"]


@pytest.mark.parametrize(
    ("tool", "steps", "words"),
    [("perf", "2:3", "torch or nsys"), ("torch", "3:2", "1 <= A <= B"), ("torch", "2", "A:B"), ("torch", "0:1", "1 <= A")],
)
def test_a_wrong_request_is_one_clear_line(tool: str, steps: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Window.parse(tool, steps)


def test_a_window_beside_the_run_is_refused() -> None:
    Window("torch", 5, 9).check(done=4, steps=6)
    with pytest.raises(ValueError, match="from step 10 to 12"):
        Window("torch", 5, 9).check(done=9, steps=12)
    with pytest.raises(ValueError, match="from step 1 to 4"):
        Window("torch", 5, 9).check(done=0, steps=4)
