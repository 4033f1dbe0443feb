"""Draws with the learner's own weights, in this process."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from headrace.encoding import Encoder
from headrace.kernels import TopTokenSample, top_token_sample
from headrace.ranges import span
from headrace.records import Array, Completion, MaskTrace, SampleRequest
from headrace.sampling.decoder import LocalPolicy, RowDecoder
from headrace.sampling.stops import Stops
from headrace.sampling.top_token import ReasoningSpans, spared_tokens
from headrace.sampling.trace import TraceRecorder

TRACE_LIMIT = 20_000
"""Masked positions traced per call of `sample`. Per call and not per process, so that a resumed run logs the same."""
COMPACTION = 8
"""Finished rows leave the batch once they are an eighth of it."""


class LocalEngine:
    """The `Engine` that shares the learner's weights: no server, no copy, no staleness.

    A draw depends on the request alone (its seed and the position), not on what else is in the batch, up to the rounding
    of the logits; the same requests in the same call give the same bits. Rows of one prompt share its prefill.
    """

    def __init__(self, policy: LocalPolicy, encoder: Encoder, *, batch_rows: int = 256, version: Callable[[], int] = lambda: 0) -> None:
        """Args:
        policy: the model; its weights are read at every call.
        encoder: of the same model directory.
        batch_rows: most responses drawn at once.
        version: tells the parameter version of the present weights.
        """
        self.policy = policy
        self.encoder = encoder
        self.batch_rows = batch_rows
        self.version = version

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """One completion per request, in order.

        Raises:
            ValueError: a prompt is empty or leaves no room in the model's context, or the weights give no finite logit.
        """
        completions: dict[int, Completion] = {}
        recorder_room = TRACE_LIMIT
        for batch in _batches(requests, self.batch_rows):
            drawing = _Drawing(self, [requests[number] for number in batch], recorder_room)
            with _evaluating(self.policy.model):
                drawn = drawing.run()
            recorder_room = drawing.recorder.room
            completions.update(zip(batch, drawn, strict=True))
            await asyncio.sleep(0)
        return [completions[number] for number in range(len(requests))]


class _Drawing:
    """One batch from the first token to the last.

    Decoder row k draws the response of request `rows[k]`. A row that has ended goes on idly until enough have ended to
    close the gaps. All rows are at the same response position.
    """

    def __init__(self, engine: LocalEngine, requests: Sequence[SampleRequest], trace_room: int) -> None:
        config = engine.policy.model.config.get_text_config()
        encoder = engine.encoder
        self.engine, self.requests = engine, requests
        self.spans = ReasoningSpans(requests, encoder)
        self.stops = Stops(requests, getattr(config, "max_position_embeddings", None), encoder)
        self.recorder = TraceRecorder(trace_room)
        count, longest = len(requests), int(self.stops.limits.max(initial=0))
        self.tokens = np.zeros((count, longest), dtype=np.int32)
        self.logprobs = np.zeros((count, longest), dtype=np.float32)
        self.masked = np.zeros((count, longest), dtype=bool)
        self.lengths = np.zeros(count, dtype=np.int64)
        self.stopped = np.zeros(count, dtype=bool)
        self.thresholds = np.array(
            [request.mask.threshold if request.mask else request.confidence for request in requests], dtype=np.float32
        )
        self.rows = np.arange(count)
        self.live = self.stops.limits > 0  # of each decoder row
        device = engine.policy.head_weight.device
        self._seeds = torch.tensor([request.seed for request in requests], dtype=torch.int64, device=device)
        self._temperatures = torch.tensor([request.parameters.temperature for request in requests], dtype=torch.float32, device=device)
        self._thresholds = torch.from_numpy(self.thresholds).to(device)
        self._spared = _spared(requests, encoder, device)
        self._banned = torch.tensor(encoder.banned_ids, dtype=torch.int64, device=device)
        self._top_k, self._top_p = _truncation(requests[0])

    def run(self) -> list[Completion]:
        """Draw every response."""
        decoder = self._decoder()
        position = 0
        while self.live.any():
            if position:
                with span("decode"):
                    decoder.step(self._fed)
            with span("draw"):
                self._draw(decoder.logits, position)
            position += 1
            finished = len(self.live) - int(self.live.sum())
            if 0 < finished < len(self.live) and finished * COMPACTION >= len(self.live):
                self._compact(decoder)
        return self._completions()

    @span("prefill")
    def _decoder(self) -> RowDecoder:
        prompts = {_prompt_key(request): request.prompt for request in self.requests}
        numbers = {key: number for number, key in enumerate(prompts)}
        owners = [numbers[_prompt_key(request)] for request in self.requests]
        return RowDecoder(self.engine.policy, list(prompts.values()), owners, self.tokens.shape[1])

    def _draw(self, logits: Tensor, position: int) -> None:
        """Draw one token for every decoder row and take note of it; the only synchronisation of a step is in here."""
        logits.index_fill_(1, self._banned, -torch.inf)
        sample = self._sample(logits, self.live & self.spans.eligible(self.rows), position)
        self._fed = sample.token
        # One transfer: token ids are below 2^24, so they are exact in fp32.
        packed = torch.stack((sample.token, sample.top_id, sample.fired, sample.top_prob, sample.logprob)).cpu().numpy()
        places = np.flatnonzero(self.live)
        rows = self.rows[places]
        token, top, fired = (column[places].astype(kind) for column, kind in zip(packed[:3], (np.int64, np.int64, bool), strict=True))
        probs, logprobs = packed[3:, places]
        if (token < 0).any():
            raise ValueError(f"response position {position}: no finite logits; the policy's weights are not finite")
        assert not (fired & (token == top)).any(), "a masked position drew the token that was removed"
        self.tokens[rows, position] = token
        self.logprobs[rows, position] = logprobs
        self.masked[rows, position] = fired
        self.lengths[rows] = position + 1
        self.spans.advance(rows, token, fired, probs > self.thresholds[rows])
        if fired.any():
            hit = np.flatnonzero(fired)
            self.recorder.record(logits, places[hit], rows[hit], position, top[hit], probs[hit], token[hit])
        stopped = self.stops.stopped(rows, token, self.tokens, position + 1)
        self.stopped[rows] = stopped
        self.live[places] = ~stopped & (position + 1 < self.stops.limits[rows])

    def _sample(self, logits: Tensor, eligible: Array, position: int) -> TopTokenSample:
        allowed = torch.from_numpy(eligible).to(logits.device)
        positions = torch.full_like(self._seeds, position)
        truncation = {"top_k": self._top_k, "top_p": self._top_p}
        try:
            return top_token_sample(
                logits, allowed, self._thresholds, self._seeds, positions, self._temperatures, spared=self._spared, **truncation
            )
        except ValueError as error:
            raise ValueError(f"response position {position}: {error}; the policy's weights are not finite") from None

    def _compact(self, decoder: RowDecoder) -> None:
        """Drop the rows that have ended."""
        order = decoder.keep(np.flatnonzero(self.live).tolist())
        self.rows, self.live = self.rows[order], self.live[order]
        index = torch.tensor(order, device=self._seeds.device)
        self._fed, self._seeds, self._temperatures = self._fed[index], self._seeds[index], self._temperatures[index]
        self._thresholds = self._thresholds[index]

    def _completions(self) -> list[Completion]:
        version = self.engine.version()
        traces = self.recorder.traces(len(self.requests))
        return [self._completion(row, version, trace) for row, trace in enumerate(traces)]

    def _completion(self, row: int, version: int, trace: MaskTrace | None) -> Completion:
        length = int(self.lengths[row])
        return Completion(
            token_ids=self.tokens[row, :length].copy(),
            logprobs=self.logprobs[row, :length].copy(),
            masked=self.masked[row, :length].copy(),
            versions=np.full(length, version, dtype=np.int32),
            finish_reason="stop" if self.stopped[row] else "length",
            examined=int(self.spans.examined[row]),
            confident=int(self.spans.confident[row]),
            cap_hit=self.spans.cap_hit(row),
            trace=trace,
        )


def _prompt_key(request: SampleRequest) -> tuple[object, ...]:
    return request.prompt.token_ids.tobytes(), request.prompt.question.media


def _truncation(request: SampleRequest) -> tuple[int | None, float | None]:
    """Top-k and top-p, None where off; greedy rows are not truncated."""
    parameters = request.parameters
    if parameters.temperature == 0:
        return None, None
    return parameters.top_k if parameters.top_k > 0 else None, parameters.top_p if parameters.top_p < 1 else None


def _spared(requests: Sequence[SampleRequest], encoder: Encoder, device: torch.device) -> Tensor | None:
    """Top tokens that the masks of a batch never remove, [V] bool; None without a mask."""
    filters = sorted({request.mask.token_filter for request in requests if request.mask})
    if not filters:
        return None
    if len(filters) > 1:
        raise ValueError(f"requests drawn together need one token filter, got {' and '.join(filters)}")
    return torch.from_numpy(spared_tokens(encoder, filters[0])).to(device)


def _batches(requests: Sequence[SampleRequest], batch_rows: int) -> Iterator[list[int]]:
    """Cut requests into batches of one truncation each, prompts by length and rows of one prompt side by side.

    A prompt's rows share a batch where they fit into one. Yields numbers of requests.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, request in enumerate(requests):
        groups.setdefault((_truncation(request), *_prompt_key(request)), []).append(number)
    ordered = sorted(groups.items(), key=lambda item: (str(item[0][0]), len(requests[item[1][0]].prompt.token_ids)))
    batch: list[int] = []
    truncation: object = None
    for key, numbers in ordered:
        if batch and (key[0] != truncation or len(batch) + len(numbers) > batch_rows):
            yield batch
            batch = []
        truncation = key[0]
        batch = batch + numbers
        while len(batch) > batch_rows:
            yield batch[:batch_rows]
            batch = batch[batch_rows:]
    if batch:
        yield batch


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Without gradients and in evaluation mode: in training mode activation checkpointing would refuse the cache."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
