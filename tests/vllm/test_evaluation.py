"""``headrace eval`` on a server: the same greedy responses as in this process, and sampled ones for every question."""

import json
from pathlib import Path

import numpy as np
import pytest

from headrace.evaluation.job import prepare
from headrace.evaluation.run import run
from tests.sampling.tiny_policy import WORDS
from tests.vllm.conftest import Served

pytestmark = pytest.mark.vllm


def test_a_served_checkpoint_is_evaluated_like_a_local_one(served: Served, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    asked = [{"id": f"q{n}", "question": " ".join(rng.choice(WORDS, 6 + n)), "answer": "a"} for n in range(6)]
    rows = tmp_path / "bench.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in asked))
    few = ["sampling.max_tokens=12", "evaluation.samples=3", "reward.contract=answer_tag"]
    urls = json.dumps(served.supervisor.urls)
    local = run(prepare(served.tiny.directory, rows, overrides=few, out=tmp_path / "local"))
    remote = run(prepare(served.tiny.directory, rows, overrides=[*few, f"engine={{kind: vllm, urls: {urls}}}"], out=tmp_path / "remote"))
    assert [row["id"] for row in remote.rows] == [row["id"] for row in asked]
    assert [row["responses"][0] for row in remote.rows] == [row["responses"][0] for row in local.rows]
    assert all(len(row["responses"]) == 4 for row in remote.rows)
    assert any(row["length"] > 1 for row in remote.rows)
