"""``torchrun -m headrace train``: sharded over two ranks, the run has the numbers of one process."""

from pathlib import Path

import pytest

from tests import runs


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    config = runs.write_config(tmp_path, tmp_path / "cache")
    runs.finish(runs.start(config, "run.name=one", "run.steps=2"))
    output = runs.finish(runs.start(config, "run.name=two", "run.steps=2", ranks=2))
    assert output.count("report:") == 1
    one, two = (runs.rows(tmp_path / "runs" / name / "metrics.jsonl") for name in ("one", "two"))
    assert [row["step"] for row in two] == [1, 2]
    for first, second in zip(one, two, strict=True):
        for key in ("loss", "grad_norm", "policy/entropy", "reward/mean", "len/mean", "cge/threshold_share"):
            assert second[key] == pytest.approx(first[key], rel=1e-4, abs=1e-5), key
