"""State of every video on disk: one small file per finished stage, each there whole or not at all."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from headrace.files import whole_lines, write_whole
from headrace.questions.hopchain.records import Cost, Record, Video

R = TypeVar("R", bound=Record)


class Stage(Record):
    """How a stage of one video ended."""

    dropped: str = ""
    """Why the video or all that is left of it went no further; empty where it did."""
    detail: str = ""
    cost: Cost = Cost()


def folder_name(video_id: str) -> str:
    """A folder name for any id."""
    readable = "".join(character if character.isalnum() or character in "-_" else "-" for character in video_id)[:40]
    return f"{readable}-{hashlib.sha256(video_id.encode()).hexdigest()[:12]}"


class VideoStore:
    """The folder of one video.

    ``load`` and ``save`` keep one record per stage; ``append`` and ``lines`` keep what is made piece by piece (captions), where a
    torn last line is what a kill left and counts for nothing.
    """

    def __init__(self, root: Path, video: Video) -> None:
        self.video = video
        self.folder = root / folder_name(video.id)
        self.folder.mkdir(parents=True, exist_ok=True)

    def load(self, stage: str, kind: type[R]) -> R | None:
        """The record of a finished stage, None where it has to be done.

        Raises:
            ValueError: the file holds something else.
        """
        path = self.folder / f"{stage}.json"
        try:
            return kind.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise ValueError(
                f"{path}: is not a record of this version ({error.error_count()} faults); delete it to do the stage again"
            ) from None

    def save(self, stage: str, record: Record) -> None:
        write_whole(self.folder / f"{stage}.json", record.model_dump_json())

    def append(self, stage: str, record: Record) -> None:
        """Add one piece; it counts once its line break is on disk."""
        with (self.folder / f"{stage}.jsonl").open("ab") as file:
            file.write(record.model_dump_json().encode() + b"\n")

    def lines(self, stage: str, kind: type[R]) -> Iterator[R]:
        """The pieces so far; a torn last line is cut off."""
        path = self.folder / f"{stage}.jsonl"
        for number, line in enumerate(whole_lines(path), 1):
            try:
                yield kind.model_validate(json.loads(line))
            except (ValueError, ValidationError):
                raise ValueError(f"{path}:{number}: is not a record of this version; delete the file to do the stage again") from None
