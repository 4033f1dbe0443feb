"""``headrace eval``: a checkpoint on a set of questions, resumable, with everything written down.

A folder of results holds ``settings.json`` (what the numbers depend on), ``rows.jsonl`` (a row per question, appended as it is
answered), ``evaluation.json`` (rates, intervals, breakdowns) and ``evaluation.html``.
"""

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.config import Config, ConfigError, RowsSource, VLLMEngineConfig
from headrace.drawing import drawing
from headrace.encoding import Encoder
from headrace.evaluation.job import Job
from headrace.evaluation.measure import answer, held_out_prompts
from headrace.files import whole_lines
from headrace.journal.store import make_folder, write_text
from headrace.questions.sets import QuestionSet, load
from headrace.records import Prompt
from headrace.rewards.pool import ScoringPool
from headrace.run_folder import lock
from headrace.starting_model import encoder_of

Row = dict[str, Any]
Progress = Callable[[int, int], None]
_SAMPLED_BYTES = 1 << 20  # of each end of a weight file, for its fingerprint


@dataclass(frozen=True)
class Results:
    job: Job
    rows: list[Row]
    """In the order of the data set."""
    left_out: list[str] = field(default_factory=list)
    """Why questions could not be put to the model."""


def run(job: Job, *, fresh: bool = False, progress: Progress = lambda *_: None) -> Results:
    """Answer the questions that have no row yet, and return all rows.

    Raises:
        ValueError: the folder has results of other settings, the questions or the model cannot be used, or the engine is down.
    """
    make_folder(job.folder)
    held = lock(job.folder / ".lock", wait=False)
    if held is None:
        raise ConfigError(f"{job.folder}: another process is evaluating there; wait for it, or give --out")
    with held:
        _claim(job, fresh)
        encoder = encoder_of(job.directory, job.config)
        source = job.config.questions.held_out
        assert source is not None
        questions = load(source, job.config.run.seed, "held_out")
        prompts, left_out = held_out_prompts(questions, encoder, job.config)
        done = _rows(job.folder / "rows.jsonl")
        missing = [prompt for prompt in prompts if prompt.question.id not in done]
        if missing:
            progress(len(done), len(prompts))
            asyncio.run(_answer(job, missing, questions, encoder, done, lambda: progress(len(done), len(prompts))))
        return Results(job, [done[prompt.question.id] for prompt in prompts], left_out)


def _claim(job: Job, fresh: bool) -> None:
    """Note what the numbers depend on, or check that it is as noted."""
    path = job.folder / "settings.json"
    settings = _settings(job)
    if fresh:
        (job.folder / "rows.jsonl").unlink(missing_ok=True)
    elif path.exists() and (job.folder / "rows.jsonl").exists():
        try:
            noted = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            raise ConfigError(f"{path}: is not readable; start over with --fresh") from None
        for name in sorted(settings.keys() | noted.keys()):
            if settings.get(name) != noted.get(name):
                raise ConfigError(
                    f"{job.folder}: the results there have another {name} ({noted.get(name)!r:.80}, now {settings.get(name)!r:.80}); "
                    "give --out, or start over with --fresh"
                )
    write_text(path, json.dumps(settings, indent=1, ensure_ascii=False) + "\n")


def _settings(job: Job) -> dict[str, Any]:
    """What a row depends on; how many questions are asked and what draws them do not count."""
    config = job.config.model_dump(mode="json")
    source = job.config.questions.held_out
    named: dict[str, Any] = {"model": str(job.directory.resolve()), "weights": fingerprint(job.directory)}
    if isinstance(source, RowsSource):
        named["rows"] = hashlib.sha256(source.path.read_bytes()).hexdigest() if source.path.is_file() else ""
    evaluation = {key: value for key, value in config["evaluation"].items() if key != "questions"}
    sampling = {key: config["sampling"][key] for key in ("max_tokens", "stop", "stop_ids", "think_prefill")}
    reward = {key: value for key, value in config["reward"].items() if key not in ("workers", "timeout", "on_failure")}
    machine = {"seed": config["run"]["seed"], "dtype": config["model"]["dtype"], "engine": config["engine"]["kind"]}
    return {**named, **machine, "questions": config["questions"], **evaluation, **sampling, **reward}


def fingerprint(directory: Path) -> str:
    """Tells weights apart: sizes and both ends of every file."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        digest.update(f"{path.name}:{path.stat().st_size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLED_BYTES))
            file.seek(max(0, path.stat().st_size - _SAMPLED_BYTES))
            digest.update(file.read(_SAMPLED_BYTES))
    return digest.hexdigest()


def _rows(path: Path) -> dict[str, Row]:
    """Rows by question; a torn last line of a killed evaluation is cut off."""
    try:
        rows = [json.loads(line) for line in whole_lines(path)]
        return {row["id"]: row for row in rows}
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path}: holds what no evaluation writes; start over with --fresh") from None


async def _answer(
    job: Job, prompts: Sequence[Prompt], questions: QuestionSet, encoder: Encoder, done: dict[str, Row], progress: Callable[[], None]
) -> None:
    """Answer ``prompts`` and append a row for each."""
    config = job.config
    chunk, workers = _pace(config)
    waiting: Iterator[Sequence[Prompt]] = (prompts[start : start + chunk] for start in range(0, len(prompts), chunk))
    async with drawing(config, job.directory, encoder) as engine:
        with (
            ScoringPool(config.reward, verify=getattr(questions, "verify", None)) as scorer,
            (job.folder / "rows.jsonl").open("a", encoding="utf-8") as file,
        ):

            async def work() -> None:
                for some in waiting:
                    for row in await answer(some, engine, scorer, encoder, config, texts=True):
                        file.write(json.dumps(row, ensure_ascii=False) + "\n")
                        done[row["id"]] = row
                    file.flush()
                    os.fsync(file.fileno())
                    progress()

            tasks = [asyncio.create_task(work()) for _ in range(workers)]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


def _pace(config: Config) -> tuple[int, int]:
    """Questions of one call of the engine, and calls at once: full batches in this process, many single questions on servers."""
    rows = config.evaluation.samples + 1
    if isinstance(config.engine, VLLMEngineConfig):
        return 1, max(1, 2 * config.engine.max_num_seqs * max(1, len(config.engine.urls) or config.engine.servers) // rows)
    return max(1, config.sampling.batch_rows // rows), 1
