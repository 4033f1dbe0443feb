"""Configuration files, overrides and their errors."""

import importlib.util
from pathlib import Path

import pytest

from headrace import load_config
from headrace.config import Config, ConfigError, load_model
from headrace.questions.hopchain.settings import CorpusConfig

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


SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))  # studies are tests/test_study.py's
CORPORA = [path for path in SHIPPED if path.stem.endswith("_corpus")]


@pytest.mark.parametrize("path", [path for path in SHIPPED if path not in CORPORA], ids=lambda path: path.stem)
def test_shipped_configurations_load(path: Path) -> None:
    assert isinstance(load_config(path), Config)


@pytest.mark.parametrize("path", CORPORA, ids=lambda path: path.stem)
def test_shipped_corpora_load(path: Path) -> None:
    assert isinstance(load_model(CorpusConfig, path), CorpusConfig)


def test_overrides_are_yaml(minimal: Path) -> None:
    config = load_config(
        minimal, ["run.steps=7", "sampling.cge={threshold: 0.9}", "sampling.cge.max_mean=0.5", "optimizer.learning_rate=2e-4"]
    )
    assert (config.run.steps, config.sampling.cge.threshold, config.sampling.cge.max_mean) == (7, 0.9, 0.5)
    assert config.optimizer.learning_rate == 2e-4


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["run.stepz=3"], ["override: run.stepz: no such field; is steps meant? (got 3)"]),
        (["run.steps=many"], ["run.steps", "integer", "many"]),
        (["sampling.top_p=0.9"], ["top_p", "truncate"]),
        (["model.source.kind=gpt"], ["model.source", "scratch_text"]),
        (["run"], ["section.field=value"]),
        (["run.name.x=1", "run.name.x.y=2"], ["run.name.x is a value"]),
        (["sampling.cge={threshold: 0.4}"], ["sampling.cge.threshold", "0.5"]),
        (["loss.kind=cispo", "loss.dual_clip=3"], ["loss.dual_clip", "cispo"]),
        (["optimizer.learning_rate=.inf"], ["optimizer.learning_rate", "finite"]),
        (["optimizer.betas=[1.0, 0.9]"], ["optimizer.betas.0", "less than 1"]),
        (["reward.timeout=1e300"], ["reward.timeout", "86400"]),
        (["run.seed=18446744073709551616"], ["run.seed", "less than"]),
        (["model.source.layers=0"], ["layers", "greater than or equal to 1"]),
    ],
)
def test_faults_name_the_field(minimal: Path, overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(minimal, overrides)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("name", ["''", ".", "..", "../other", "/absolute", "a//b", ".cache", '"two\\nlines"', '"nul\\0"', "' '"])
def test_a_run_name_stays_below_its_folder(minimal: Path, name: str) -> None:
    """``--fresh`` deletes ``run.folder/run.name``: it must never be a folder above, or the folder of all runs."""
    with pytest.raises(ConfigError, match=r"run\.name: .*name of a folder below run\.folder"):
        load_config(minimal, [f"run.name={name}"])


def test_names_that_are_folders(minimal: Path) -> None:
    for name in ("a b", "group/one", "größe", "v1.2"):
        assert load_config(minimal, [f"run.name={name}"]).run.name == name


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


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (["engine.urls=[127.0.0.1:8000]"], r"engine\.urls: '127\.0\.0\.1:8000' is no address"),
        (["engine.urls=[http://a:1,http://a:1/]"], "names http://a:1 twice"),
        (["sampling.temperature=2.5"], r"sampling\.temperature = 2\.5: vLLM draws at 2 at most"),
        (["evaluation.temperature=3"], r"evaluation\.temperature = 3: vLLM draws at 2 at most"),
    ],
)
def test_what_no_server_can_do_is_said_before_one_starts(minimal: Path, overrides: list[str], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault) as caught:
        load_config(minimal, ["engine.kind=vllm", *overrides])
    assert "\n" not in str(caught.value)
    assert "{" not in str(caught.value), "no dump of a section"
