"""The house has floors: imports run down, never up or sideways (docs/architecture.md)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GROUND = {"records", "wire", "config", "files", "schedule", "streams", "encoding", "media", "pixels", "torchvision_ops", "ranges"}
ROOMS = {"questions", "sampling", "rewards", "selection", "credit", "policy", "sync", "journal"}
SECOND = {
    "assembly",
    "checkpoint",
    "checkpoint_files",
    "checkpoint_reader",
    "controller",
    "decontamination",
    "diagnosis",
    "doctor",
    "drawing",
    "evaluation",
    "generation",
    "hint_filling",
    "interrupt",
    "planning",
    "profiling",
    "rollout",
    "run_folder",
    "starting_model",
    "study",
    "task_sets",
    "trainer",
}
TOP = {"commands", "cli", "__main__"}


def imported(path: Path) -> set[str]:
    """Second names of every ``headrace.X`` import, however it is written."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            modules = [f"{module}.{alias.name}" for alias in node.names] if module == "headrace" else [module]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        for module in modules:
            parts = module.split(".")
            assert parts[0] not in {"engine", "kernels", "bench"}, f"{path}: imports bare {parts[0]}"
            if parts[0] == "headrace" and len(parts) > 1:
                names.add(parts[1])
    return names


def allowed(room: str) -> set[str]:
    if room in GROUND:
        return GROUND | {"kernels"}
    if room in ROOMS:
        return GROUND | {"kernels", room}
    if room in SECOND:
        return GROUND | {"kernels"} | ROOMS | SECOND
    return GROUND | {"kernels"} | ROOMS | SECOND | TOP


@pytest.mark.parametrize("path", sorted((ROOT / "engine").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_down(path: Path) -> None:
    room = path.relative_to(ROOT / "engine").parts[0].removesuffix(".py")
    if room == "__init__":
        return
    known = GROUND | ROOMS | SECOND | TOP | {"kernels", "bench", "__version__"}
    upward = (imported(path) & known) - allowed(room)
    assert not upward, f"{path.relative_to(ROOT)} ({room}) imports {sorted(upward)}"


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_kernels_know_nothing_of_the_engine(path: Path) -> None:
    assert imported(path) <= {"kernels"}


def test_top_level_is_the_house() -> None:
    folders = {"engine", "kernels", "csrc", "bench", "configs", "tests", "constraints", "docs", "examples", ".ci"}
    assert all((ROOT / folder).is_dir() for folder in folders)
