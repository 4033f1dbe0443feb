"""Whether a picture shows what a response claims: known from the scene, or told by a file."""

from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from headrace.questions.row_error import RowError
from headrace.questions.rows import read_rows

Label = Literal["supported", "unsupported"]
LABELS: tuple[Label, ...] = ("supported", "unsupported")


@runtime_checkable
class KnownScenes(Protocol):
    """A task generator that knows what its pictures show."""

    def supports(self, index: int, claim: str) -> bool | None:
        """Whether the picture of question ``index`` shows what ``claim`` says; None where it cannot be told."""
        ...


class ClaimName(NamedTuple):
    """Which claim of a bank is meant."""

    question: str
    response: int
    """From 0."""
    text: str
    occurrence: int = 1


def load_labels(path: Path) -> dict[ClaimName, Label]:
    """Labels of claims, from JSONL or Parquet rows ``{"id": "q17", "response": 0, "text": "blue cube", "label": "unsupported"}``.

    ``occurrence`` (from 1) tells claims apart that read alike. Other fields are left unread; of two labels of a claim the last counts.

    Raises:
        ValueError: the file cannot be read, or a row is bad; the message names the row and the field.
    """
    labels: dict[ClaimName, Label] = {}
    for number, row in read_rows(Path(path)):
        try:
            name, label = _label(row)
        except RowError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
        labels[name] = label
    return labels


def _label(row: Any) -> tuple[ClaimName, Label]:
    if isinstance(row, RowError):
        raise row
    if not isinstance(row, dict):
        raise RowError("json", f"expected an object, got {type(row).__name__}")
    for field, kind, what in (
        ("id", str, "the id of a question"),
        ("response", int, "a number from 0"),
        ("text", str, "the words of a claim"),
    ):
        if not isinstance(row.get(field), kind) or isinstance(row.get(field), bool):
            raise RowError(field, f"expected {what}, got {row.get(field)!r:.80}")
    occurrence = 1 if row.get("occurrence") is None else row["occurrence"]
    if not isinstance(occurrence, int) or isinstance(occurrence, bool) or occurrence < 1:
        raise RowError("occurrence", f"expected a whole number of at least 1, got {occurrence!r:.80}")
    if row.get("label") not in LABELS:
        raise RowError("label", f"expected {' or '.join(LABELS)}, got {row.get('label')!r:.80}")
    return ClaimName(row["id"], row["response"], row["text"], occurrence), row["label"]
