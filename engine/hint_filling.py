"""Fills a hint cache for a file of rows or for the training questions of a configuration."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console
from rich.progress import Progress

from headrace.config import ConfigError, RowsSource, load_config
from headrace.questions.hints import PARTS, Scripted
from headrace.questions.hopchain.chat import Chat
from headrace.questions.hopchain.settings import ServerConfig
from headrace.questions.sets import QuestionSet, load
from headrace.questions.teacher import Filled, ask, script


def teacher(url: str, model: str | None, key_variable: str | None, concurrency: int) -> ServerConfig:
    """The teacher's server.

    Raises:
        ConfigError: no model, or no URL.
    """
    if not model:
        raise ConfigError("--model: expected the name under which the server at --url serves the teacher")
    try:
        return ServerConfig(url=url, model=model, key_variable=key_variable, concurrency=concurrency)
    except ValidationError as error:
        raise ConfigError(f"--url {url!r:.80}: {error.errors()[0]['msg']}") from None


def fill(source: Path, out: Path, server: ServerConfig | None, parts: Sequence[str] = PARTS, limit: int | None = None) -> Filled:
    """Ask the teacher, or, without one, let the task generator script its hints.

    Raises:
        ValueError: no such parts, questions that nobody can hint at, or the teacher is down.
    """
    unknown = [part for part in parts if part not in PARTS]
    if unknown or not parts:
        raise ConfigError(f"--parts: expected some of {', '.join(PARTS)}, got {', '.join(unknown) or 'none'}")
    questions = _questions(source)
    count = len(questions) if limit is None else min(limit, len(questions))
    if server is not None:
        return asyncio.run(_ask(questions, count, out, server, parts))
    if not isinstance(questions, Scripted):
        raise ConfigError(f"{source}: nobody scripts hints for these questions; name a teacher with --url and --model")
    return script(count, questions.question, questions.hint, out)


async def _ask(questions: QuestionSet, count: int, out: Path, server: ServerConfig, parts: Sequence[str]) -> Filled:
    chat = Chat(server)
    try:
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(f"hints by {server.model}", total=count)
            chosen = [questions.question(index) for index in range(count)]
            return await ask(chosen, out, chat, parts, lambda done, total: bar.update(task, completed=done, total=total))
    finally:
        await chat.close()


def _questions(source: Path) -> QuestionSet:
    if source.suffix in (".yaml", ".yml"):
        config = load_config(source)
        if config.questions.train is None:
            raise ConfigError(f"{source}: questions.train is empty")
        return load(config.questions.train, config.run.seed, "train", require_answer=False)
    return load(RowsSource(kind="rows", path=source), 0, "train", require_answer=False)
