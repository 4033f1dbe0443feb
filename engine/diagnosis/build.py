"""Makes a bank: a policy answers questions, a router marks claims, and what the scene shows labels them.

Blind to correctness: questions are chosen by the seed alone, every response stays, whether it is right or claims anything, and neither
the right answer nor a score is looked at or written. A question's row is appended once it is done, so what was stopped goes on.
"""

import asyncio
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from headrace.config import Config, ConfigError, RouterConfig, RowsSource, ServerRouterConfig, VLLMEngineConfig
from headrace.credit.claims import Quote, TokenReader
from headrace.credit.router import Router, RouterError, ServerRouter, make_router
from headrace.diagnosis.bank import Claim, Entry, Response, bank_row, write_bank
from headrace.drawing import drawing
from headrace.encoding import Encoder
from headrace.evaluation.job import Job
from headrace.evaluation.run import fingerprint
from headrace.files import whole_lines, write_whole
from headrace.questions.sets import QuestionSet, load, stops_at_bad_rows
from headrace.questions.support import ClaimName, KnownScenes, Label, load_labels
from headrace.records import Completion, Engine, Prompt, SampleRequest, SamplingParameters
from headrace.starting_model import encoder_of
from headrace.streams import stream, stream_seed

Labels = Path | Literal["scene", "router"]
Progress = Callable[[int, int], None]
_STATUS: dict[str, Label | None] = {"supported": "supported", "contradicted": "unsupported", "unverifiable": None}


@dataclass(frozen=True)
class Plan:
    """What bank to make."""

    job: Job
    out: Path
    questions: int
    responses: int
    labels: Labels | None = None
    """Where labels come from; None takes the scene where it is known, and else leaves claims without."""


def labels_from(text: str | None) -> Labels | None:
    """``scene``, ``router`` or the path of a file."""
    given: dict[str | None, Labels | None] = {None: None, "scene": "scene", "router": "router"}
    return given[text] if text in given else Path(str(text))


@dataclass
class Built:
    counts: Counter[str] = field(default_factory=Counter)
    """Questions, responses, claims; claims by label; questions left out by reason; responses the router did not answer, by reason."""


def build(plan: Plan, *, fresh: bool = False, progress: Progress = lambda *_: None) -> Built:
    """Make the bank, or go on with it.

    Raises:
        ValueError: there is no router, the questions have no pictures, labels cannot be had, or a bank of other settings is half made.
    """
    config = plan.job.config
    if plan.out.exists() and not fresh:
        raise ConfigError(f"{plan.out}: exists; name another file, or start over with --fresh")
    source = config.questions.held_out
    assert source is not None
    questions = load(source, config.run.seed, "held_out", require_answer=False)
    router = _router(config)
    labelling = _labelling(plan, questions, router)
    encoder = encoder_of(plan.job.directory, config)
    partial = plan.out.with_name(f".{plan.out.name}.partial")
    plan.out.parent.mkdir(parents=True, exist_ok=True)
    rows = _claimed(partial, _settings(plan), fresh)
    chosen, built = _chosen(questions, encoder, plan)
    missing = [(index, prompt) for index, prompt in chosen if prompt.question.id not in rows]
    maker = _Maker(plan, questions, encoder, router, labelling, built)
    progress(len(chosen) - len(missing), len(chosen))
    asyncio.run(maker.make(missing, partial, rows, lambda: progress(sum(p.question.id in rows for _, p in chosen), len(chosen))))
    kept = [rows[prompt.question.id] for _, prompt in chosen]
    write_bank(kept, plan.out)
    partial.unlink()
    _count(kept, built)
    return built


def _router(config: Config) -> RouterConfig:
    pacg = config.credit.pacg
    if pacg is None or pacg.router is None:
        raise ConfigError(
            "credit.pacg.router: nothing finds claims; name a configuration that has one with --config, or give e.g. "
            "'credit.pacg.router={kind: rules, patterns: [\"…\"]}'"
        )
    return pacg.router


def _labelling(plan: Plan, questions: QuestionSet, router: RouterConfig) -> Mapping[ClaimName, Label] | Literal["scene", "router"] | None:
    """Labels of a file, or who gives them; checks that he can."""
    known = isinstance(questions, KnownScenes)
    if plan.labels is None:
        return "scene" if known else None
    if plan.labels == "scene" and not known:
        raise ConfigError("labels: these questions do not know what their pictures show; give router or a file")
    if plan.labels == "router" and not isinstance(router, ServerRouterConfig):
        raise ConfigError("labels: patterns do not look at pictures; router labels need credit.pacg.router.kind = server")
    return load_labels(plan.labels) if isinstance(plan.labels, Path) else plan.labels


def _settings(plan: Plan) -> dict[str, Any]:
    """What a row depends on."""
    config = plan.job.config.model_dump(mode="json")
    source = plan.job.config.questions.held_out
    rows = hashlib.sha256(source.path.read_bytes()).hexdigest() if isinstance(source, RowsSource) and source.path.is_file() else ""
    labels = plan.labels
    sampling = {key: config["sampling"][key] for key in ("max_tokens", "temperature", "stop", "stop_ids", "think_prefill")}
    return {
        "weights": fingerprint(plan.job.directory),
        "questions": config["questions"],
        "rows": rows,
        "seed": config["run"]["seed"],
        "responses": plan.responses,
        "router": config["credit"]["pacg"]["router"],
        "labels": hashlib.sha256(labels.read_bytes()).hexdigest() if isinstance(labels, Path) else labels,
        **sampling,
    }


def _claimed(partial: Path, settings: dict[str, Any], fresh: bool) -> dict[str, dict[str, Any]]:
    """Rows of a bank half made, by question; a torn last line is cut off. Its first line holds what they depend on."""
    lines = [] if fresh else whole_lines(partial)
    if not lines:
        write_whole(partial, json.dumps(settings, ensure_ascii=False) + "\n")
        return {}
    try:
        noted, *rows = [json.loads(line) for line in lines]
        found = {row["id"]: row for row in rows}
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{partial}: holds what no build writes; start over with --fresh") from None
    differing = next((name for name in settings if noted.get(name) != json.loads(json.dumps(settings[name]))), None)
    if differing is not None:
        raise ConfigError(f"{partial}: a bank half made with another {differing}; finish that, or start over with --fresh")
    return found


def _chosen(questions: QuestionSet, encoder: Encoder, plan: Plan) -> tuple[list[tuple[int, Prompt]], Built]:
    """Questions in an order that the seed draws, those that cannot be put to the model passed over and counted."""
    config, built = plan.job.config, Built()
    order = stream(config.run.seed, "diagnosis").permutation(len(questions)).tolist()
    chosen: list[tuple[int, Prompt]] = []
    for index in order:
        if len(chosen) == plan.questions:
            break
        question = questions.question(index)
        if not question.media:
            built.counts["left out: no picture"] += 1
            continue
        try:
            chosen.append((index, encoder.encode(question)))
        except ValueError:
            if stops_at_bad_rows(config.questions.held_out):
                raise
            built.counts["left out: not for this model"] += 1
    if not chosen:
        raise ConfigError(f"{plan.job.dataset}: no question with a picture can be put to the model")
    return chosen, built


class _Maker:
    """Draws, routes and labels."""

    def __init__(
        self,
        plan: Plan,
        questions: QuestionSet,
        encoder: Encoder,
        router: RouterConfig,
        labelling: Mapping[ClaimName, Label] | Literal["scene", "router"] | None,
        built: Built,
    ) -> None:
        self.plan, self.encoder, self.labelling, self.built = plan, encoder, labelling, built
        self.config = plan.job.config
        self._routing = router
        self._reader = TokenReader(encoder)
        self._questions = questions

    async def make(
        self, missing: Sequence[tuple[int, Prompt]], partial: Path, rows: dict[str, dict[str, Any]], progress: Callable[[], None]
    ) -> None:
        """Append a row for each question."""
        if not missing:
            return
        served = isinstance(self.config.engine, VLLMEngineConfig)
        chunk = 64 if served else max(1, self.config.sampling.batch_rows // self.plan.responses)
        router = make_router(self._routing)
        line = asyncio.Semaphore(self._routing.concurrency if isinstance(self._routing, ServerRouterConfig) else 1)
        try:
            async with drawing(self.config, self.plan.job.directory, self.encoder) as engine:
                with partial.open("a", encoding="utf-8") as file:
                    for start in range(0, len(missing), chunk):
                        some = missing[start : start + chunk]
                        for entry in await self._entries(some, engine, router, line):
                            row = bank_row(entry)
                            file.write(json.dumps(row, ensure_ascii=False) + "\n")
                            rows[entry.question.id] = row
                        file.flush()
                        os.fsync(file.fileno())
                        progress()
        finally:
            await router.close()

    async def _entries(self, some: Sequence[tuple[int, Prompt]], engine: Engine, router: Router, line: asyncio.Semaphore) -> list[Entry]:
        count = self.plan.responses
        completions = await engine.sample([self._request(prompt, number) for _, prompt in some for number in range(count)])
        responses = await asyncio.gather(
            *(
                self._response(*some[place // count], place % count, completion, router, line)
                for place, completion in enumerate(completions)
            )
        )
        prefill, entries = self.config.sampling.think_prefill, []
        for place, (_, prompt) in enumerate(some):
            own = tuple(responses[place * count : (place + 1) * count])
            entries.append(Entry(self._with_system(prompt), own, prefill))
        return entries

    def _with_system(self, prompt: Prompt) -> Any:
        """The question with the configured system prompt in its messages, so that the bank alone says what is asked."""
        question, system = prompt.question, self.config.questions.system_prompt
        if system is None or any(message["role"] == "system" for message in question.messages):
            return question
        return replace(question, messages=({"role": "system", "content": system}, *question.messages))

    def _request(self, prompt: Prompt, number: int) -> SampleRequest:
        sampling = self.config.sampling
        parameters = SamplingParameters(sampling.max_tokens, sampling.temperature, stop=sampling.stop, stop_ids=sampling.stop_ids)
        return SampleRequest(prompt, number, stream_seed(self.config.run.seed, "diagnosis", 0, prompt.question.id, number), parameters)

    async def _response(
        self, index: int, prompt: Prompt, number: int, completion: Completion, router: Router, line: asyncio.Semaphore
    ) -> Response:
        """A response with its claims."""
        ids = [int(token) for token in completion.token_ids]
        finished = bool(ids) and ids[-1] in self.encoder.eos_ids
        text = self.encoder.decode(ids[:-1] if finished else ids)
        spoken = self._reader.read(prompt, ids)
        try:
            async with line:
                marked = await self._marked(prompt, spoken.text, router)
        except RouterError as error:
            self.built.counts[f"not routed: {error.reason}"] += 1
            return Response(text, ids, finished)
        claims = []
        for quote, status in marked:
            if spoken.claims([quote]).spans:
                label = status if self.labelling == "router" else self._label(index, prompt.question.id, number, quote)
                claims.append(Claim(quote.text, quote.occurrence, label))
            else:
                self.built.counts["claims not in the response, or in its answer"] += 1
        return Response(text, ids, finished, claims)

    async def _marked(self, prompt: Prompt, text: str, router: Router) -> list[tuple[Quote, Label | None]]:
        """Direct claims, with what a served router says of them."""
        if self.labelling == "router":
            assert isinstance(router, ServerRouter)
            spans = await router.spans(prompt.question, text)
            return [(Quote(span.text, span.occurrence), _STATUS[span.evidence_status]) for span in spans if span.direct_vef]
        return [(quote, None) for quote in await router.route(prompt.question, text)]

    def _label(self, index: int, question: str, number: int, quote: Quote) -> Label | None:
        if self.labelling == "scene":
            assert isinstance(self._questions, KnownScenes)
            shown = self._questions.supports(index, quote.text)
            return None if shown is None else "supported" if shown else "unsupported"
        if isinstance(self.labelling, Mapping):
            return self.labelling.get(ClaimName(question, number, quote.text, quote.occurrence))
        return None


def _count(rows: Sequence[dict[str, Any]], built: Built) -> None:
    """What the bank holds."""
    responses = [response for row in rows for response in row["responses"]]
    claims = [claim for response in responses for claim in response["claims"] or ()]
    held = Counter({"questions": len(rows), "responses": len(responses), "claims": len(claims)})
    held.update(f"claims {claim['label'] or 'without a label'}" for claim in claims)
    built.counts = held + built.counts
