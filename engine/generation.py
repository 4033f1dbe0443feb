"""Builds a question corpus: connects the generator with the models, the base policy's engine and the scorer."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headrace.config import Config, ConfigError, DirectoryModel, ModelConfig, QuestionsConfig, RunConfig, SamplingConfig
from headrace.drawing import drawing
from headrace.files import write_whole
from headrace.questions.hopchain.accounts import accounts_text, table_text
from headrace.questions.hopchain.dataset import Kept, assemble, row
from headrace.questions.hopchain.difficulty import EngineSolver
from headrace.questions.hopchain.pipeline import configured_stages, tally, work, worst
from headrace.questions.hopchain.prompt_texts import versions
from headrace.questions.hopchain.publish import publish
from headrace.questions.hopchain.records import Candidate, Video
from headrace.questions.hopchain.roles import Models, Solver
from headrace.questions.hopchain.settings import CorpusConfig, DifficultyConfig, WorldConfig
from headrace.questions.hopchain.videos import VideoList, list_videos
from headrace.questions.hopchain.workshop import Workshop
from headrace.questions.rows import question_of_row
from headrace.records import Question
from headrace.rewards import extract, score
from headrace.run_folder import lock
from headrace.starting_model import encoder_of

Report = Callable[[str, str], None]
_STATE = "work"
_STARTED = "started.json"


@dataclass(frozen=True)
class Corpus:
    """What a build came to."""

    folder: Path
    about: dict[str, Any]
    """``corpus.json``."""
    summary: str
    """Stages and Table 6 as text."""


class Watcher(Protocol):
    """Is told how a build goes."""

    def total(self, videos: int) -> None:
        """How many videos there are."""

    def report(self, stage: str, fate: str) -> None:
        """A video left ``stage``: ``kept``, or dropped for a reason."""


def build(config: CorpusConfig, *, fresh: bool = False, watcher: Watcher | None = None, models: Models | None = None) -> Corpus:
    """Build a corpus, or go on where an earlier build of it stopped.

    Args:
        fresh: delete what an earlier build left.
        watcher: is told how it goes.
        models: in place of the configured ones.

    Raises:
        ValueError: the configuration, an earlier build in the same folder or the videos do not fit, a server is gone, or no
            question is left; one line.
    """
    with _claimed(config, fresh):
        videos = list_videos(config)
        if watcher is not None:
            watcher.total(len(videos.videos))
        report = watcher.report if watcher is not None else lambda stage, fate: None
        state = config.folder / _STATE
        with ThreadPoolExecutor(config.decoders, thread_name_prefix="decoder") as threads:
            shop = asyncio.run(_run(config, videos, state, threads, report, models))
        counted = tally(shop, videos, state)
        assembly = assemble(counted.kept, config, _accuracy)
        account = counted.accounts["assemble"]
        account.kept = sum(len(questions) for questions in assembly.splits.values())
        for drop in assembly.dropped.values():
            account.count(drop.reason, drop.detail)
        if not assembly.splits["train"]:
            raise ValueError(
                f"{config.folder}: no question for training is left of {len(videos.videos)} videos; "
                f"the commonest reasons: {worst(list(counted.accounts.values())) or 'none'}"
            )
        about = publish(config, assembly, counted)
        summary = f"{accounts_text(list(counted.accounts.values()))}\n\n{table_text(about['table6'])}"
        return Corpus(config.folder, about, summary)


async def _run(
    config: CorpusConfig, videos: VideoList, state: Path, threads: ThreadPoolExecutor, report: Report, models: Models | None
) -> Workshop:
    """Connect everything and take every video through its stages."""
    proxies = config.folder / "videos"
    proxies.mkdir(exist_ok=True)
    make: Callable[[Video], None] | None = None
    solver: Solver | None = None
    if isinstance(config.videos, WorldConfig):
        from headrace.questions.hopchain.world.films import Studio
        from headrace.questions.hopchain.world.models import ScriptedModels, ScriptedSolver
        from headrace.questions.hopchain.world.script import World

        world = World(config.videos, config.seed)
        make = Studio(world).make
        models = models or (ScriptedModels(world) if config.models is None else None)
        if config.difficulty is not None and config.difficulty.model is None:
            solver = ScriptedSolver(config.videos.solver_skill, config.seed)
    async with AsyncExitStack() as closing:
        if models is None:
            from headrace.questions.hopchain.served import ServedModels

            assert config.models is not None
            served = ServedModels(config.models, config.draw.rewrite_temperature)
            closing.push_async_callback(served.close)
            models = served
        if config.difficulty is not None and config.difficulty.model is not None:
            solver = await closing.enter_async_context(base_policy(config, config.difficulty, config.difficulty.model))
        shop = Workshop(
            config, models, solver, lambda candidate, proxy: _question(candidate, proxy, config), threads, proxies, report, make
        )
        await work(shop, videos, state)
        return shop


@asynccontextmanager
async def base_policy(config: CorpusConfig, rules: DifficultyConfig, directory: Path) -> AsyncIterator[EngineSolver]:
    """The policy of a model directory behind the configured engine.

    Raises:
        EngineDown: its server does not start.
        ValueError: the directory is no model.
    """
    if not (directory / "config.json").is_file():
        raise ConfigError(f"difficulty.model: {directory} is no model directory (it has no config.json)")
    settings = Config(
        run=RunConfig(name="base_policy", folder=config.folder / _STATE, seed=config.seed),
        model=ModelConfig(source=DirectoryModel(path=directory), dtype=rules.dtype),
        questions=QuestionsConfig(max_prompt_tokens=rules.max_prompt_tokens),
        sampling=SamplingConfig(max_tokens=rules.max_tokens, temperature=rules.temperature, batch_rows=max(rules.rollouts, 1)),
        engine=rules.engine,
    )
    encoder = encoder_of(directory, settings)
    async with drawing(settings, directory, encoder) as engine:
        yield EngineSolver(engine, encoder, answered_integer, temperature=rules.temperature, max_tokens=rules.max_tokens, seed=config.seed)


def answered_integer(response: str) -> int | None:
    """The integer that a response gives as its answer, None where it gives none."""
    answer = extract(response, "answer_boxed")
    text = (answer or "").strip().replace(",", "")
    return int(text) if text.lstrip("+-").isdecimal() and len(text) < 20 else None


def _accuracy(response: str, reference: str) -> float:
    return score(response, reference).accuracy


def _question(candidate: Candidate, proxy: Path, config: CorpusConfig) -> Question:
    """A candidate as the trainer would read it from the data set."""
    video = Video(id=candidate.specification.video_id, path=proxy, source="")
    return question_of_row(row(Kept(candidate, video, proxy, 0), config), config.folder)


@contextmanager
def _claimed(config: CorpusConfig, fresh: bool) -> Iterator[None]:
    """Have the folder to oneself, and make sure that what lies in it was begun under the same configuration and prompts."""
    folder = config.folder
    folder.mkdir(parents=True, exist_ok=True)
    started = folder / _STATE / _STARTED
    held = lock(folder / ".lock", wait=False)
    if held is None:
        raise ConfigError(f"{folder}: another process builds this corpus; wait for it or stop it")
    try:
        if fresh:
            _empty(folder, started)
        (folder / _STATE).mkdir(exist_ok=True)
        _check_same(started, {**configured_stages(config), **{f"prompts.{name}": entry["sha256"] for name, entry in versions().items()}})
        yield
    finally:
        held.close()


def _empty(folder: Path, started: Path) -> None:
    left = [path for path in folder.iterdir() if path.name != ".lock"]
    if left and not started.exists():
        raise ConfigError(f"{folder}: holds no corpus that was begun here, so --fresh does not delete it")
    for path in left:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _check_same(started: Path, present: dict[str, object]) -> None:
    if not started.exists():
        write_whole(started, json.dumps(present, indent=1))
        return
    try:
        earlier = json.loads(started.read_bytes())
    except ValueError:
        raise ConfigError(f"{started}: cannot be read; start over with --fresh") from None
    for name in sorted(earlier.keys() | present.keys()):
        if earlier.get(name) != present.get(name):
            raise ConfigError(
                f"{started.parent.parent}: the corpus there was begun with {name} = {earlier.get(name)!r:.80}, now it is "
                f"{present.get(name)!r:.80}; give this one another folder, or start over with --fresh"
            )
