"""``headrace questions hints``: fill a hint cache for query mining."""

from pathlib import Path
from typing import Annotated

import typer


def hints(
    source: Annotated[Path, typer.Argument(help="Rows (JSONL, Parquet), or a configuration whose questions.train is meant")],
    out: Annotated[Path, typer.Argument(help="Cache to write or to go on with, .jsonl")],
    url: Annotated[str | None, typer.Option(help="OpenAI-compatible server of the teacher, e.g. http://127.0.0.1:8000/v1")] = None,
    model: Annotated[str | None, typer.Option(help="Name under which it serves the teacher")] = None,
    key_variable: Annotated[str | None, typer.Option(help="Environment variable with the API key")] = None,
    parts: Annotated[str, typer.Option(help="What to ask for")] = "caption,visual,reasoning",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests on their way at once")] = 16,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first questions")] = None,
) -> None:
    """Let a teacher write captions and hints; without --url, a task generator scripts them itself. Goes on where it stopped."""
    from headrace.hint_filling import fill, teacher

    server = None if url is None else teacher(url, model, key_variable, concurrency)
    filled = fill(source, out, server, parts.split(","), limit)
    counts = ", ".join(f"{name} {count:,}" for name, count in sorted(filled.counts.items())) or "nothing new"
    print(f"{filled.done:,} questions in {filled.path} ({counts})")
    if filled.cost.calls:
        cost = filled.cost
        print(f"{cost.calls:,} calls, {cost.prompt_tokens:,} prompt and {cost.completion_tokens:,} reply tokens")
