"""What an ill-willed user tries: every fault is one line and status 1, or is counted and the run goes on; nothing is lost."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import headrace
from headrace.config import Config, ConfigError
from headrace.run_folder import claim_folder
from tests import runs
from tests.test_trainer import BARE, by_chance


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def bare(tmp_path: Path, store: Path) -> Callable[..., Config]:
    """The smallest run; takes overrides."""
    path = runs.write_config(tmp_path, store, BARE)
    return lambda *overrides: headrace.load_config(path, overrides)


def train(config: Config, **options: object) -> headrace.TrainResult:
    return headrace.Trainer(config, reward=by_chance, **options).train()


# ------------------------------------------------------------------------------------------------------ the run folder


def test_two_processes_never_share_a_run_folder(bare: Callable[..., Config]) -> None:
    config = bare("run.steps=1")
    with claim_folder(config, fresh=False):
        for fresh in (False, True):
            with pytest.raises(ConfigError, match="another process is training there"):
                train(config, fresh=fresh)
    assert train(config).step == 1, "the lock goes with its holder"
    assert train(bare("run.steps=2")).step == 2


def test_fresh_deletes_what_a_run_left_and_nothing_else(bare: Callable[..., Config], tmp_path: Path) -> None:
    config = bare("run.steps=1")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("precious")
    config.run_folder.parent.mkdir()
    config.run_folder.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="is not a run folder"):
        train(config, fresh=True)
    assert (elsewhere / "mine").read_text() == "precious"
    (elsewhere / "mine").rename(tmp_path / "mine")
    train(config)
    (elsewhere / "link").symlink_to(tmp_path / "mine")
    assert train(config, fresh=True).step == 1
    assert (tmp_path / "mine").read_text() == "precious"
    assert not (elsewhere / "link").is_symlink()


@pytest.mark.parametrize("content", [b"a: [", b"", b"- 1", b"\xff\xfe"])
def test_a_damaged_configuration_on_record_is_one_line(bare: Callable[..., Config], content: bytes) -> None:
    config = bare("run.steps=1")
    config.run_folder.mkdir(parents=True)
    (config.run_folder / "config.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.yaml: .*--fresh") as caught:
        train(config)
    assert "\n" not in str(caught.value)
    assert train(config, fresh=True).step == 1
    shutil.rmtree(config.run_folder)
