"""Sampling: the local engine against transformers' ``generate`` on the same rows, in one process.

    python -m headrace.bench rollout [--model DIRECTORY] [--prompts 16] [--rollouts 8] [--prompt-tokens 60] [--tokens 50] [--vllm]

With ``--vllm`` instead what the top-token processor adds to a decoding step of vLLM.

Prints processor seconds and their ratio. Both sides draw as many tokens for as many rows; the engine also returns log-probs and mask
flags, ``generate`` only tokens. Without a directory the model is the demo's, with random weights.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from headrace.bench.vllm_rollout import vllm_steps
from headrace.config import DirectoryModel, ModelConfig, ScratchTextModel
from headrace.encoding import Encoder
from headrace.policy.model import Policy
from headrace.policy.scratch import build_text
from headrace.records import Prompt, Question, SampleRequest, SamplingParameters, TopTokenRule
from headrace.sampling.local import LocalEngine


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Least processor time of one call, after a first that is not counted."""
    work()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def load(directory: Path | None) -> tuple[Policy, Encoder]:
    directory = directory or Path(tempfile.mkdtemp())
    if not any(directory.iterdir()):
        build_text(directory, ScratchTextModel(kind="scratch_text"), [f"w{number}" for number in range(60)], seed=0)
    policy = Policy.load(directory, ModelConfig(source=DirectoryModel(path=directory)), "cpu")
    return policy, Encoder.load(directory, think_prefill=True, system_prompt=None, max_prompt_tokens=1 << 20)


def make_prompts(encoder: Encoder, count: int, tokens: int) -> list[Prompt]:
    """Random prompts between 0.8 and 1 times ``tokens`` long."""
    rng = np.random.default_rng(0)
    allowed = np.setdiff1d(np.arange(encoder.vocab_size), [*encoder.banned_ids, *encoder.eos_ids])
    lengths = rng.integers(max(1, int(0.8 * tokens)), tokens + 1, count)
    return [
        Prompt(Question(id=str(number), messages=(), answer=""), rng.choice(allowed, length).astype(np.int64), prefilled=True)
        for number, length in enumerate(lengths)
    ]


PADDING = 0
"""On the left of the peer's shorter prompts, where nothing attends: any token will do."""


def generate(policy: Policy, prompts: list[Prompt], rollouts: int, tokens: int) -> None:
    """The same rows through ``generate``: left-padded, sampled, never stopping."""
    rows = [torch.from_numpy(prompt.token_ids) for prompt in prompts for _ in range(rollouts)]
    longest = max(map(len, rows))
    ids = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0), value=PADDING) for row in rows])
    attended = torch.stack([torch.nn.functional.pad(torch.ones_like(row), (longest - len(row), 0)) for row in rows])
    policy.model.set_attn_implementation("sdpa")
    try:
        with torch.inference_mode():
            policy.model.generate(
                ids,
                attention_mask=attended,
                do_sample=True,
                top_k=0,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                pad_token_id=PADDING,
            )
    finally:
        policy.model.set_attn_implementation("headrace")


def rollout(
    model: Annotated[Path | None, typer.Option(help="Hugging Face directory; by default the demo's shape with random weights")] = None,
    prompts: int = 16,
    rollouts: int = 8,
    prompt_tokens: int = 60,
    tokens: int = 50,
    repeats: int = 3,
    vllm: Annotated[bool, typer.Option("--vllm", help="A decoding step of vLLM with the mask on every request and without")] = False,
) -> None:
    """Sampling by the local engine against transformers' generate on the same rows."""
    policy, encoder = load(model)
    if vllm:
        if model is None:  # random weights are never sure of anything; a larger norm makes them so
            policy.model.model.norm.weight.data *= 30
            policy.model.save_pretrained(encoder.directory)
        repeated = [prompt for prompt in make_prompts(encoder, prompts, prompt_tokens) for _ in range(rollouts)]
        masked, plain, positions = vllm_steps(encoder.directory, encoder, repeated, tokens, repeats)
        print(f"vLLM, {len(repeated)} rows, {torch.get_num_threads()} threads: a decoding step without the processor {1e3 * plain:.2f} ms")
        print(f"mask on every request {1e3 * masked:.2f} ms = {masked / plain:.3f} x, {positions} positions masked")
        return
    encoder = replace(encoder, eos_ids=())  # every response runs to its limit
    questions = make_prompts(encoder, prompts, prompt_tokens)
    engine = LocalEngine(policy, encoder, batch_rows=prompts * rollouts)

    async def draw(mask: TopTokenRule | None) -> None:
        parameters = SamplingParameters(max_tokens=tokens)
        requests = [SampleRequest(p, i, 1000 * n + i, parameters, mask) for n, p in enumerate(questions) for i in range(rollouts)]
        completions = await engine.sample(requests)
        assert all(len(completion.token_ids) == tokens for completion in completions)

    def drawn(mask: TopTokenRule | None) -> None:
        asyncio.run(draw(mask))

    free, masked = seconds(lambda: drawn(None), repeats), seconds(lambda: drawn(TopTokenRule(threshold=0.6)), repeats)
    baseline = seconds(lambda: generate(policy, questions, rollouts, tokens), repeats)
    rows = prompts * rollouts
    print(f"{rows} rows x {tokens} tokens, {torch.get_num_threads()} threads: generate {baseline:.3f} s")
    print(f"local engine, free   {free:.3f} s = {free / baseline:.2f} x generate")
    print(f"local engine, masked {masked:.3f} s = {masked / baseline:.2f} x generate")
