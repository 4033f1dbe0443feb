"""The source videos: files of folders and manifests, or those of the small world."""

import json
from collections.abc import Iterator
from pathlib import Path

from headrace.questions.hopchain.film import SUFFIXES
from headrace.questions.hopchain.records import Dropped, Video
from headrace.questions.hopchain.settings import CorpusConfig, FilesConfig, VideoFolder


class VideoList:
    """Videos with distinct ids, and why others are none."""

    def __init__(self) -> None:
        self.videos: list[Video] = []
        self.dropped: list[tuple[str, Dropped]] = []
        self._seen: dict[str, Path] = {}

    def add(self, video: Video) -> None:
        """Take a video, or count it under ``duplicate_id``."""
        if video.id in self._seen:
            self.dropped.append(
                (video.id, Dropped("duplicate_id", f"{video.path}: id {video.id!r} is already that of {self._seen[video.id]}"))
            )
            return
        self._seen[video.id] = video.path
        self.videos.append(video)


def list_videos(config: CorpusConfig) -> VideoList:
    """All source videos, in a fixed order.

    Raises:
        ValueError: a folder or manifest does not exist or cannot be read, or there is not one video.
    """
    found = VideoList()
    if isinstance(config.videos, FilesConfig):
        for folder in config.videos.folders:
            for video in _manifest(folder, found) if folder.path.suffix == ".jsonl" else _search(folder):
                found.add(video)
    else:
        from headrace.questions.hopchain.world.script import World

        world = World(config.videos, config.seed)
        made = config.folder.absolute() / "source"
        for number in range(config.videos.count):
            identity = world.video_id(number)
            found.add(Video(id=identity, path=made / f"{identity}.mp4", source="scripted"))
    if not found.videos:
        where = ", ".join(str(folder.path) for folder in config.videos.folders) if isinstance(config.videos, FilesConfig) else "the world"
        raise ValueError(f"videos: no video in {where}; expected files such as .mp4, .mkv or .webm")
    return found


def _search(folder: VideoFolder) -> Iterator[Video]:
    if not folder.path.is_dir():
        raise ValueError(f"videos.folders: {folder.path} is no folder and no .jsonl manifest")
    root = folder.path.absolute()
    for path in sorted(root.rglob("*")):
        if path.suffix.lower() in SUFFIXES and path.is_file():
            yield Video(id=path.relative_to(root).with_suffix("").as_posix(), path=path, source=folder.source or root.name)


def _manifest(folder: VideoFolder, found: VideoList) -> Iterator[Video]:
    """Videos of the lines; a line that is none is counted under ``manifest``."""
    try:
        lines = folder.path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{folder.path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    root = folder.path.absolute().parent
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            path = root / entry["path"]
            identity = str(entry.get("id") or Path(entry["path"]).with_suffix("").as_posix())
            yield Video(id=identity, path=path, source=str(entry.get("source") or folder.source or folder.path.stem))
        except (ValueError, TypeError, KeyError, AttributeError):
            found.dropped.append((f"{folder.path}:{number}", Dropped("manifest", 'expected {"path": …} with optional id and source')))
