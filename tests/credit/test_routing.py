"""Routing beside a run: early, once, bounded, and harmless when the router is slow, dead or talks nonsense."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from headrace.config import CreditConfig
from headrace.credit.claims import Quote
from headrace.credit.router import RouterError
from headrace.credit.routing import PATIENCE, ClaimRouting
from headrace.records import Completion, Group, Media, Prompt, Question, Reward, Rollout
from tests.credit.router_server import completion, serving, slowly, span
from tests.credit.text_cases import word_encoder

ENCODER = word_encoder()
TEXTS = ["blue circle ; sum 9 </think> <|end|>", "red circle ; sum 9 </think> <|end|>", "blue ; sum sum sum 9", "red ; red ; 9"]


class Scripted:
    """A router that answers from a function and keeps what it was asked."""

    def __init__(self, answer: Callable[[str], Awaitable[list[Quote]]]) -> None:
        self.answer, self.asked = answer, []  # type: ignore[var-annotated]

    async def route(self, question: Question, response: str) -> list[Quote]:
        self.asked.append(response)
        return await self.answer(response)

    async def close(self) -> None:
        pass


async def says_blue(response: str) -> list[Quote]:
    return [Quote("blue")] if "blue" in response else []


def credit(**router: Any) -> CreditConfig:
    return CreditConfig.model_validate({"pacg": {"router": {"kind": "server", "url": "http://127.0.0.1:9", "model": "m", **router}}})


def rollout(index: int, text: str, accuracy: float) -> Rollout:
    ids = np.array(ENCODER.tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
    blank = np.zeros(len(ids), dtype=np.float32)
    drawn = Completion(ids, blank, blank.astype(bool), blank.astype(np.int32), "stop")
    return Rollout(index, 1, "free", drawn, text, Reward(accuracy, accuracy))


def group_of(accuracies: list[float], media: tuple[Media, ...] = (Media("image", "a.png"),), name: str = "q") -> Group:
    question = Question(name, ({"role": "user", "content": "what <image>"},), "", media)
    rollouts = tuple(rollout(i, TEXTS[i % 4], accuracy) for i, accuracy in enumerate(accuracies))
    advantages = np.array(accuracies, dtype=np.float32) - np.float32(np.mean(accuracies))
    return Group(Prompt(question, np.array([0]), prefilled=True), rollouts, advantages=advantages)


def routed(steps: Callable[[ClaimRouting], Awaitable[Any]], config: CreditConfig, router: Any = None, size: int = 4) -> Any:
    async def run() -> Any:
        routing = ClaimRouting(config, ENCODER, size, router)
        try:
            return await steps(routing)
        finally:
            await routing.close()

    return asyncio.run(run())


def claims_of(group: Group) -> list[Any]:
    return [one.claims for one in group.rollouts]


def test_claims_arrive_on_the_rollouts_that_a_gate_could_change() -> None:
    router, group = Scripted(says_blue), group_of([1, 1, 0, 0])

    async def steps(routing: ClaimRouting) -> Any:
        routing.start(group.prompt, group.rollouts)
        return await routing.collect(group), routing.metrics(), routing.metrics()

    found, metrics, after = routed(steps, credit(), router)
    assert claims_of(found) == [((0, 1),), (), None, None]
    assert [text.split()[0] for text in router.asked] == ["<think>", "<think>"]
    assert metrics["router/requests"] == 2
    assert metrics["router/spans"] == 1
    assert metrics["router/latency"] >= 0
    assert "router/requests" not in after
    assert replace(found, rollouts=group.rollouts) == group


def test_a_first_wave_starts_its_right_answers_and_the_whole_group_the_rest() -> None:
    router, group = Scripted(says_blue), group_of([0.2, 1, 0, 0])

    async def steps(routing: ClaimRouting) -> list[int]:
        counts = []
        for part in (group.rollouts[:2], group.rollouts, group.rollouts):
            routing.start(group.prompt, part)
            await asyncio.sleep(0.01)
            counts.append(len(router.asked))
        await routing.collect(group)
        return [*counts, len(router.asked)]

    assert routed(steps, credit(), router) == [1, 1, 1, 1]
    group = group_of([0.2, 0, 0, 0])
    router.asked.clear()
    assert routed(steps, credit(), router) == [0, 1, 1, 1]
    group = group_of([1, 1, 1, 1])  # no advantage, whatever the claims
    router.asked.clear()
    assert routed(steps, credit(), router)[1:] == [2, 2, 2]  # the first wave could not know


def test_the_same_response_is_asked_about_once() -> None:
    router = Scripted(says_blue)
    group = group_of([1, 0, 0, 0])
    twin = replace(group, rollouts=(group.rollouts[0], replace(group.rollouts[0], index=1), *group.rollouts[2:]))
    twin = replace(twin, advantages=np.array([1, 1, -1, -1], dtype=np.float32))

    async def steps(routing: ClaimRouting) -> Any:
        await routing.collect(twin)
        again = await routing.collect(twin)
        other = await routing.collect(group_of([1, 0, 0, 0], media=(Media("image", "b.png"),)))
        return claims_of(again), claims_of(other), routing.metrics()

    again, other, metrics = routed(steps, credit(), router)
    assert again[0] == again[1] == other[0] == ((0, 1),)
    assert len(router.asked) == 2
    assert metrics["router/cached"] == 3  # the twin, and both again


def test_both_signs_are_routed_where_both_are_gated() -> None:
    config = credit()
    assert config.pacg is not None
    config = config.model_copy(update={"pacg": config.pacg.model_copy(update={"positive_only": False})})
    router, group = Scripted(says_blue), group_of([1, 0, 0, 1])

    async def steps(routing: ClaimRouting) -> Any:
        routing.start(group.prompt, group.rollouts)
        return await routing.collect(group)

    assert claims_of(routed(steps, config, router)) == [((0, 1),), (), ((0, 1),), ()]


def test_nothing_is_asked_without_a_router_a_picture_or_advantages() -> None:
    router = Scripted(says_blue)

    async def steps(routing: ClaimRouting) -> Any:
        routing.start(group.prompt, group.rollouts)
        return await routing.collect(group), routing.metrics()

    group = group_of([1, 0, 0, 0], media=())
    found, metrics = routed(steps, credit(), router)
    assert claims_of(found) == [None] * 4
    assert metrics["router/text_only"] == 1
    group = replace(group_of([1, 0, 0, 0]), advantages=None)
    assert routed(lambda routing: routing.collect(group), credit(), router) is group
    assert router.asked == []
    group = group_of([1, 0, 0, 0])
    for config in ({}, {"vppo": {}}, {"pacg": {"claims": "every_token"}}):
        found, metrics = routed(steps, CreditConfig.model_validate(config))
        assert found is group
        assert metrics == {}


def test_a_rollout_of_another_question_is_asked_about_under_its_own() -> None:
    group = group_of([1, 0, 0, 0])
    other = Prompt(Question("other", ({"role": "user", "content": "else"},), "", (Media("image", "b.png"),)), np.array([0]), True)
    seen = []

    class Watching(Scripted):
        async def route(self, question: Question, response: str) -> list[Quote]:
            seen.append(question.id)
            return []

    mixed = replace(group, rollouts=(replace(group.rollouts[0], prompt=other), *group.rollouts[1:]))
    routed(lambda routing: routing.collect(mixed), credit(), Watching(says_blue))
    assert seen == ["other"]


# ------------------------------------------------------------------------------------------------------ trouble


def test_a_slow_router_costs_its_claims_and_no_more_than_the_deadline() -> None:
    async def sleeps(response: str) -> list[Quote]:
        await asyncio.sleep(30)
        return []

    groups = [group_of([1, 1, 0, 0], name=f"q{i}") for i in range(3)]

    async def steps(routing: ClaimRouting) -> Any:
        for group in groups:
            routing.start(group.prompt, group.rollouts)
        started = time.monotonic()
        found = [await routing.collect(group) for group in groups]  # one after the other
        return found, time.monotonic() - started, routing.metrics()

    found, took, metrics = routed(steps, credit(deadline=0.4), Scripted(sleeps))
    assert all(claims is None for group in found for claims in claims_of(group))
    assert took < 1.5
    assert metrics["router/late"] == 6
    assert 0.2 < metrics["time/router_wait"] < 1.5


def test_requests_wait_in_line() -> None:
    now, most = 0, 0

    async def counts(response: str) -> list[Quote]:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.02)
        now -= 1
        return []

    groups = [group_of([1, 1, 0, 0], media=(Media("image", f"{i}.png"),)) for i in range(5)]

    async def steps(routing: ClaimRouting) -> Any:
        return await asyncio.gather(*(routing.collect(group) for group in groups))

    found = routed(steps, credit(concurrency=3), Scripted(counts))
    assert most == 3
    assert all(claims_of(group)[:2] == [(), ()] for group in found)


def test_a_router_that_never_answers_is_left_alone_for_a_while() -> None:
    async def refuses(response: str) -> list[Quote]:
        raise RouterError("unreachable", "connection refused")

    router = Scripted(refuses)
    groups = [group_of([1, 0, 0, 0], media=(Media("image", f"{i}.png"),)) for i in range(PATIENCE + 5)]

    async def steps(routing: ClaimRouting) -> Any:
        for group in groups:
            assert claims_of(await routing.collect(group))[0] is None
        return routing.metrics()

    metrics = routed(steps, credit(), router)
    assert len(router.asked) == PATIENCE == metrics["router/requests"]
    assert metrics["router/unreachable"] == PATIENCE + 5


def test_a_failure_is_forgotten_and_the_response_asked_about_again() -> None:
    answers = [RouterError("malformed", "x"), [Quote("blue")]]

    async def once(response: str) -> list[Quote]:
        answer = answers.pop(0)
        if isinstance(answer, RouterError):
            raise answer
        return answer

    group = group_of([1, 0, 0, 0])

    async def steps(routing: ClaimRouting) -> Any:
        routing.start(group.prompt, group.rollouts)
        await asyncio.sleep(0.01)
        first = await routing.collect(group)  # the failure of the early request, not a second one
        return claims_of(first)[0], claims_of(await routing.collect(group))[0], routing.metrics()

    first, second, metrics = routed(steps, credit(), Scripted(once))
    assert (first, second) == (None, ((0, 1),))
    assert metrics["router/malformed"] == 1


def test_closing_drops_what_is_under_way() -> None:
    async def sleeps(response: str) -> list[Quote]:
        await asyncio.sleep(60)
        return []

    group = group_of([1, 1, 0, 0])

    async def steps(routing: ClaimRouting) -> None:
        routing.start(group.prompt, group.rollouts)
        await asyncio.sleep(0.01)

    started = time.monotonic()
    routed(steps, credit(), Scripted(sleeps))
    assert time.monotonic() - started < 5


# ------------------------------------------------------------------------------------------------------ a real server


@pytest.fixture
def picture(tmp_path: Path) -> tuple[Media, ...]:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    return (Media("image", str(tmp_path / "a.png")),)


def test_over_http_with_unaligned_quotes_and_the_answer(picture: tuple[Media, ...]) -> None:
    reply = {"spans": [span("blue circle"), span("green"), span("sum", direct=False), span("circle"), span("9", 7)]}
    group = group_of([1, 0, 0, 0], picture)

    async def steps(routing: ClaimRouting) -> Any:
        routing.start(group.prompt, group.rollouts)
        return await routing.collect(group), routing.metrics()

    with serving(lambda number, request: completion(reply)) as server:
        found, metrics = routed(steps, credit(url=server.url))
    assert claims_of(found) == [((0, 2), (1, 2)), None, None, None]
    assert metrics["router/unaligned_spans"] == 2
    assert metrics["router/spans"] == 2


def test_a_server_that_dies_under_way_stalls_nothing(picture: tuple[Media, ...]) -> None:
    groups = [group_of([1, 0, 0, 0], picture, name=f"q{i}") for i in range(3)]
    groups = [replace(group, rollouts=(rollout(0, f"blue {'; ' * i}", 1), *group.rollouts[1:])) for i, group in enumerate(groups)]

    async def steps(routing: ClaimRouting) -> Any:
        first = await routing.collect(groups[0])
        await asyncio.to_thread(server.die)
        started = time.monotonic()
        rest = [await routing.collect(group) for group in groups[1:]]
        return first, rest, time.monotonic() - started, routing.metrics()

    with serving(lambda number, request: completion({"spans": [span("blue")]})) as server:
        first, rest, took, metrics = routed(steps, credit(url=server.url, timeout=1, deadline=4))
    assert claims_of(first)[0] == ((0, 1),)
    assert [claims_of(group)[0] for group in rest] == [None, None]
    assert took < 8
    assert metrics.get("router/unreachable", 0) + metrics.get("router/timeout", 0) + metrics.get("router/late", 0) == 2


def test_a_hanging_server_and_the_bound_on_requests_at_once(picture: tuple[Media, ...]) -> None:
    groups = [group_of([1, 0, 0, 0], picture) for _ in range(4)]
    groups = [replace(group, rollouts=(rollout(0, f"blue {'; ' * i}", 1), *group.rollouts[1:])) for i, group in enumerate(groups)]

    async def steps(routing: ClaimRouting) -> Any:
        for group in groups:
            routing.start(group.prompt, group.rollouts)
        started = time.monotonic()
        found = await asyncio.gather(*(routing.collect(group) for group in groups))
        return found, time.monotonic() - started, routing.metrics()

    with serving(slowly(2.0, completion({"spans": []}))) as server:
        found, took, metrics = routed(steps, credit(url=server.url, timeout=0.3, deadline=0.8, concurrency=2))
    assert all(claims_of(group)[0] is None for group in found)
    assert took < 2
    assert metrics["router/timeout"] + metrics.get("router/late", 0) == 4
    assert server.most_at_once <= 4  # two under way, two more whose predecessors the client gave up
