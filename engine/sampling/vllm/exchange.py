"""What goes to a server for one response and what comes back: vLLM's ``/inference/v1/generate``, token ids in and out."""

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from headrace.encoding import Encoder
from headrace.records import Array, Completion, FinishReason, SampleRequest
from headrace.sampling.stops import Stops
from headrace.sampling.vllm.channel import KEY, decode, request_arguments

ROUTE = "/inference/v1/generate"
ABORT_ROUTE = "/inference/v1/abort_requests"
_ABSENT = -9999.0  # vLLM's word for minus infinity


class _Entry(msgspec.Struct):
    token_id: int
    logprob: float


class _Position(_Entry):
    top_logprobs: list[_Entry]


class _Logprobs(msgspec.Struct):
    content: list[_Position] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


_answers = msgspec.json.Decoder(_Answer)


class AnswerError(ValueError):
    """A server answered something that it cannot have meant."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A response as a server gave it."""

    completion: Completion
    labels: tuple[str, ...]
    """Weight versions of its tokens, as the server names them."""


def sampling_params(request: SampleRequest, limit: int, encoder: Encoder, rows: tuple[int, int]) -> dict[str, Any]:
    """vLLM's parameters for a request.

    End tokens are given by id, so that the server ends a response where the encoder does, whatever its own tokenizer says. A stop string is
    looked for by the server to save tokens, and once more here (`Reader`), where the decision falls.

    Args:
        request: what to draw.
        limit: response tokens.
        encoder: of the policy.
        rows: flag row and top-id row.
    """
    parameters = request.parameters
    params: dict[str, Any] = {
        "max_tokens": limit,
        "temperature": parameters.temperature,
        "seed": request.seed,
        "ignore_eos": True,
        "stop_token_ids": sorted({*encoder.eos_ids, *parameters.stop_ids}),
        # The route lists as many ids as are asked for, the drawn one among them, so one must be asked for in vain.
        "logprobs": len(rows) + 1,
        "logprob_token_ids": [*rows, rows[-1]],
        "detokenize": bool(parameters.stop),
        "skip_special_tokens": False,
        "extra_args": {KEY: request_arguments(request)},
    }
    if parameters.stop:
        params |= {"stop": list(parameters.stop), "include_stop_str_in_output": True}
    return params


class Reader:
    """Turns a server's answer into a completion."""

    def __init__(self, encoder: Encoder, rows: tuple[int, int]) -> None:
        self.encoder, self.rows = encoder, rows

    def read(self, content: bytes, request: SampleRequest) -> Drawn:
        """The completion of a request.

        Raises:
            AnswerError: the answer is no answer of this route, or the spare rows carry no message.
        """
        try:
            choice = _answers.decode(content).choices[0]
        except (msgspec.MsgspecError, IndexError) as error:
            raise AnswerError(f"not an answer of {ROUTE} ({error})") from None
        tokens = np.array(choice.token_ids or (), dtype=np.int32)
        positions = (choice.logprobs.content if choice.logprobs else None) or []
        if len(positions) != len(tokens):
            raise AnswerError(f"{len(positions)} log-probs for {len(tokens)} tokens")
        stop = self._stop(request, tokens)
        length = len(tokens) if stop is None else stop
        reason: FinishReason | None = "stop" if stop is not None else _reason(choice.finish_reason)
        if reason is None:
            raise AnswerError(f"finish reason {choice.finish_reason!r}")
        versions, labels = _versions(choice.weight_versions or [], length)
        logprobs = np.array([position.logprob for position in positions[:length]], dtype=np.float32)
        if request.parameters.temperature == 0:
            logprobs[:] = 0  # a greedy draw is certain; vLLM reports the distribution at temperature 1
        report = {"masked": np.zeros(length, dtype=bool)} | self._report(request, tokens[:length], positions[:length])
        return Drawn(Completion(tokens[:length], logprobs, versions=versions, finish_reason=reason, **report), labels)

    def _report(self, request: SampleRequest, tokens: Array, positions: list[_Position]) -> dict[str, Any]:
        """What the processor reported, as fields of a completion; none for an empty response."""
        arguments = request_arguments(request)
        if not positions:
            return {}
        rows = np.array([[_of(position, row) for row in self.rows] for position in positions])
        try:
            channel = decode(rows[:, 0], rows[:, 1])
        except ValueError as error:
            raise AnswerError(str(error)) from None
        if (channel.masked & (channel.top_ids == tokens)).any():
            raise AnswerError("a masked position drew the token that was removed")
        cap = arguments.get("cap", 0)
        return {
            "masked": channel.masked,
            "examined": int(channel.inside.sum()),
            "confident": int(channel.confident(arguments["threshold"]).sum()),
            "cap_hit": 0 < cap <= int(channel.masked.sum()),
        }

    def _stop(self, request: SampleRequest, tokens: Array) -> int | None:
        """Tokens up to the first that completes a stop string; None without one."""
        strings = request.parameters.stop
        if not strings or not any(string in self.encoder.decode(tokens) for string in strings):
            return None
        stops, row = Stops([request], None, self.encoder), np.zeros(1, dtype=np.int64)
        for length in range(1, len(tokens) + 1):
            if stops.stopped(row, tokens[length - 1 : length], tokens[None], length)[0]:
                return length
        return None


def _of(position: _Position, token: int) -> float:
    return next((entry.logprob for entry in position.top_logprobs if entry.token_id == token), _ABSENT)


def _reason(name: str | None) -> FinishReason | None:
    return name if name in ("stop", "length", "abort") else None  # type: ignore[return-value]


def _versions(spans: list[_Span], length: int) -> tuple[Array, tuple[str, ...]]:
    """Parameter version of each token, and the labels; a label that is no number, as of weights that nobody pushed, is version 0."""
    versions = np.zeros(length, dtype=np.int32)
    for span in spans:
        versions[span.start : span.end] = int(span.version) if span.version.isdigit() else 0
    return versions, tuple(span.version for span in spans)
