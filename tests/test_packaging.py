"""Wheel, sdist and the import names work as a user installs them."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    clone = tmp_path_factory.mktemp("source") / "headrace"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(out), str(clone)], check=True, capture_output=True)
    return out


def test_wheel_holds_the_packages_and_nothing_else(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"headrace"}
    for member in ("trainer.py", "kernels/top_token.py", "bench/__init__.py", "journal/report.html", "journal/report.css"):
        assert f"headrace/{member}" in names


def test_sdist_carries_the_sources(distributions: Path) -> None:
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.py", "engine/trainer.py", "kernels/__init__.py", "csrc/bindings.cpp", "LICENSE"} <= names
    assert not [name for name in names if name.startswith("tests/")], "setuptools takes some of the tests and leaves what they import"


def test_wheel_imports_from_a_bare_folder(distributions: Path, tmp_path: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)], check=True)
    code = "import headrace, headrace.kernels, headrace.bench; print(headrace.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); {code}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(tmp_path / "site") in done.stdout


@pytest.mark.parametrize("module", ["headrace", "headrace.bench"])
def test_python_dash_m(module: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout or "usage" in done.stdout


def test_transformers_works_from_the_repository_root() -> None:
    """A folder called ``kernels`` must not be taken for the distribution of that name, which transformers probes for."""
    code = "from transformers import Qwen3ForCausalLM; from transformers.utils import is_kernels_available; print(is_kernels_available())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("False")
