"""The hint cache: what a teacher wrote about questions ahead of training, a JSONL or Parquet file.

A row is ``{"id": "q17", "caption": …, "visual": …, "reasoning": …}``; every part but the id may be missing, other fields
(teacher, version of the prompts) travel along unread. Several rows may tell parts of one question; of one part the last counts.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from headrace.questions.row_error import RowError
from headrace.questions.rows import read_rows
from headrace.questions.sets import QuestionSet
from headrace.records import Hint

PARTS = ("caption", "visual", "reasoning")


@runtime_checkable
class Scripted(QuestionSet, Protocol):
    """A task generator that can hint at its own questions."""

    def hint(self, index: int) -> Hint:
        """What a teacher would say about question ``index``, true by construction."""
        ...


def hints_for(source: Path | Literal["script"] | None, questions: QuestionSet) -> dict[str, Hint]:
    """The hints that a run is configured with, by question id; a script's are made for all questions at once.

    Raises:
        ValueError: the cache cannot be read, or the questions have no script.
    """
    if source is None:
        return {}
    if source != "script":
        return load_hints(Path(source))
    if not isinstance(questions, Scripted):
        raise ValueError("paqm.hints = script: these questions do not hint at themselves; name a cache, see `headrace questions hints`")
    return {questions.question(index).id: questions.hint(index) for index in range(len(questions))}


def load_hints(path: str | Path) -> dict[str, Hint]:
    """Hints by question id.

    Raises:
        ValueError: the file cannot be read, or a row is none; the message names file and row.
    """
    path = Path(path)
    hints: dict[str, Hint] = {}
    for number, row in read_rows(path):
        try:
            name, parts = _hint(row)
        except RowError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
        hints[name] = replace(hints.get(name, Hint()), **parts)
    return hints


def _hint(row: Any) -> tuple[str, Mapping[str, str]]:
    """Question id and the parts that are there."""
    if isinstance(row, RowError):
        raise row
    if not isinstance(row, dict):
        raise RowError("json", f"expected an object, got {type(row).__name__}")
    name = row.get("id")
    if isinstance(name, bool) or not isinstance(name, str | int) or not str(name).strip():
        raise RowError("id", f"expected the id of a question, got {name!r:.80}")
    parts = {part: row[part] for part in PARTS if row.get(part) is not None}
    for part, text in parts.items():
        if not isinstance(text, str):
            raise RowError(part, f"expected text, got {type(text).__name__}")
    return str(name), {part: text.strip() for part, text in parts.items() if text.strip()}
