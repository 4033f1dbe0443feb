"""Finds training questions that an evaluation asks, too: MinHash LSH and exact Jaccard for texts, pHash for pictures.

Candidates come from 25 bands of 5 rows, which let a pair of Jaccard 0.8 slip with probability 5e-5; every candidate is then
compared exactly. Pictures are duplicates within a Hamming distance of 64-bit perceptual hashes; clips only as equal files.
"""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from headrace.records import Array, Question

BANDS, BAND_ROWS, PERMUTATIONS, MINHASH_SEED = 25, 5, 128, 1
SHINGLE = 5
"""Characters of a shingle."""
DISTANCES = (0, 4, 8)
"""Hamming distances whose picture hits are reported beside the chosen one."""
Progress = Callable[[str, int, int], None]
"""Told what is compared, how many training questions are done, and of how many."""
_PLACEHOLDER = re.compile(r"<(?:image|video)>")
_BITS = np.array([bin(byte).count("1") for byte in range(256)], dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class Match:
    """A training question and the evaluation question that it repeats."""

    train: int
    """Position of the training question."""
    evaluation: int
    kind: Literal["text", "image", "clip"]
    score: float
    """Jaccard similarity of the texts, Hamming distance of the pictures, 0 for equal files."""


@dataclass(slots=True)
class Findings:
    """What was compared and what was found."""

    matches: list[Match] = field(default_factory=list)
    """The closest of every kind for every training question that goes."""
    near: list[Match] = field(default_factory=list)
    """Candidate texts at or below the threshold, closest first: what was kept."""
    pictures_within: dict[int, int] = field(default_factory=dict)
    """Training questions with a picture within each of ``DISTANCES``."""
    unreadable: list[str] = field(default_factory=list)
    """Media that could not be compared."""

    @property
    def removed(self) -> set[int]:
        """Positions of the training questions to leave out: text or picture hits."""
        return {match.train for match in self.matches}

    def counts(self) -> Counter[str]:
        return Counter(match.kind for match in self.matches)


def normalised(text: str) -> str:
    """Lower case, every run of characters other than [a-z0-9] one space."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def shingles(text: str) -> frozenset[str]:
    """Character shingles of the normalised text; a shorter text is its own single one."""
    plain = normalised(text)
    return frozenset(plain[start : start + SHINGLE] for start in range(max(1, len(plain) - SHINGLE + 1))) if plain else frozenset()


def jaccard(one: frozenset[str], other: frozenset[str]) -> float:
    union = len(one | other)
    return len(one & other) / union if union else 0.0


def question_text(question: Question) -> str:
    """What the user asks, without media placeholders."""
    return "\n".join(_PLACEHOLDER.sub(" ", message["content"]) for message in question.messages if message["role"] == "user")


def decontaminate(
    train: Sequence[Question],
    evaluation: Sequence[Question],
    *,
    threshold: float = 0.8,
    distance: int = 4,
    progress: Progress = lambda *_: None,
) -> Findings:
    """Compare every training question with every evaluation question.

    Args:
        threshold: texts with a Jaccard similarity strictly above it are duplicates.
        distance: pictures within this Hamming distance of 64 bits are duplicates.

    Raises:
        ValueError: a bound is out of range, or an extra package is missing.
    """
    if not 0 <= threshold <= 1 or not 0 <= distance <= 64:
        raise ValueError(f"decontaminate: expected 0 <= threshold <= 1 and 0 <= distance <= 64, got {threshold} and {distance}")
    findings = Findings()
    _compare_texts(train, evaluation, threshold, findings, progress)
    _compare_pictures(train, evaluation, distance, findings, progress)
    _compare_clips(train, evaluation, findings)
    return findings


# ------------------------------------------------------------------------------------------------------------ texts


def _compare_texts(
    train: Sequence[Question],
    evaluation: Sequence[Question],
    threshold: float,
    findings: Findings,
    progress: Progress,
) -> None:
    lsh_class, minhash_class = _datasketch()
    index = lsh_class(num_perm=PERMUTATIONS, params=(BANDS, BAND_ROWS))
    known = [shingles(question_text(question)) for question in evaluation]
    for number, parts in enumerate(known):
        if parts:
            index.insert(number, _sketch(minhash_class, parts))
    for position, question in enumerate(train):
        progress("texts", position + 1, len(train))
        parts = shingles(question_text(question))
        candidates = index.query(_sketch(minhash_class, parts)) if parts else []
        scored = sorted(((jaccard(parts, known[number]), -number) for number in candidates), reverse=True)
        if scored:
            score, number = scored[0][0], -scored[0][1]
            (findings.matches if score > threshold else findings.near).append(Match(position, number, "text", score))
    findings.near.sort(key=lambda match: (-match.score, match.train))


def _sketch(minhash_class: type, parts: Iterable[str]) -> object:
    sketch = minhash_class(num_perm=PERMUTATIONS, seed=MINHASH_SEED)
    sketch.update_batch([part.encode() for part in sorted(parts)])
    return sketch


def _datasketch() -> tuple[type, type]:
    try:
        from datasketch import MinHash, MinHashLSH
    except ImportError as error:
        raise ValueError(f"decontaminate needs datasketch; install headrace[decontaminate] ({error})") from None
    return MinHashLSH, MinHash


# ------------------------------------------------------------------------------------------------------------ pictures


def picture_hash(path: str) -> int:
    """64-bit perceptual hash: grey, 32 x 32, low 8 x 8 of the cosine transform against their median.

    Raises:
        ValueError: the extra package is missing.
        OSError: no picture can be read there.
    """
    from PIL import Image

    try:
        import imagehash
    except ImportError as error:
        raise ValueError(f"decontaminate needs imagehash; install headrace[decontaminate] ({error})") from None
    with Image.open(path) as picture:
        return int(str(imagehash.phash(picture.convert("RGB"), hash_size=8, highfreq_factor=4)), 16)


def _compare_pictures(
    train: Sequence[Question], evaluation: Sequence[Question], distance: int, findings: Findings, progress: Progress
) -> None:
    cache: dict[str, int | None] = {}
    owners: list[int] = []
    hashes: list[int] = []
    for number, question in enumerate(evaluation):
        for value in _hashes(question, cache, findings):
            owners.append(number)
            hashes.append(value)
    if not hashes:
        return
    known = np.array(hashes, dtype=np.uint64)
    closest: list[int] = []
    for position, question in enumerate(train):
        progress("pictures", position + 1, len(train))
        found = [(int(gaps.min()), owners[int(gaps.argmin())]) for gaps in (_hamming(known, v) for v in _hashes(question, cache, findings))]
        if found:
            gap, number = min(found)
            closest.append(gap)
            if gap <= distance:
                findings.matches.append(Match(position, number, "image", float(gap)))
    findings.pictures_within = {bound: sum(gap <= bound for gap in closest) for bound in DISTANCES}


def _hashes(question: Question, cache: dict[str, int | None], findings: Findings) -> list[int]:
    """Hashes of the question's pictures that can be read; every file is read once."""
    found = []
    for item in question.media:
        if item.kind != "image":
            continue
        if item.path not in cache:
            try:
                cache[item.path] = picture_hash(item.path)
            except (OSError, SyntaxError):
                cache[item.path] = None
                findings.unreadable.append(item.path)
        value = cache[item.path]
        if value is not None:
            found.append(value)
    return found


def _hamming(known: Array, value: int) -> Array:
    """Bits [N] in which every known hash differs from ``value``."""
    return _BITS[(known ^ np.uint64(value)).view(np.uint8).reshape(len(known), 8)].sum(axis=1)


def _compare_clips(train: Sequence[Question], evaluation: Sequence[Question], findings: Findings) -> None:
    """Equal files; content is read only where the sizes agree."""
    by_size: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for number, question in enumerate(evaluation):
        for item in question.media:
            if item.kind == "video" and (size := _size(item.path, findings)) is not None:
                by_size[size].append((item.path, number))
    digests: dict[str, str] = {}
    for position, question in enumerate(train):
        for item in question.media:
            size = _size(item.path, findings) if item.kind == "video" and by_size else None
            twins = [number for path, number in by_size.get(size or -1, ()) if _digest(path, digests) == _digest(item.path, digests)]
            if twins:
                findings.matches.append(Match(position, twins[0], "clip", 0.0))
                break


def _size(path: str, findings: Findings) -> int | None:
    try:
        return Path(path).stat().st_size
    except OSError:
        findings.unreadable.append(path)
        return None


def _digest(path: str, digests: dict[str, str]) -> str:
    if path not in digests:
        with open(path, "rb") as file:
            digests[path] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests[path]
