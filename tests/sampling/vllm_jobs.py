"""Requests of every kind for a vLLM worker, and what its answers must be: recomputed by transformers in fp32, flag by flag."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.encoding import Encoder
from headrace.kernels.truncation import keep_largest, keep_probable
from headrace.records import Prompt, Question, SampleRequest, SamplingParameters, TopTokenRule
from headrace.sampling.top_token import ReasoningSpans, spared_tokens
from headrace.sampling.vllm.channel import Channel, decode, request_arguments, spare_rows, write_settings
from tests.sampling import tiny_policy
from tests.sampling.tiny_policy import WORDS, Tiny

ROOT = Path(__file__).parents[2]
MIX, GAIN = 3.0, 22.0
"""Sharp enough for p* > 0.95 at a tenth of the positions, soft enough that two fp32 programs agree."""
NATS = 6e-5
"""What may be lost on the way; on this model it covers vLLM against transformers in fp32, too."""
# Seeds and chunked prefill do not go together on a CPU (vLLM 0.32: "CPU Generator does not use offset").
ENGINE = {"max_model_len": 256, "kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 16, "max_num_batched_tokens": 64}


def build(directory: Path) -> Tiny:
    tiny = tiny_policy.build(directory, MIX, GAIN)
    tiny.policy.model.save_pretrained(directory)
    write_settings(tiny.encoder, directory / "settings.json")
    return tiny


def mixed_requests(tiny: Tiny, count: int, tokens: int) -> list[SampleRequest]:
    """Kinds in turn: masked and free, both filters, a small cap, with and without pre-filled tag, tags in the prompt, truncated."""
    rng = np.random.default_rng(1)
    opened, closed = tiny.encoder.think_open, tiny.encoder.think_close
    plain = TopTokenRule(threshold=0.9)
    kinds: list[tuple[bool, TopTokenRule | None]] = [
        (True, plain),
        (True, replace(plain, token_filter="lexical")),
        (False, plain),  # the prompt holds literal tags, the last one opening: it does not count
        (True, replace(plain, cap=2)),
        (True, None),
        (True, replace(plain, threshold=0.6)),  # and top-p and top-k besides
    ]
    requests = []
    for number in range(count):
        prefilled, rule = kinds[number % len(kinds)]
        words = tiny.encoder.tokenizer.encode(" ".join(rng.choice(WORDS, rng.integers(5, 90))), add_special_tokens=False)
        ids = [*words, *([opened] if prefilled else [opened, closed, words[0], opened, words[0]])]
        prompt = Prompt(Question(id=str(number), messages=(), answer=""), np.asarray(ids), prefilled)
        temperature = (0.0, 0.7, 1.0, 1.3)[(number + number // len(kinds)) % 4]
        drawn = (
            SamplingParameters(tokens, temperature, top_p=0.8, top_k=9)
            if number % len(kinds) == 5
            else SamplingParameters(tokens, temperature)
        )
        requests.append(SampleRequest(prompt, 0, 1000 + 10 * number, drawn, rule, confidence=0.9))
    return requests


def capped_requests(tiny: Tiny, count: int, tokens: int) -> list[SampleRequest]:
    """Requests that reach a cap of two early: one that forgot its count when it was preempted would mask a third time."""
    rule = TopTokenRule(threshold=0.7, cap=2)
    drawn = SamplingParameters(tokens, 1.0)
    lengths = np.random.default_rng(2).integers(5, 90, count)
    prompts = tiny.prompts(lengths.tolist())
    return [SampleRequest(prompt, 0, 5000 + number, drawn, rule, confidence=0.7) for number, prompt in enumerate(prompts)]


def parameters(request: SampleRequest, encoder: Encoder, **others: Any) -> dict[str, Any]:
    """vLLM's sampling parameters of a request, as the client sends them."""
    return {
        "max_tokens": request.parameters.max_tokens,
        "temperature": request.parameters.temperature,
        "seed": request.seed,
        "logprobs": 2,
        "logprob_token_ids": list(spare_rows(encoder)),
        "stop_token_ids": list(encoder.eos_ids),
        "detokenize": False,
        "extra_args": {"headrace": request_arguments(request)},
    } | others


def draw(
    tiny: Tiny,
    jobs: list[dict[str, Any]],
    folder: Path,
    *,
    refused: Sequence[dict[str, Any]] = (),
    slots: bool = False,
    processes: bool = False,
    **engine: Any,
) -> dict[str, Any]:
    """Draw in a fresh process; ``slots`` takes the GPU's runner, ``processes`` puts vLLM's core and workers in their own."""
    paths = folder / "job.json", folder / "answer.json"
    job = {"model": str(tiny.directory), "settings": str(tiny.directory / "settings.json"), "requests": jobs, "refused": list(refused)}
    paths[0].write_text(json.dumps(job | {"engine": ENGINE | engine, "slots": slots}, default=int))
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)),
        "VLLM_USE_V2_MODEL_RUNNER": str(int(slots)),
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.sampling.vllm_draw", *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    result: dict[str, Any] = json.loads(paths[1].read_text())
    return result


@dataclass
class Tally:
    """What the checked answers held, so that a test can say that nothing was vacuous."""

    tokens: int = 0
    masked: int = 0
    capped: int = 0
    opened: int = 0
    near: int = 0
    logprob: float = 0.0
    rest: float = 0.0
    least_rest: float = 0.0


def check(tiny: Tiny, request: SampleRequest, answer: dict[str, Any], tally: Tally) -> Channel:
    """Flags, spans, top ids, p* and log-probs of one answer against transformers and the local rule."""
    tokens = np.asarray(answer["tokens"])
    channel = decode(*map(np.asarray, answer["rows"]))
    logits = teacher_forced(tiny, request, tokens)
    threshold = request.mask.threshold if request.mask else request.confidence
    top_probs, top_ids = (column.numpy() for column in logits.softmax(-1).max(-1))
    spared = spared_tokens(tiny.encoder, request.mask.token_filter if request.mask else "none")
    near = np.abs(top_probs - threshold) < 1e-5
    spans = ReasoningSpans([request], tiny.encoder)
    row = np.array([0])
    for place, token in enumerate(tokens):
        eligible = bool(spans.eligible(row)[0])
        assert channel.inside[place] == spans.inside[0]
        if not near[place]:
            assert channel.masked[place] == (eligible and top_probs[place] > threshold and not spared[top_ids[place]]), place
            assert channel.confident(threshold)[place] == (spans.inside[0] and top_probs[place] > threshold)
        tally.opened += bool(channel.masked[place] and not request.prompt.prefilled)
        spans.advance(row, np.array([token]), channel.masked[[place]], channel.confident(threshold)[[place]])
    assert channel.inside.sum() == spans.examined[0]
    assert (channel.top_ids == top_ids).all()
    assert (channel.top_ids[channel.masked] != tokens[channel.masked]).all()
    assert not np.isin(tokens, tiny.encoder.banned_ids).any()
    np.testing.assert_allclose(channel.top_probs, top_probs, atol=NATS)
    rest = left(logits, top_ids)
    masked = torch.from_numpy(channel.masked)
    behaviour = logits.clone()
    behaviour[masked, torch.from_numpy(top_ids)[masked]] = -torch.inf
    behaviour /= request.parameters.temperature or 1.0
    if request.parameters.temperature > 0 and request.parameters.top_k > 0:
        behaviour = keep_probable(keep_largest(behaviour, request.parameters.top_k), request.parameters.top_p)
    wanted = behaviour.log_softmax(-1)[torch.arange(len(tokens)), torch.from_numpy(tokens)].numpy()
    tally.tokens += len(tokens)
    tally.masked += int(channel.masked.sum())
    tally.capped += spans.cap_hit(0)
    tally.near += int(near.sum())
    tally.logprob = max(tally.logprob, float(np.abs(wanted - answer["logprobs"]).max()))
    if channel.masked.any():
        tally.rest = max(tally.rest, float(np.abs(rest - channel.log_rest)[channel.masked].max()))
        tally.least_rest = min(tally.least_rest, float(rest[channel.masked].min()))
    return channel


@torch.no_grad()
def teacher_forced(tiny: Tiny, request: SampleRequest, tokens: np.ndarray) -> torch.Tensor:
    """[L, V] float64: the policy's fp32 logits before each token of the response, banned ids removed."""
    ids = torch.from_numpy(np.concatenate((request.prompt.token_ids, tokens)).astype(np.int64))[None]
    model = tiny.policy.model
    model.set_attn_implementation("sdpa")
    try:
        logits = model(ids).logits[0, len(request.prompt.token_ids) - 1 : -1].double()
    finally:
        model.set_attn_implementation("headrace")
    logits[:, list(tiny.encoder.banned_ids)] = -torch.inf
    return logits


def left(logits: torch.Tensor, top_ids: np.ndarray) -> np.ndarray:
    """[L]: log(1 - p*)."""
    others = logits.scatter(1, torch.from_numpy(top_ids)[:, None], -torch.inf)
    rest: np.ndarray = (others.logsumexp(1) - logits.logsumexp(1)).numpy()
    return rest
