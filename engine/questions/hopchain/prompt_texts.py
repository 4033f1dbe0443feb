"""The prompts of the generator: own texts, one file each, told apart by version and hash in a corpus' metadata."""

import hashlib
from functools import cache
from pathlib import Path
from typing import Literal

PromptName = Literal["caption", "write", "judge", "system"]
NAMES: tuple[PromptName, ...] = ("caption", "write", "judge", "system")
_FOLDER = Path(__file__).parent / "prompts"


@cache
def prompt(name: PromptName) -> str:
    """The text of a prompt, without its version line."""
    _, _, text = _read(name).partition("\n")
    return text.strip()


def versions() -> dict[str, dict[str, str]]:
    """Version and SHA-256 of every prompt."""
    return {
        name: {
            "version": _read(name).partition("\n")[0].removeprefix("version:").strip(),
            "sha256": hashlib.sha256(_read(name).encode()).hexdigest(),
        }
        for name in NAMES
    }


def _read(name: PromptName) -> str:
    return (_FOLDER / f"{name}.md").read_text(encoding="utf-8")
