"""Results of ``headrace eval`` as numbers with intervals, as JSON and as a page; two checkpoints also against each other."""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.evaluation.measure import pass_at, sizes, summary
from headrace.evaluation.run import Results, Row
from headrace.journal import page
from headrace.journal.intervals import Interval, bootstrap_mean, mean_interval
from headrace.journal.significance import Comparison, compare
from headrace.journal.store import write_text
from headrace.journal.tables import Cell, Line, Sheet, between, number

EXAMPLES = 12
ACCURACIES = ("mean_accuracy", "greedy_accuracy", "maj_accuracy")
Measure = Callable[[Row], float]
BREAKDOWNS: dict[str, Callable[[Row], list[str]]] = {
    "hops": lambda row: [] if row["hops"] is None else [str(row["hops"])],
    "types": lambda row: list(row["types"]),
    "source": lambda row: [row["source"]],
}


def measures(rows: Sequence[Row]) -> dict[str, tuple[str, Measure]]:
    """What is measured per question: key, title and value. A question is one cluster: its samples enter as their mean."""
    samples = min(len(row["samples"]) for row in rows)
    shares: dict[str, tuple[str, Measure]] = {
        "mean_accuracy": (f"mean@{samples}", lambda row: sum(row["samples"]) / len(row["samples"])),
        "greedy_accuracy": ("greedy", lambda row: float(row["greedy"])),
        "maj_accuracy": (f"maj@{samples}", lambda row: float(row["maj"])),
    }
    for k in sizes(samples):
        shares[f"pass@{k}"] = (f"pass@{k}", _passing(k))
    shares["format_rate"] = ("required format", lambda row: row["format"])
    shares["clipped_share"] = ("cut at the limit", lambda row: row["clipped"])
    shares["length_mean"] = ("length, tokens", lambda row: row["length"])
    return shares


def _passing(k: int) -> Measure:
    return lambda row: pass_at(sum(row["samples"]), len(row["samples"]), k)


def interval(values: Sequence[float], key: str) -> Interval:
    """95 % interval over questions of a mean."""
    return bootstrap_mean(values) if key == "length_mean" else mean_interval(values)


def comparisons(first: Results, second: Results) -> dict[str, Comparison]:
    """Second minus first, paired over the questions that both answered."""
    pairs = _paired(first, second)
    rows = [row for pair in pairs for row in pair]
    return {key: compare(*zip(*((read(a), read(b)) for a, b in pairs), strict=True)) for key, (_, read) in measures(rows).items()}


def _paired(first: Results, second: Results) -> list[tuple[Row, Row]]:
    others = {row["id"]: row for row in second.rows}
    pairs = [(row, others[row["id"]]) for row in first.rows if row["id"] in others]
    if not pairs:
        raise ValueError(f"{first.job.folder} and {second.job.folder}: have no question in common")
    return pairs


def write(results: Results, against: Results | None = None) -> tuple[Path, Path]:
    """Write ``evaluation.json`` and ``evaluation.html`` of ``results``; with ``against``, the checkpoint it is compared with."""
    folder = results.job.folder
    tests = {} if against is None else comparisons(against, results)
    content = json.dumps(to_json(results, against, tests), indent=1, ensure_ascii=False)
    write_text(folder / "evaluation.json", content + "\n")
    return folder / "evaluation.json", page.write(_page(results, against, tests), folder / "evaluation.html")


def to_json(results: Results, against: Results | None, tests: dict[str, Comparison]) -> dict[str, Any]:
    rows, job = results.rows, results.job
    found = {
        "checkpoint": job.name,
        "model": str(job.directory),
        "dataset": job.dataset,
        **summary(rows),
        "intervals": {key: interval([read(row) for row in rows], key) for key, (_, read) in measures(rows).items()},
        **{f"by_{name}": {part: summary(some) for part, some in _parts(rows, name).items()} for name in BREAKDOWNS},
        "left_out": results.left_out,
    }
    if against is not None:
        found |= {"against": against.job.name, "difference": {key: asdict(test) for key, test in tests.items()}}
    return found


def _parts(rows: Sequence[Row], name: str) -> dict[str, list[Row]]:
    """Rows by hop count, hop type or source; a question counts under each of its hop types."""
    parts: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        for part in BREAKDOWNS[name](row):
            parts[part].append(row)
    return {part: parts[part] for part in sorted(parts, key=lambda part: (len(part), part) if name == "hops" else (0, part))}


# ------------------------------------------------------------------------------------------------------------ the page


def _page(results: Results, against: Results | None, tests: dict[str, Comparison]) -> page.Page:
    job, rows = results.job, results.rows
    shown = measures(rows)
    both = [results] if against is None else [against, results]
    tiles = [_tile(shown[key], rows, tests.get(key), key) for key in ACCURACIES]
    config = job.config
    sampled = f"{config.evaluation.samples} at temperature {config.evaluation.temperature:g}, top-p {config.evaluation.top_p:g}"
    facts = [
        ("model", str(job.directory)),
        ("questions", f"{len(rows):,} of {job.dataset}"),
        ("samples", f"{sampled}, top-k {config.evaluation.top_k}; one greedy response besides"),
        ("responses", f"at most {config.sampling.max_tokens:,} tokens" + _context(config.evaluation.context)),
        ("contract", f"{config.reward.contract}, {config.reward.mode}, verified by {config.reward.verifier}"),
        ("engine", config.engine.kind),
    ]
    sections = [page.Section("Results", verdicts=_verdicts(tests, job.name), sheets=[_overall(both, tests)])]
    for name, title in (("hops", "By hop count"), ("types", "By hop type"), ("source", "By source")):
        if len(_parts(rows, name)) > 1:
            sections.append(page.Section(title, sheets=[_breakdown(both, name)]))
    sections.append(page.Section("Questions to read", lead="Hardest first: those with the fewest right samples.", examples=_examples(rows)))
    warnings = [f"{len(results.left_out)} questions could not be put to the model, such as: {text}" for text in results.left_out[:1]]
    return page.Page(f"{job.name} on {job.dataset}", "evaluation", tiles, facts, sections, warnings)


def _context(context: int | None) -> str:
    return "" if context is None else f", and {context:,} together with the prompt"


def _tile(measure: tuple[str, Measure], rows: Sequence[Row], test: Comparison | None, key: str) -> page.Tile:
    title, read = measure
    values = [read(row) for row in rows]
    detail = between(interval(values, key)) if test is None else f"{number(test.difference, '+.3f')} ({between(test.interval, '+.2f')})"
    return page.Tile(title, number(sum(values) / len(values)), detail)


def _verdicts(tests: dict[str, Comparison], name: str) -> list[str]:
    """The comparison of mean accuracy in one sentence."""
    test = tests.get("mean_accuracy")
    if test is None:
        return []
    better = "better" if test.difference > 0 else "worse"
    told = f"{name} is {better}" if test.p_value < 0.05 else "the questions cannot tell the two apart"
    return [
        f"Mean accuracy differs by {number(test.difference, '+.3f')} ({between(test.interval, '+.3f')}, p = {number(test.p_value)}, "
        f"{test.test}) on {test.questions:,} paired questions: {told}."
    ]


def _overall(both: Sequence[Results], tests: dict[str, Comparison]) -> Sheet:
    lines = []
    for key, (title, read) in measures(both[-1].rows).items():
        form, bounds = (".1f", ".0f") if key == "length_mean" else (".3f", ".2f")
        columns = [[read(row) for row in each.rows] for each in both]
        cells = [Cell(number(sum(values) / len(values), form), between(interval(values, key), bounds)) for values in columns]
        if key in tests:
            test = tests[key]
            cells.append(Cell(number(test.difference, "+" + form), f"{between(test.interval, '+' + bounds)}, p = {number(test.p_value)}"))
        lines.append(Line(title, cells))
    note = "Small type is a 95 % interval over questions, whose samples count as one cluster; differences are paired by question."
    return Sheet("Rates over questions", [each.job.name for each in both] + (["difference"] if tests else []), lines, note)


def _breakdown(both: Sequence[Results], name: str) -> Sheet:
    titles = {key: title for key, (title, _) in measures(both[-1].rows).items() if key in ACCURACIES}
    parts = [_parts(each.rows, name) for each in both]
    lines = []
    for part in parts[-1]:
        cells = [Cell(str(len(parts[-1][part])))]
        for found in parts:
            some = found.get(part, [])
            reads = measures(some) if some else {}
            for key in titles:
                values = [reads[key][1](row) for row in some] if some else []
                cells.append(Cell(number(sum(values) / len(values)), between(interval(values, key))) if values else Cell(number(None)))
        lines.append(Line(part, cells))
    spans = [("", 1), *((each.job.name, len(titles)) for each in both)] if len(both) > 1 else []
    note = "A question counts under each of its hop types." if name == "types" else ""
    return Sheet("Accuracy", ["questions", *(title for _ in both for title in titles.values())], lines, note, spans)


def _examples(rows: Sequence[Row]) -> list[page.Example]:
    hardest = sorted(rows, key=lambda row: (sum(row["samples"]), row["id"]))[:EXAMPLES]
    return [
        page.Example(
            row["id"],
            [f"{sum(row['samples'])} of {len(row['samples'])} right", "greedy right" if row["greedy"] else "greedy wrong"],
            [("greedy response", row["responses"][0]), ("a sampled response", row["responses"][1])],
        )
        for row in hardest
        if len(row.get("responses", ())) > 1
    ]


def lines(results: Results, against: Results | None = None) -> list[str]:
    """The main rates for a terminal."""
    tests = {} if against is None else comparisons(against, results)
    told = []
    for key, (title, read) in measures(results.rows).items():
        values = [read(row) for row in results.rows]
        low, high = interval(values, key)
        line = f"{title:18} {sum(values) / len(values):8.3f}  [{low:.3f}, {high:.3f}]"
        if key in tests:
            test = tests[key]
            line += f"  {test.difference:+.3f} [{test.interval[0]:+.3f}, {test.interval[1]:+.3f}] p = {test.p_value:.3f}"
        told.append(line)
    return told
