"""A cached warm start serves exactly the runs that would make the same weights."""

from pathlib import Path

import pytest

from headrace.config import load_config
from headrace.starting_model import _key
from tests import runs

BASE = Path("cache/models/scratch_text-0123")


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return runs.write_config(tmp_path, tmp_path / "cache")


@pytest.mark.parametrize(
    "change",
    [
        "warm_start.steps=7",
        "questions.train.count=41",
        "questions.system_prompt=Think.",
        "sampling.think_prefill=false",
        "sampling.stop_ids=[3]",
        "model.dtype=bfloat16",
        "run.seed=4",
    ],
)
def test_what_weights_depend_on_is_in_the_key(written: Path, change: str) -> None:
    assert _key(load_config(written), BASE) != _key(load_config(written, [change]), BASE)


@pytest.mark.parametrize("change", ["run.name=other", "sampling.cge=null", "optimizer.learning_rate=0.1", "run.cache=elsewhere"])
def test_what_comes_later_is_not(written: Path, change: str) -> None:
    assert _key(load_config(written), BASE) == _key(load_config(written, [change]), BASE)


def test_models_of_ones_own_go_by_their_place_and_made_ones_by_their_name(written: Path) -> None:
    made = load_config(written)
    own = load_config(written, ["model.source={kind: directory, path: a/model}"])
    assert _key(made, Path("a/model")) == _key(made, Path("b/model"))
    assert _key(own, Path("a/model")) != _key(own, Path("b/model"))
