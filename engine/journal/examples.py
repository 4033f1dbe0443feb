"""Example groups for the report: which ones to show, how much of them, and small copies of their pictures."""

import base64
import io
from pathlib import Path
from typing import Any

from headrace.journal.run_data import RunData
from headrace.journal.store import Row

GROUPS = 6
PROMPT_CHARACTERS, RESPONSE_CHARACTERS = 4_000, 6_000
THUMBNAIL = 192
"""Longest side in pixels of a prompt's picture on the page."""


def examples(run: RunData) -> list[dict[str, Any]]:
    """Groups to read: every arm, restored ones first, the newest first among them."""
    lanes: dict[str, list[Row]] = {"masked": [], "control": [], "free": []}
    for row in sorted(run.samples, key=lambda row: (not _restored(row), -row["step"])):
        lanes.setdefault(row.get("arm", "free"), []).append(row)
    turns = [row for turn in range(GROUPS) for lane in lanes.values() for row in lane[turn : turn + 1]]
    return [_example(row) for row in turns[:GROUPS]]


def _restored(row: Row) -> bool:
    accuracies = [rollout["reward"]["accuracy"] for rollout in row.get("rollouts", []) if rollout.get("reward")]
    return bool(row.get("intervened")) and len(set(accuracies)) > 1


def _example(row: Row) -> dict[str, Any]:
    prompt = str(row.get("prompt", ""))
    rollouts = [{**rollout, "pieces": _shortened(rollout.get("pieces", []))} for rollout in row.get("rollouts", [])]
    media = [{"path": path, "picture": thumbnail(Path(path))} for path in row.get("media", [])]
    return {**row, "prompt": _cut(prompt, PROMPT_CHARACTERS), "rollouts": rollouts, "media": media, "restored": _restored(row)}


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit:,} characters more)"


def _shortened(pieces: list[Any]) -> list[Any]:
    """A response's pieces up to a bound on characters."""
    shown: list[Any] = []
    left = RESPONSE_CHARACTERS
    for position, piece in enumerate(pieces):
        text = piece if isinstance(piece, str) else piece["drawn"]
        if len(text) > left:
            rest = sum(len(item if isinstance(item, str) else item["drawn"]) for item in pieces[position:]) - left
            return [*shown, f"{text[:left]} … ({rest:,} characters more)"]
        shown.append(piece)
        left -= len(text)
    return shown


def thumbnail(path: Path) -> str:
    """A small copy of a picture as a data URI; empty for clips and for files that are gone."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as picture:
            small = picture.convert("RGB")
            small.thumbnail((THUMBNAIL, THUMBNAIL))
            target = io.BytesIO()
            small.save(target, "WEBP", quality=80)
    except (OSError, UnidentifiedImageError, ValueError):
        return ""
    return "data:image/webp;base64," + base64.b64encode(target.getvalue()).decode()
