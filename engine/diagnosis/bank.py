"""A bank: questions with fixed responses and their claims, as JSONL or Parquet.

A row is a question as ``questions.rows`` reads it (no answer is needed) with ``responses`` besides::

    {"id": "q17", "question": "<image> how many cubes ?", "images": ["q17.png"], "responses": [
        {"text": "<think> two blue cubes </think> <answer> 2 </answer>", "token_ids": [5, 17, …], "finished": true,
         "claims": [{"text": "two blue cubes", "occurrence": 1, "label": "unsupported"}]}]}

A response without claims, or whose claims are null because no router answered, stays in the bank and gives no observation.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from headrace.questions.rows import load_rows
from headrace.questions.support import Label
from headrace.records import Media, Question


class Claim(msgspec.Struct, frozen=True):
    """A passage of a response that says what is to be seen."""

    text: Annotated[str, msgspec.Meta(min_length=1)]
    occurrence: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Which of the passages that read so, from 1."""
    label: Label | None = None
    """Whether the picture shows it; None where nobody has said."""


class Response(msgspec.Struct, frozen=True):
    """A fixed response."""

    text: str
    """Without a think tag that the prompt pre-filled and without the end token."""
    token_ids: list[Annotated[int, msgspec.Meta(ge=0)]] | None = None
    """As drawn, end token included; used by tokenizers in which they spell the text."""
    finished: bool = True
    """It ended by itself."""
    claims: list[Claim] | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A question of a bank."""

    question: Question
    responses: tuple[Response, ...]
    think_prefill: bool = False
    """The prompt opens the think tag."""


@dataclass(frozen=True, slots=True)
class Bank:
    path: Path
    entries: tuple[Entry, ...]
    problems: tuple[str, ...] = ()
    """Rows that cannot be used, a line each (of those that are no questions at all, the first few)."""
    left_out: int = 0
    """Rows that cannot be used."""

    def first(self, questions: int | None) -> "Bank":
        """The bank with its first questions only."""
        return Bank(self.path, self.entries[:questions], self.problems, self.left_out)


def read_bank(path: Path) -> Bank:
    """Read and check every row; bad ones are left out with a line each.

    Raises:
        ValueError: the file cannot be read, or has no usable row.
    """
    rows = load_rows(path, require_answer=False)
    entries: list[Entry] = []
    problems = list(rows.problems)
    for question, number in zip(rows.questions, rows.numbers, strict=True):
        try:
            entries.append(_entry(question))
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
    left_out = len(rows) - len(entries) + sum(rows.skipped.values())
    if not entries:
        raise ValueError(f"{path}: none of its {left_out} rows can be used; the first: {problems[0]}")
    return Bank(Path(path), tuple(entries), tuple(problems), left_out)


def _entry(question: Question) -> Entry:
    if not question.media:
        raise ValueError("images: a bank needs a picture or a clip to degrade, got none")
    extra = question.extra
    if not extra.get("responses"):
        raise ValueError("responses: missing; expected a list of responses with text and claims")
    prefill = extra.get("think_prefill", False)
    if not isinstance(prefill, bool):
        raise ValueError(f"think_prefill: expected true or false, got {prefill!r:.80}")
    try:
        responses = msgspec.convert(extra["responses"], tuple[Response, ...])
    except msgspec.ValidationError as error:
        text = str(error)
        problem, _, place = text.partition(" - at `$")
        raise ValueError(f"responses{place.rstrip('`')}: {problem[:1].lower()}{problem[1:]}") from None
    return Entry(question, responses, prefill)


def bank_row(entry: Entry) -> dict[str, Any]:
    """The row of an entry, as JSON; the right answer is not in it."""
    question = entry.question
    row: dict[str, Any] = {"id": question.id, "prompt": [dict(message) for message in question.messages]}
    for kind in ("image", "video"):
        items = [_medium(item) for item in question.media if item.kind == kind]
        if items:
            row[f"{kind}s"] = items
    return row | {
        "data_source": question.source,
        "think_prefill": entry.think_prefill,
        "responses": msgspec.to_builtins(entry.responses),
    }


def _medium(media: Media) -> dict[str, Any]:
    settings = {"nframes": media.frames, "max_pixels": media.max_pixels}
    return {media.kind: media.path, **{name: value for name, value in settings.items() if value is not None}}


def write_bank(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Write rows of ``bank_row`` to JSON lines, or to Parquet by that name; the file is there whole or not at all."""
    partial = path.with_name(f".{path.name}.writing")
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), partial)
    else:
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    os.replace(partial, path)


def digest(entries: Sequence[Entry]) -> str:
    """Tells banks apart by what a score depends on; labels do not count, so that a bank may be labelled anew."""
    known = hashlib.sha256()
    for entry in entries:
        question = entry.question
        claims = [[[claim.text, claim.occurrence] for claim in response.claims or ()] for response in entry.responses]
        responses = [[response.text, response.token_ids, response.finished] for response in entry.responses]
        messages = [dict(message) for message in question.messages]
        known.update(json.dumps([question.id, messages, repr(question.media), entry.think_prefill, responses, claims]).encode())
    return known.hexdigest()
