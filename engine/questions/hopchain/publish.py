"""The files of a corpus: rows as Parquet, hop records and captions beside them, metadata, each file whole or not at all."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.files import write_whole
from headrace.questions.hopchain.accounts import table6
from headrace.questions.hopchain.dataset import Assembly, row
from headrace.questions.hopchain.pipeline import Tally
from headrace.questions.hopchain.prompt_texts import versions
from headrace.questions.hopchain.settings import CorpusConfig

FORMAT = 1
"""Of the files of a corpus."""


def publish(config: CorpusConfig, assembly: Assembly, counted: Tally) -> dict[str, Any]:
    """Write the data set and return its metadata.

    ``train.parquet``, ``held_out.parquet`` (where there is one), ``hops.jsonl``, ``captions.jsonl``, ``corpus.json``.
    """
    folder = config.folder
    rows = {split: [row(question, config) for question in questions] for split, questions in assembly.splits.items()}
    tables = {split: table6(rows[split]) for split in rows}
    about = {
        "format": FORMAT,
        "config": config.model_dump(mode="json"),
        "prompts": versions(),
        "table6": tables,
        "accounts": [account.as_json() for account in counted.accounts.values()],
        "judge": {"judgements": counted.judgements, "rewrites": counted.rewrites, "passed_at_once": counted.passed_at_once},
        "cost": counted.cost.model_dump(),
        "held_out": {"wanted": assembly.wanted, "drawn": len(rows["held_out"]), "deviation": assembly.deviation},
    }
    hops = [
        {
            "question_id": question.id,
            "split": split,
            "video_id": question.video.id,
            "video": str(question.video.path),
            "proxy": str(question.proxy),
            "source": question.video.source,
            **question.candidate.model_dump(mode="json"),
        }
        for split, questions in assembly.splits.items()
        for question in questions
    ]
    captions = [
        {"video_id": identity, "captions": [caption.model_dump() for caption in counted.captions[identity]]}
        for identity in sorted({hop["video_id"] for hop in hops})
    ]
    write_whole(folder / "hops.jsonl", _lines(hops))
    write_whole(folder / "captions.jsonl", _lines(captions))
    for split, made in rows.items():
        if made:
            write_rows(folder / f"{split}.parquet", made, about)
        else:
            (folder / f"{split}.parquet").unlink(missing_ok=True)
    write_whole(folder / "corpus.json", json.dumps(about, indent=1, ensure_ascii=False) + "\n")
    return about


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> None:
    """One Parquet file with structured columns; prompts, versions and configuration are in its metadata."""
    import pyarrow
    import pyarrow.parquet

    text, whole = pyarrow.string(), pyarrow.int64()
    schema = pyarrow.schema(
        {
            "prompt": pyarrow.list_(pyarrow.struct({"role": text, "content": text})),
            "images": pyarrow.list_(text),
            "videos": pyarrow.list_(pyarrow.struct({"video": text, "nframes": whole, "max_pixels": whole})),
            "data_source": text,
            "ability": text,
            "reward_model": pyarrow.struct({"ground_truth": text, "style": text}),
            "extra_info": pyarrow.struct(
                {
                    "reward_type": text,
                    "answer": text,
                    "hops": whole,
                    "hop_types": pyarrow.list_(text),
                    "question_id": text,
                    "video_id": text,
                    "link": text,
                    "tolerance": pyarrow.float64(),
                }
            ),
        },
        metadata={"headrace.hopchain": json.dumps({name: about[name] for name in ("format", "config", "prompts")})},
    )
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows), schema=schema), sink)
    write_whole(path, sink.getvalue().to_pybytes())


def _lines(entries: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
