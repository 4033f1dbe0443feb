"""Takes evaluation questions out of a training file and writes down what went and why."""

import json
from collections.abc import Sequence
from pathlib import Path

from headrace.config import ConfigError
from headrace.journal import page
from headrace.journal.examples import thumbnail
from headrace.journal.store import make_folder, write_text
from headrace.journal.tables import Cell, Line, Sheet, number
from headrace.questions.decontaminate import DISTANCES, Findings, Match, Progress, decontaminate, question_text
from headrace.questions.rows import RowSet, copy_rows, load_rows
from headrace.records import Question

EXAMPLES = 40
"""Matches shown on the page, and near misses."""


def clean(
    train: Path,
    evaluations: Sequence[Path],
    out: Path,
    *,
    threshold: float = 0.8,
    distance: int = 4,
    progress: Progress = lambda *_: None,
) -> Findings:
    """Write the rows of ``train`` that no evaluation repeats to ``out``, and beside it a report as JSON and HTML.

    Rows that cannot be used are left out as in training; the report counts them.

    Raises:
        ValueError: a file cannot be read, or ``out`` would overwrite a source or break the paths of media.
    """
    rows = load_rows(train, require_answer=False)
    sets = [load_rows(path, require_answer=False) for path in evaluations]
    if out.resolve() in {train.resolve(), *(path.resolve() for path in evaluations)}:
        raise ConfigError(f"{out}: is one of the files compared; write to another")
    if any(question.media for question in rows.questions) and out.resolve().parent != train.resolve().parent:
        raise ConfigError(f"{out}: rows name their media relative to their file; write the clean rows beside {train}")
    if (train.suffix == ".parquet") != (out.suffix == ".parquet"):
        raise ConfigError(f"{out}: expected the format of {train}, Parquet or JSON lines")
    asked = [question for each in sets for question in each.questions]
    findings = decontaminate(rows.questions, asked, threshold=threshold, distance=distance, progress=progress)
    make_folder(out.parent)
    removed = findings.removed
    copy_rows(train, [row for position, row in enumerate(rows.numbers) if position not in removed], out)
    summary = _summary(rows, sets, findings, threshold, distance)
    write_text(out.with_name(f"{out.stem}.decontamination.json"), json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    page.write(_page(rows, asked, sets, findings, threshold, distance), out.with_name(f"{out.stem}.decontamination.html"))
    return findings


def _summary(rows: RowSet, sets: Sequence[RowSet], findings: Findings, threshold: float, distance: int) -> dict[str, object]:
    asked = [question for each in sets for question in each.questions]
    return {
        "train": str(rows.path),
        "evaluations": [str(each.path) for each in sets],
        "threshold": threshold,
        "distance": distance,
        "questions": len(rows),
        "unusable_rows": dict(rows.skipped),
        "removed": len(findings.removed),
        "removed_by": dict(findings.counts()),
        "pictures_within": {str(bound): count for bound, count in findings.pictures_within.items()},
        "unreadable": findings.unreadable,
        "matches": [
            {"id": rows.questions[match.train].id, "repeats": asked[match.evaluation].id, "kind": match.kind, "score": match.score}
            for match in findings.matches
        ],
    }


def _page(
    rows: RowSet, asked: Sequence[Question], sets: Sequence[RowSet], findings: Findings, threshold: float, distance: int
) -> page.Page:
    removed, counts = len(findings.removed), findings.counts()
    kinds = {
        "text": f"text: Jaccard above {threshold:g}",
        "image": f"picture: at most {distance} of 64 bits apart",
        "clip": "clip: the same file",
    }
    lines = [Line(label, [Cell(str(counts[kind]))]) for kind, label in kinds.items()]
    if findings.pictures_within:
        lines.append(Line("Questions with a picture within a distance of"))
        lines += [Line(f"{bound} bits", [Cell(str(findings.pictures_within[bound]))]) for bound in DISTANCES]
    note = "A question may count under several kinds. Texts are compared as character 5-shingles of letters and digits."
    by_text = sorted((match for match in findings.matches if match.kind == "text"), key=lambda match: -match.score)
    by_media = [match for match in findings.matches if match.kind != "text"]
    return page.Page(
        title=rows.path.name,
        kind="decontamination",
        tiles=[
            page.Tile("removed", f"{removed:,} of {len(rows):,}", f"{removed / len(rows):.2%}"),
            page.Tile("kept", f"{len(rows) - removed:,}"),
            page.Tile("evaluation questions", f"{len(asked):,}", ", ".join(each.path.name for each in sets)),
        ],
        warnings=[f"{len(findings.unreadable)} media files cannot be read; the first: {findings.unreadable[0]}"]
        if findings.unreadable
        else [],
        sections=[
            page.Section("What was found", sheets=[Sheet("Training questions removed", ["questions"], lines, note)]),
            *(
                page.Section(title, lead=lead, examples=[_example(match, rows.questions, asked) for match in matches[:EXAMPLES]])
                for title, lead, matches in (
                    ("Texts removed", "Most alike first.", by_text),
                    ("Pictures and clips removed", "In the order of the training file.", by_media),
                    ("Texts kept", "Candidates at or below the threshold, most alike first: is it where it should be?", findings.near),
                )
                if matches
            ),
        ],
    )


def _example(match: Match, train: Sequence[Question], asked: Sequence[Question]) -> page.Example:
    mine, theirs = train[match.train], asked[match.evaluation]
    score = {"text": f"Jaccard {number(match.score)}", "image": f"{match.score:.0f} bits apart", "clip": "the same file"}[match.kind]
    texts = [("training question", question_text(mine).strip()), ("evaluation question", question_text(theirs).strip())]
    pictures = [] if match.kind == "text" else [(item.path, thumbnail(Path(item.path))) for each in (mine, theirs) for item in each.media]
    return page.Example(f"{mine.id} and {theirs.id}", [score], texts, pictures)
