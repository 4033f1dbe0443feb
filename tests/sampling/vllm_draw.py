"""Draws a list of requests inside vLLM and writes what came back; run in its own process.

    python -m tests.sampling.vllm_draw JOB.json ANSWER.json

The job: ``model``, ``settings``, ``requests`` (prompt ids and sampling parameters), ``refused`` (sampling parameters that must be turned
down), ``engine`` (arguments of ``vllm.LLM``), ``slots``: use the GPU's runner under Triton's interpreter.
"""

import json
import sys
from pathlib import Path
from typing import Any

import headrace  # noqa: F401  before vLLM, in every process that vLLM spawns from this module: lets torchvision import beside CPU torch

if __name__ == "__main__":
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    if job["slots"]:
        from tests.sampling import triton_on_cpu  # noqa: F401  before vLLM

    from vllm import LLM, SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.core.sched.scheduler import Scheduler

    from headrace.sampling.vllm.channel import PROCESSOR

    preempted: list[str] = []
    preempt = Scheduler._preempt_request

    def counted(self: Scheduler, request: Any, *arguments: Any, **named: Any) -> None:
        preempted.append(request.request_id)
        preempt(self, request, *arguments, **named)

    Scheduler._preempt_request = counted  # type: ignore[method-assign]
    llm = LLM(
        job["model"],
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        logits_processors=[PROCESSOR],
        additional_config={"headrace": job["settings"]},
        disable_log_stats=True,
        **job["engine"],
    )
    refusals = []
    for params in job["refused"]:
        if "logit_bias" in params:
            params["logit_bias"] = {int(token): value for token, value in params["logit_bias"].items()}
        try:
            llm.generate([{"prompt_token_ids": [1]}], SamplingParams(**params), use_tqdm=False)
            refusals.append("")
        except (ValueError, VLLMValidationError) as error:
            refusals.append(str(error))
    prompts = [{"prompt_token_ids": request["prompt"]} for request in job["requests"]]
    outputs = llm.generate(prompts, [SamplingParams(**request["params"]) for request in job["requests"]], use_tqdm=False)
    answers = []
    for request, output in zip(job["requests"], outputs, strict=True):
        rows = request["params"].get("logprob_token_ids") or []
        for choice in output.outputs:
            drawn = list(choice.token_ids)
            logprobs = choice.logprobs or [{}] * len(drawn)
            columns = [[float(entry[row].logprob) for entry in logprobs] for row in rows]
            own = [float(entry[token].logprob) if entry else None for token, entry in zip(drawn, logprobs, strict=True)]
            answers.append({"tokens": drawn, "logprobs": own, "rows": columns, "finish": choice.finish_reason})
    runners = [name for name in ("runner_v1", "runner_v2") if f"headrace.sampling.vllm.{name}" in sys.modules]
    Path(sys.argv[2]).write_text(json.dumps({"answers": answers, "refusals": refusals, "preempted": len(preempted), "runners": runners}))
