"""Small corpora for the tests."""

import json
from pathlib import Path
from typing import Any

from headrace.config import load_model
from headrace.generation import Corpus, build
from headrace.questions.hopchain.settings import CorpusConfig

WORLD = """
videos: {kind: scripted, count: 8, shots: 8, shot_seconds: [2.0, 2.5], faults: 0.5, bad_captions: 0.05, judge_slips: 0.1}
min_duration: 10
frames: 8
max_pixels: 4096
draw: {hops: {2: 1, 3: 1}, max_number: 9, per_video: 3}
held_out: {size: 2, min_hops: 2, hops: null, shots: null}
decoders: 2
at_once: 3
"""


def configured(folder: Path, text: str = WORLD, *overrides: str) -> CorpusConfig:
    """A configuration whose corpus lies in ``folder``."""
    path = folder.with_suffix(".yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"folder: {folder}\n{text}")
    return load_model(CorpusConfig, path, overrides)


def built(folder: Path, text: str = WORLD, *overrides: str, **arguments: Any) -> Corpus:
    return build(configured(folder, text, *overrides), **arguments)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def content(folder: Path) -> dict[str, Any]:
    """Everything of a corpus that must not depend on how it came about."""
    import pyarrow.parquet

    def placeless(value: Any) -> Any:
        return json.loads(json.dumps(value).replace(str(folder), "CORPUS"))

    about = json.loads((folder / "corpus.json").read_text())
    about["config"] = {name: value for name, value in about["config"].items() if name not in ("at_once", "decoders")}
    tables = {split: pyarrow.parquet.read_table(folder / f"{split}.parquet").to_pylist() for split in ("train", "held_out")}
    return placeless({"about": about, "hops": lines(folder / "hops.jsonl"), "captions": lines(folder / "captions.jsonl"), **tables})
