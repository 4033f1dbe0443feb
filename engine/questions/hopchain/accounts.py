"""What became of every video and question, what it cost, and Table 6 of the corpus."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from headrace.questions.hopchain.records import HOP_TYPES, Cost


@dataclass
class Account:
    """One stage: what came in ends kept or dropped for a reason, nothing is lost."""

    stage: str
    unit: str
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    cost: Cost = field(default_factory=Cost)
    examples: dict[str, str] = field(default_factory=dict)
    """The first detail of every reason."""

    @property
    def entered(self) -> int:
        return self.kept + self.dropped.total()

    @property
    def acceptance(self) -> float:
        """Share kept; nan where nothing came in."""
        return self.kept / self.entered if self.entered else float("nan")

    def count(self, reason: str, detail: str = "") -> None:
        """Count one thing; no reason means that it is kept."""
        if not reason:
            self.kept += 1
            return
        self.dropped[reason] += 1
        if detail:
            self.examples.setdefault(reason, detail)

    def as_json(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "unit": self.unit,
            "entered": self.entered,
            "kept": self.kept,
            "dropped": dict(self.dropped.most_common()),
            "cost": self.cost.model_dump(),
            "examples": self.examples,
        }


def table6(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The statistics of paper 000's Table 6 over rows of one split."""
    extra = [row["extra_info"] for row in rows]
    hops = Counter(info["hops"] for info in extra)
    types = Counter(kind for info in extra for kind in info["hop_types"])
    assert sum(count * n for count, n in hops.items()) == types.total()
    answers = sorted(int(info["answer"]) for info in extra)
    videos = len({info["video_id"] for info in extra})
    return {
        "questions": len(rows),
        "videos": videos,
        "per_video": len(rows) / videos if videos else 0.0,
        "hops": dict(sorted(hops.items())),
        "types": {kind: types[kind] for kind in HOP_TYPES},
        "links": dict(sorted(Counter(info["link"] for info in extra).items())),
        "answer_min": answers[0] if answers else None,
        "answer_max": answers[-1] if answers else None,
        "answer_median": median(answers) if answers else None,
    }


def table_text(splits: Mapping[str, Mapping[str, Any]]) -> str:
    """Table 6 as text, a column per split."""
    names = [name for name, table in splits.items() if table["questions"]]
    counts = sorted({count for name in names for count in splits[name]["hops"]})
    lines = [
        ("questions", [f"{splits[n]['questions']:,}" for n in names]),
        ("videos", [f"{splits[n]['videos']:,}" for n in names]),
        ("questions per video", [f"{splits[n]['per_video']:.2f}" for n in names]),
        (f"questions with {' / '.join(map(str, counts))} hops", [_slashed(splits[n]["hops"], counts) for n in names]),
        (f"hops by type: {' / '.join(HOP_TYPES)}", [_slashed(splits[n]["types"], HOP_TYPES) for n in names]),
        ("questions flat / selector / chain", [_slashed(splits[n]["links"], ("flat", "selector", "chain")) for n in names]),
        ("answer, smallest to largest", [f"{splits[n]['answer_min']} to {splits[n]['answer_max']}" for n in names]),
        ("answer, median", [f"{splits[n]['answer_median']:g}" for n in names]),
    ]
    return _columns([("", names), *lines])


def accounts_text(accounts: Sequence[Account]) -> str:
    """Acceptance, reasons and cost by stage."""
    lines: list[tuple[str, list[str]]] = [("stage", ["entered", "kept", "share", "calls", "tokens in / out", "dropped for"])]
    for account in accounts:
        cost = account.cost
        share = f"{account.acceptance:.1%}" if account.entered else "-"
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in account.dropped.most_common()) or "-"
        tokens = f"{cost.prompt_tokens:,} / {cost.completion_tokens:,}"
        entered = f"{account.entered:,} {account.unit}"
        lines.append((account.stage, [entered, f"{account.kept:,}", share, f"{cost.calls:,}", tokens, reasons]))
    return _columns(lines)


def _slashed(counts: Mapping[Any, int], names: Sequence[Any]) -> str:
    return " / ".join(f"{counts.get(name, 0):,}" for name in names)


def _columns(lines: Sequence[tuple[str, Sequence[str]]]) -> str:
    table = [[name, *cells] for name, cells in lines]
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table)
