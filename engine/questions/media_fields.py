"""Pictures and clips of a row: paths, file URLs or objects with settings, to media by reference."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from headrace.questions.row_error import RowError
from headrace.records import Media

Kind = Literal["image", "video"]


def read_media(row: Mapping[str, Any], folder: Path, exists: dict[str, bool]) -> list[Media]:
    """Media of ``image``/``images``, then of ``video``/``videos``.

    An entry is a path (relative to ``folder``), a ``file://`` URL, or an object ``{image | video | path: …, nframes,
    max_pixels}``. ``exists`` remembers which files were found.

    Raises:
        RowError: an entry is malformed or its file does not exist.
    """
    media: list[Media] = []
    kinds: tuple[Kind, ...] = ("image", "video")
    for kind in kinds:
        one, many = row.get(kind), row.get(f"{kind}s")
        if one is not None and many:
            raise RowError(f"{kind}s", f"expected either {kind} or {kind}s, got both")
        if one is not None:
            media.append(_medium(kind, kind, one, folder, exists))
        entries = [many] if isinstance(many, str | dict) else many or []
        if not isinstance(entries, list):
            raise RowError(f"{kind}s", f"expected a list, got {type(entries).__name__}")
        media += [_medium(kind, f"{kind}s[{i}]", entry, folder, exists) for i, entry in enumerate(entries)]
    return media


def _medium(kind: Kind, field: str, entry: Any, folder: Path, exists: dict[str, bool]) -> Media:
    settings = entry if isinstance(entry, dict) else {}
    if isinstance(entry, dict):
        entry = next((entry[name] for name in (kind, "path") if entry.get(name) is not None), None)
    if not isinstance(entry, str) or not entry:
        raise RowError(field, f"expected a path or an object with {kind}, got {'null' if entry is None else type(entry).__name__}")
    path = _local(field, entry, folder)
    if path not in exists:
        exists[path] = os.path.isfile(path)
    if not exists[path]:
        raise RowError(field, f"file {path!r:.200} does not exist")
    frames = _count(field, settings, "nframes") if settings.get("nframes") is not None else _count(field, settings, "frames")
    if kind == "image" and frames is not None:
        raise RowError(field, "nframes is for videos")
    return Media(kind, path, frames, _count(field, settings, "max_pixels"))


def _local(field: str, path: str, folder: Path) -> str:
    """Absolute path of a file on this machine."""
    if "://" in path:
        try:
            url = urlsplit(path)
        except ValueError as error:
            raise RowError(field, f"is no URL ({error})") from None
        if url.scheme != "file" or url.netloc not in ("", "localhost"):
            raise RowError(field, f"expected a path or a file:// URL, got {path!r:.200}")
        path = unquote(url.path)
    try:
        path.encode()
    except UnicodeEncodeError:
        raise RowError(field, "expected valid Unicode, got half of a surrogate pair") from None
    return os.path.normpath(folder / path)


def _count(field: str, settings: Mapping[str, Any], name: str) -> int | None:
    value = settings.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RowError(f"{field}.{name}", f"expected a whole number of at least 1, got {value!r:.80}")
    return value
