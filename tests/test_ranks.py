"""``torchrun -m headrace train``: sharded over two ranks, the run has the numbers of one process."""

from pathlib import Path

import pytest

from headrace.assembly import export_newest
from tests import runs


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    config = runs.write_config(tmp_path, tmp_path / "cache")
    runs.finish(runs.start(config, "run.name=one", "run.steps=2"))
    output = runs.finish(runs.start(config, "run.name=two", "run.steps=2", "model.shard=2", ranks=2))
    assert output.count("report:") == 1
    one, two = (runs.rows(tmp_path / "runs" / name / "metrics.jsonl") for name in ("one", "two"))
    assert [row["step"] for row in two] == [1, 2]
    for first, second in zip(one, two, strict=True):
        for key in ("loss", "grad_norm", "policy/entropy", "reward/mean", "len/mean", "cge/threshold_share"):
            assert second[key] == pytest.approx(first[key], rel=1e-4, abs=1e-5), key
    run = tmp_path / "runs" / "two"
    assert export_newest(run, tmp_path / "out") == 2  # one process, which has no two ranks to lay the policy out over
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (run / "model" / "model.safetensors").read_bytes()


def test_what_every_rank_finds_wrong_is_said_once(tmp_path: Path) -> None:
    config = runs.write_config(tmp_path, tmp_path / "cache")
    process = runs.start(config, "run.steps=-2", ranks=2)
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert output.count("run.steps: Input should be greater than or equal to 0 (got -2)") == 1
