"""The kernel bench on screen."""

from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table

from headrace.bench.record import Measured, Record


def show(record: Record, console: Console) -> None:
    """One table per operation, one for memory, one line for everything that was not measured."""
    console.print(f"device {record.device}, {record.threads} CPU threads; wall-clock, best and median of calls taken in turn")
    for operation, rows in record.cases():
        console.print(_operation_table(operation, rows))
        notes = {f"* {row.name}: {row.note}": None for row in rows if row.note}
        if notes:
            console.print("\n".join(notes) + "\n", markup=False, style="dim")
    if record.memory:
        console.print(_memory_table(record))
    for (operation, name, reason), same in groupby(record.missing, key=lambda each: (each.operation, each.name, each.reason)):
        console.print(f"not measured: {name}, {operation} {', '.join(each.size for each in same)}: {reason}", markup=False, style="dim")


def _operation_table(operation: str, rows: list[Measured]) -> Table:
    table = _table(operation)
    table.add_column("T x D x V", no_wrap=True)
    table.add_column("by", no_wrap=True)
    for heading in ("best ms", "median", "x floor", "goal", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for size, group in groupby(rows, key=lambda row: row.size):
        for number, row in enumerate(group):
            table.add_row("" if number else size, *_cells(row), style="bold" if row.kind == "ours" and row.goal else None)
        table.add_section()
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", pad_edge=False, padding=(0, 1, 0, 0), box=box.SIMPLE_HEAD)


def _cells(row: Measured) -> tuple[str, ...]:
    times = f"{1e3 * row.best_s:,.1f}", f"{1e3 * row.median_s:,.1f}"
    if row.kind == "floor":
        return f"{row.name}, {row.speed}", *times, "", "", ""
    goal = "" if row.goal is None else f"[{'green' if row.met else 'yellow'}]{row.goal:.2f}[/]"
    worst = f"{max(row.errors.values()):.0e}" if row.errors else ""
    return row.name + ("*" if row.note else ""), *times, f"{row.ratio:.2f}", goal, worst


def _memory_table(record: Record) -> Table:
    first = record.memory[0]
    table = _table(f"peak extra memory, MB; V = {first.vocabulary:,}")
    table.add_column("operation", no_wrap=True)
    table.add_column("by", no_wrap=True)
    tokens = sorted({entry.tokens for entry in record.memory})
    for count in tokens:
        table.add_column(f"T {count}", justify="right", no_wrap=True)
    logits = [f"{4e-6 * count * first.vocabulary:,.0f}" for count in tokens]
    table.add_row("one fp32 logits matrix", "", *logits, style="dim")
    table.add_section()
    for operation, entries in groupby(record.memory, key=lambda entry: entry.operation):
        kept = list(entries)
        for number, name in enumerate(dict.fromkeys(entry.name for entry in kept)):
            found = {entry.tokens: f"{entry.extra_bytes / 1e6:,.1f}" for entry in kept if entry.name == name}
            style = "bold" if any(entry.name == name and entry.kind == "ours" for entry in kept) else None
            table.add_row("" if number else operation, name, *(found.get(count, "") for count in tokens), style=style)
        table.add_section()
    return table
