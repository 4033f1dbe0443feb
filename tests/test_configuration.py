"""Configuration files, overrides and their errors."""

import importlib.util
from pathlib import Path

import pytest

from headrace import load_config
from headrace.config import Config, ConfigError

ROOT = Path(__file__).parents[1]
MINIMAL = """
model: {source: {kind: scratch_text}}
questions: {train: {kind: multi_hop}}
sampling: {max_tokens: 16}
"""


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "minimal.yaml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configurations_load(path: Path) -> None:
    assert isinstance(load_config(path), Config)


def test_overrides_are_yaml(minimal: Path) -> None:
    config = load_config(
        minimal, ["run.steps=7", "sampling.cge={threshold: 0.9}", "sampling.cge.max_mean=0.5", "optimizer.learning_rate=2e-4"]
    )
    assert (config.run.steps, config.sampling.cge.threshold, config.sampling.cge.max_mean) == (7, 0.9, 0.5)
    assert config.optimizer.learning_rate == 2e-4


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["run.stepz=3"], ["run.stepz", "Extra inputs"]),
        (["run.steps=many"], ["run.steps", "integer", "many"]),
        (["sampling.top_p=0.9"], ["top_p", "truncate"]),
        (["model.source.kind=gpt"], ["model.source", "scratch_text"]),
        (["run"], ["section.field=value"]),
        (["run.name.x=1", "run.name.x.y=2"], ["run.name.x is a value"]),
        (["sampling.cge={threshold: 0.4}"], ["sampling.cge.threshold", "0.5"]),
        (["loss.kind=cispo", "loss.dual_clip=3"], ["loss.dual_clip", "cispo"]),
    ],
)
def test_faults_name_the_field(minimal: Path, overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(minimal, overrides)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("content", ["", "- a\n- b", "a: [", "\x00"])
def test_files_that_are_no_configuration(tmp_path: Path, content: str) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"odd\.yaml"):
        load_config(path)


def test_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "none.yaml")
    assert str(caught.value).count("\n") == 0


def test_reference_page_is_current() -> None:
    spec = importlib.util.spec_from_file_location("configuration_page", ROOT / "docs" / "configuration.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == module.page(), "run `python docs/configuration.py`"
