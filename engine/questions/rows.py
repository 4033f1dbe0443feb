"""Questions from the rows of a JSONL or Parquet file.

A row is either short::

    {"question": "What is 17 + 25?", "answer": 42}

with optional ``id``, ``system``, ``image``/``images``, ``video``/``videos``, ``source``, ``tolerance``; or full::

    {"prompt": [{"role": "user", "content": "<video>\\nHow many …?"}], "videos": [{"video": "file:///a.mp4", "nframes": 140}],
     "data_source": "…", "reward_model": {"ground_truth": "42"}, "extra_info": {"question_id": "…", "tolerance": 0.0}}

Other fields travel along in ``Question.extra``. A row that cannot be used is one line ``path:row: field: what is wrong``.
"""

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from headrace.questions.media_fields import read_media
from headrace.questions.row_error import RowError
from headrace.records import Media, Question

log = logging.getLogger(__name__)

_PARQUET_BATCH = 1024  # rows decoded at once
_SHOWN = 20  # problems kept as text; all are counted
_ROLES = ("system", "user", "assistant")
_SHORT = {"question", "answer", "id", "system", "image", "images", "video", "videos", "source", "data_source", "extra_info"}
_FULL = {"prompt", "answer", "id", "image", "images", "video", "videos", "source", "data_source", "reward_model", "extra_info"}


@dataclass(frozen=True, slots=True)
class RowSet:
    """The usable rows of a file (a ``sets.QuestionSet``)."""

    path: Path
    questions: tuple[Question, ...]
    skipped: Mapping[str, int]
    """Rows left out, by the field at fault; ``json`` for a line that is no object, ``duplicate`` for a repeated id or row."""
    problems: tuple[str, ...] = ()
    """The first of them, one line each."""
    numbers: tuple[int, ...] = ()
    """Row of the file that each question is from, counted from 1."""

    def __len__(self) -> int:
        return len(self.questions)

    def question(self, index: int) -> Question:
        """Question ``index``, 0 <= index < len(self)."""
        if not 0 <= index < len(self.questions):
            raise IndexError(f"question {index} of {len(self.questions)}")
        return self.questions[index]


def load_rows(path: str | Path, bad_rows: Literal["skip", "stop"] = "skip", *, require_answer: bool = True) -> RowSet:
    """Read every row, check it and that its media exist.

    Args:
        path: ``.parquet``, or JSON lines in UTF-8 under any other name.
        bad_rows: ``skip`` counts rows that cannot be used and logs one line about them; ``stop`` raises at the first.
        require_answer: False lets rows go without a reference, for a reward function that needs none.

    Raises:
        ValueError: the file cannot be read or has no usable row, or a row is bad and ``bad_rows`` is ``stop``.
    """
    path = Path(path)
    reader = _Reader(path, require_answer)
    questions: list[Question] = []
    numbers: list[int] = []
    skipped: Counter[str] = Counter()
    problems: list[str] = []
    for number, row in read_rows(path):
        try:
            questions.append(reader.question(number, row))
            numbers.append(number)
        except RowError as error:
            problem = f"{path}:{number}: {error}"
            if bad_rows == "stop":
                raise ValueError(problem) from None
            skipped[error.reason] += 1
            if len(problems) < _SHOWN:
                problems.append(problem)
    if not questions:
        raise ValueError(
            f"{path}: none of its {skipped.total()} rows can be used; the first: {problems[0]}" if problems else f"{path}: has no rows"
        )
    if skipped:
        reasons = ", ".join(f"{reason} {count}" for reason, count in skipped.most_common())
        log.warning(
            "%s: %d of %d rows skipped (%s); the first: %s", path, skipped.total(), len(questions) + skipped.total(), reasons, problems[0]
        )
    return RowSet(path, tuple(questions), dict(skipped), tuple(problems), tuple(numbers))


def copy_rows(path: Path, numbers: Collection[int], out: Path) -> None:
    """Write the rows of those numbers to ``out`` as they stand, in the format of ``path``; it is there whole or not at all."""
    wanted = frozenset(numbers)
    partial = out.with_name(f".{out.name}.partial")
    if path.suffix == ".parquet":
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(path)
        pyarrow.parquet.write_table(table.take([number - 1 for number in sorted(wanted)]), partial)
    else:
        with path.open("rb") as source, partial.open("wb") as target:
            target.writelines(line.rstrip(b"\r\n") + b"\n" for number, line in enumerate(source, 1) if number in wanted)
    os.replace(partial, out)


def question_of_row(row: Mapping[str, Any], folder: Path) -> Question:
    """The question of one row that lies in memory; relative paths start at ``folder``.

    Raises:
        ValueError: the row cannot be used; the message names the field.
    """
    return _Reader(folder / "row", require_answer=True).question(1, dict(row))


# ------------------------------------------------------------------------------------------------------------- the file


def read_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Number (from 1) and value of every row; a line that is no JSON arrives as the RowError that says so."""
    try:
        if path.suffix == ".parquet":
            yield from _parquet_rows(path)
        else:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if content := line.removeprefix(b"\xef\xbb\xbf").strip():
                        yield number, _parsed(content)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from None


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return RowError("json", "expected UTF-8 text")
    except (ValueError, RecursionError) as error:
        return RowError("json", f"expected a JSON object on one line ({error})")


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_PARQUET_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: is not a sound Parquet file ({' '.join(str(error).split())})") from None


# -------------------------------------------------------------------------------------------------------------- one row


class _Reader:
    """Turns the rows of one file into questions; knows the ids and texts it has seen."""

    def __init__(self, path: Path, require_answer: bool) -> None:
        self._folder = path.absolute().parent
        self._source = path.stem
        self._require_answer = require_answer
        self._seen: dict[str, int] = {}  # id -> row
        self._systems: dict[str, str] = {}  # one copy of each system prompt
        self._exists: dict[str, bool] = {}  # media files

    def question(self, number: int, row: Any) -> Question:
        """The question of a row.

        Raises:
            RowError: the row cannot be used.
        """
        if isinstance(row, RowError):
            raise row
        if not isinstance(row, dict):
            raise RowError("json", f"expected an object, got {_kind(row)}")
        row = {name: value for name, value in row.items() if value is not None}  # Parquet has null for absent
        extra_info = row.get("extra_info", {})
        if not isinstance(extra_info, dict):
            raise RowError("extra_info", f"expected an object, got {_kind(extra_info)}")
        extra_info = {name: value for name, value in extra_info.items() if value is not None}
        full = "prompt" in row
        messages = self._prompt(row["prompt"]) if full else ()
        media = read_media(row, self._folder, self._exists)
        messages = messages or self._short(row, media)
        media = _in_order(media, messages)
        answer = self._answer(row)
        extra = {name: value for name, value in row.items() if name not in (_FULL if full else _SHORT)} | extra_info
        tolerance = extra.get("tolerance")
        if tolerance is not None and not (_is_number(tolerance) and tolerance >= 0):
            raise RowError("tolerance", f"expected a number of at least 0, got {tolerance!r:.80}")
        source = _text("data_source", row.get("data_source", row.get("source", self._source)))
        return Question(
            id=self._id(number, row, extra_info, messages, answer),
            messages=messages,
            answer=answer,
            media=media,
            source=source,
            extra=extra,
        )

    def _prompt(self, prompt: Any) -> tuple[dict[str, str], ...]:
        """Messages of the full form, byte for byte."""
        if not isinstance(prompt, list) or not prompt:
            raise RowError("prompt", f"expected a list of messages, got {_kind(prompt)} (plain text goes under question)")
        messages = []
        for i, message in enumerate(prompt):
            if not isinstance(message, dict) or message.get("role") not in _ROLES:
                raise RowError(f"prompt[{i}]", f"expected role and content, the role one of {', '.join(_ROLES)}, got {message!r:.80}")
            content = _text(f"prompt[{i}].content", message.get("content"))
            if message["role"] == "system":
                content = self._systems.setdefault(content, content)
            messages.append({"role": message["role"], "content": content})
        if messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
            raise RowError("prompt", "expected the last message to be the user's, and not blank")
        return tuple(messages)

    def _short(self, row: dict[str, Any], media: Sequence[Media]) -> tuple[dict[str, str], ...]:
        """Messages of the short form; media whose place the question does not name go before it."""
        if "question" not in row:
            raise RowError("question", "missing; expected question (text) or prompt (messages)")
        question = _text("question", row["question"])
        if not question.strip():
            raise RowError("question", "is blank")
        if not any(f"<{item.kind}>" in question for item in media):
            question = "".join(f"<{item.kind}>\n" for item in media) + question
        messages = [{"role": "user", "content": question}]
        if "system" in row:
            system = _text("system", row["system"])
            messages.insert(0, {"role": "system", "content": self._systems.setdefault(system, system)})
        return tuple(messages)

    def _answer(self, row: dict[str, Any]) -> str:
        """The reference as text: ``reward_model.ground_truth`` or ``answer``."""
        model = row.get("reward_model", {})
        if not isinstance(model, dict):
            raise RowError("reward_model", f"expected an object with ground_truth, got {_kind(model)}")
        field = "answer" if model.get("ground_truth") is None else "reward_model.ground_truth"
        value = row.get("answer") if field == "answer" else model["ground_truth"]
        if value is None:
            if not self._require_answer:
                return ""
            raise RowError("answer", "missing; expected answer or reward_model.ground_truth")
        if _is_number(value):
            return str(value)
        text = _text(field, value, "text or a finite number")
        if self._require_answer and not text.strip():
            raise RowError(field, "is blank")
        return text

    def _id(self, number: int, row: dict[str, Any], extra_info: dict[str, Any], messages: Any, answer: str) -> str:
        """The given id, or a hash of the row's content, the same wherever the file lies; each may occur once."""
        given = next((source[name] for source, name in ((row, "id"), (extra_info, "question_id")) if source.get(name) is not None), None)
        if given is None:
            media = [row.get(name) for name in ("image", "images", "video", "videos")]
            content = json.dumps([messages, answer, media], sort_keys=True, default=str)
            identity = hashlib.sha256(content.encode()).hexdigest()[:16]
        elif isinstance(given, int) and not isinstance(given, bool):
            identity = str(given)
        else:
            identity = _text("id", given, "text or an integer")
            if not identity.strip():
                raise RowError("id", "is blank")
        first = self._seen.setdefault(identity, number)
        if first != number:
            what = "the same question as" if given is None else f"id {identity!r:.80} is already that of"
            raise RowError("duplicate", f"{what} row {first}")
        return identity


def _in_order(media: Sequence[Media], messages: Sequence[Mapping[str, str]]) -> tuple[Media, ...]:
    """Media in the order in which the messages name them.

    Raises:
        RowError: the messages name more or fewer than there are.
    """
    text = "".join(message["content"] for message in messages if media or message["role"] == "user")
    waiting = {kind: iter([item for item in media if item.kind == kind]) for kind in ("image", "video")}
    for kind in waiting:
        named, count = text.count(f"<{kind}>"), sum(item.kind == kind for item in media)
        if named != count:
            raise RowError(f"{kind}s", f"the messages name <{kind}> {named} times, the row brings {count}")
    places = sorted((start, kind) for kind in waiting for start in _occurrences(text, f"<{kind}>"))
    return tuple(next(waiting[kind]) for _, kind in places)


def _occurrences(text: str, part: str) -> Iterator[int]:
    start = text.find(part)
    while start >= 0:
        yield start
        start = text.find(part, start + len(part))


def _text(field: str, value: Any, expected: str = "text") -> str:
    """A string that can be written as UTF-8."""
    if not isinstance(value, str):
        raise RowError(field, f"expected {expected}, got {_kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RowError(field, "expected valid Unicode, got half of a surrogate pair") from None
    return value


def _is_number(value: Any) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and isfinite(value))


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
