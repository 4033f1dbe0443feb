"""Responses drawn on a server are those the local engine would draw, token by token and nat by nat."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.records import Completion, Prompt, SampleRequest, SamplingParameters, TopTokenRule
from headrace.sampling.local import LocalEngine
from headrace.sampling.top_token import ReasoningSpans
from tests.sampling.tiny_policy import ROUNDING
from tests.vllm.conftest import Served

pytestmark = pytest.mark.vllm


def requests(prompts: Sequence[Prompt], count: int = 2, mask: TopTokenRule | None = None, **parameters: object) -> list[SampleRequest]:
    """A group of ``count`` for every prompt."""
    wanted = SamplingParameters(**({"max_tokens": 40} | parameters))  # type: ignore[arg-type]
    return [
        SampleRequest(prompt, index, seed=(7 << 55) + 1009 * number + index, parameters=wanted, mask=mask)
        for number, prompt in enumerate(prompts)
        for index in range(count)
    ]


def draw(served: Served, wanted: Sequence[SampleRequest], **changes: object) -> list[Completion]:
    async def run() -> list[Completion]:
        engine = served.engine(**changes)
        try:
            return await engine.sample(wanted)
        finally:
            await engine.close()

    return asyncio.run(run())


def rescored(served: Served, request: SampleRequest, completion: Completion) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-probs of the drawn tokens without mask, top probabilities and top ids, by the policy itself, banned ids left out."""
    ids = np.concatenate([request.prompt.token_ids, completion.token_ids])
    with torch.no_grad():
        logits = served.tiny.policy.model(torch.from_numpy(ids)[None]).logits[0].double()
    logits[:, list(served.tiny.encoder.banned_ids)] = -torch.inf
    rows = (logits / (request.parameters.temperature or 1.0)).log_softmax(-1)[len(request.prompt.token_ids) - 1 : -1]
    plain = logits.log_softmax(-1)[len(request.prompt.token_ids) - 1 : -1]
    return rows[np.arange(len(rows)), completion.token_ids].numpy(), plain.max(-1).values.exp().numpy(), plain.argmax(-1).numpy()


def test_greedy_responses_equal_the_local_engines(served: Served) -> None:
    wanted = requests(served.tiny.prompts([3, 9, 20, 40]), 1, temperature=0.0)
    local = asyncio.run(LocalEngine(served.tiny.policy, served.tiny.encoder).sample(wanted))
    for ours, theirs in zip(draw(served, wanted), local, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.finish_reason == theirs.finish_reason
        assert (ours.logprobs == 0).all()
        assert (ours.examined, ours.confident) == (theirs.examined, theirs.confident)


def test_greedy_masked_responses_equal_the_local_engines(served: Served) -> None:
    """Without chance the mask alone decides, so flags and counts must be the same ones."""
    wanted = requests(served.tiny.prompts([3, 9, 20, 40]), 1, TopTokenRule(threshold=0.9), temperature=0.0)
    local = asyncio.run(LocalEngine(served.tiny.policy, served.tiny.encoder).sample(wanted))
    ours = draw(served, wanted)
    assert sum(int(one.masked.sum()) for one in ours) > 0
    for one, other in zip(ours, local, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.masked.tolist() == other.masked.tolist()
        assert (one.examined, one.confident, one.cap_hit) == (other.examined, other.confident, other.cap_hit)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_the_policys(served: Served, temperature: float) -> None:
    wanted = requests(served.tiny.prompts([3, 9, 20, 40]), 2, temperature=temperature)
    for request, completion in zip(wanted, draw(served, wanted), strict=True):
        expected, _, _ = rescored(served, request, completion)
        np.testing.assert_allclose(completion.logprobs, expected, atol=ROUNDING)


def test_masked_positions_are_those_above_the_threshold(served: Served) -> None:
    rule = TopTokenRule(threshold=0.9, cap=1000)
    wanted = requests(served.tiny.prompts([3, 9, 20, 40]), 2, rule)
    free = requests(served.tiny.prompts([3, 9, 20, 40]), 2)
    for request, completion in zip(wanted + free, draw(served, wanted + free), strict=True):
        drawn, top, tops = rescored(served, request, completion)
        spans = ReasoningSpans([request], served.tiny.encoder)
        inside = np.array([bool(spans.inside[0])])
        for token in completion.token_ids[:-1]:
            spans.advance(np.array([0]), np.array([token]), np.array([False]), np.array([False]))
            inside = np.append(inside, spans.inside[0])
        spared = np.isin(tops, [served.tiny.encoder.think_open, served.tiny.encoder.think_close])
        sure = np.abs(top - 0.9) > 1e-3
        assert completion.examined == inside.sum()
        if request.mask is None:
            assert not completion.masked.any()
            np.testing.assert_allclose(completion.logprobs, drawn, atol=ROUNDING)
        else:
            expected = inside & (top > 0.9) & ~spared
            assert completion.masked[sure].tolist() == expected[sure].tolist()
            rest = np.log1p(-top[completion.masked])
            np.testing.assert_allclose(completion.logprobs[completion.masked], drawn[completion.masked] - rest, atol=1e-3)


def test_a_seed_draws_the_same_response_whatever_else_is_drawn(served: Served) -> None:
    wanted = requests(served.tiny.prompts([5, 12]), 3)
    alone = [draw(served, [request])[0] for request in wanted[:2]]
    together = draw(served, wanted)
    for one, other in zip(alone, together, strict=False):
        assert one.token_ids.tolist() == other.token_ids.tolist()
    assert together[0].token_ids.tolist() != together[1].token_ids.tolist()


def test_stops_are_the_local_engines(served: Served) -> None:
    """Stop string, stop id, token limit and context end a response at the same token for the same reason."""
    [prompt] = served.tiny.prompts([9])
    [free] = asyncio.run(LocalEngine(served.tiny.policy, served.tiny.encoder).sample(requests([prompt], 1, temperature=0.0)))
    text = served.tiny.encoder.decode(free.token_ids).split()
    long = served.tiny.prompts([480])
    cases = [
        requests([prompt], 1, temperature=0.0, stop=(" ".join(text[4:6]),)),
        requests([prompt], 1, temperature=0.0, stop_ids=(int(free.token_ids[6]),)),
        requests([prompt], 1, temperature=0.0, max_tokens=3),
        requests(long, 1, temperature=0.0, max_tokens=400),
    ]
    for number, wanted in enumerate(cases):
        [ours] = draw(served, wanted)
        if number < 3:
            [local] = asyncio.run(LocalEngine(served.tiny.policy, served.tiny.encoder).sample(wanted))
            assert ours.token_ids.tolist() == local.token_ids.tolist()
            assert ours.finish_reason == local.finish_reason
        else:
            assert len(ours.token_ids) == 512 - len(long[0].token_ids)
            assert ours.finish_reason == "length"


def test_top_p_and_top_k_draw_without_flags(served: Served) -> None:
    wanted = requests(served.tiny.prompts([9]), 2, top_k=1)
    for completion in draw(served, wanted):
        assert not completion.masked.any()
        np.testing.assert_allclose(completion.logprobs, 0, atol=1e-6)


def test_what_cannot_be_drawn_is_refused_in_one_line(served: Served) -> None:
    [prompt] = served.tiny.prompts([4])
    with pytest.raises(ValueError, match=r"^response 0 of question q0: http\S+ refuses it \(temperature"):
        draw(served, requests([prompt], 1, temperature=3.0))
    with pytest.raises(ValueError, match="the prompt is empty"):
        draw(served, [replace(request, prompt=replace(prompt, token_ids=prompt.token_ids[:0])) for request in requests([prompt], 1)])


def test_versions_come_from_the_server(served: Served) -> None:
    served.control.set_version(7)
    try:
        [completion] = draw(served, requests(served.tiny.prompts([4]), 1))
        assert (completion.versions == 7).all()
    finally:
        served.control.set_version(0)


def test_an_abort_returns_what_was_drawn(served: Served) -> None:
    async def run() -> list[Completion]:
        engine = served.engine()
        drawing = asyncio.create_task(engine.sample(wanted))
        await asyncio.sleep(0.7)
        await engine.abort()
        try:
            return await asyncio.wait_for(drawing, 30)
        finally:
            await engine.close()

    wanted = requests(served.tiny.prompts([9]), 3, max_tokens=480, stop_ids=())
    served.control.pause("keep")
    try:
        drawn = asyncio.run(run())
    finally:
        served.control.resume()
    assert [completion.finish_reason for completion in drawn] == ["abort"] * 3


def test_scoring_gives_the_policys_log_probs(served: Served) -> None:
    [prompt] = served.tiny.prompts([30])
    with torch.no_grad():
        logits = served.tiny.policy.model(torch.from_numpy(prompt.token_ids)[None]).logits[0]
    expected = logits.log_softmax(-1)[np.arange(len(prompt.token_ids) - 1), prompt.token_ids[1:]]
    np.testing.assert_allclose(served.control.score(prompt.token_ids.tolist()), expected, atol=ROUNDING)
