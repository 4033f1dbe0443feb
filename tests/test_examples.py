"""The examples and the code blocks of the README run as they stand."""

import re
import runpy
from pathlib import Path

import pytest

import headrace

ROOT = Path(__file__).parents[1]


def test_kernels_example(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "kernels.py"), run_name="__main__")
    assert "the mask removed" in capsys.readouterr().out


def test_readme_configuration_and_rows(tmp_path: Path) -> None:
    """The ten lines of the README are a valid configuration, and its rows load."""
    from headrace.questions.sets import load

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows, configuration = (re.search(rf"```{kind}\n(.*?)```", text, re.S)[1] for kind in ("json", "yaml"))
    (tmp_path / "mine.jsonl").write_text(rows)
    (tmp_path / "mine.yaml").write_text(configuration.replace("mine.jsonl", str(tmp_path / "mine.jsonl")))
    config = headrace.load_config(tmp_path / "mine.yaml")
    assert len(load(config.questions.train, config.run.seed, "train")) == 2


def test_readme_links_exist() -> None:
    links = re.findall(r"\]\(([\w/.]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert links
    missing = [link for link in links if not (ROOT / link).exists()]
    assert not missing
