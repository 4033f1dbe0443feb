"""Routers: patterns, and a real server over HTTP: what it is told, what counts as a reply, what happens without one."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from headrace.config import RulesRouterConfig, ServerRouterConfig
from headrace.credit.claims import Quote, find
from headrace.credit.router import SCHEMA, RouterError, RulesRouter, ServerRouter, make_router, parse
from headrace.records import Media, Question
from tests.credit.router_server import Answer, completion, serving, slowly, span

RESPONSE = "<think> blue circle ; red sum 9 </think> <answer> 9 </answer>"


@pytest.fixture
def question(tmp_path: Path) -> Question:
    path = tmp_path / "ü picture.png"
    Image.new("RGB", (8, 8), "blue").save(path)
    messages = (
        {"role": "system", "content": "Think first."},
        {"role": "user", "content": "<image> Is there a red shape?"},
    )
    return Question("q1", messages, "secret answer 42", (Media("image", str(path)),))


def ask(url: str, question: Question, **config: Any) -> list[Quote]:
    async def once() -> list[Quote]:
        router = make_router(ServerRouterConfig.model_validate({"kind": "server", "url": url, "model": "m", "timeout": 5, **config}))
        try:
            return await router.route(question, RESPONSE)
        finally:
            await router.close()

    return asyncio.run(once())


def test_the_server_sees_picture_question_and_response_and_no_answer(question: Question) -> None:
    with serving(lambda number, request: completion({"spans": [span("blue"), span("9", 2), span("sum", direct=False)]})) as server:
        assert ask(server.url, question) == [Quote("blue", 1), Quote("9", 2)]
    (request,) = server.requests
    assert request["path"] == "/v1/chat/completions"
    assert request["model"] == "m"
    assert request["response_format"]["json_schema"]["schema"] == SCHEMA
    system, user = request["messages"]
    assert "Do not judge the final answer" in system["content"]
    picture, text = user["content"]
    header, data = picture["image_url"]["url"].split(",")
    assert header == "data:image/png;base64"
    assert base64.b64decode(data) == Path(question.media[0].path).read_bytes()
    assert RESPONSE in text["text"]
    assert "Is there a red shape?" in text["text"]
    assert "<image>" not in text["text"]
    assert "secret" not in json.dumps(request)


def test_the_key_comes_from_the_environment(question: Question, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "k1")
    with serving(lambda number, request: completion({"spans": []})) as server:
        ask(server.url, question, key_variable="MY_KEY")
    assert server.headers[0]["Authorization"] == "Bearer k1"
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ValueError, match="the environment has no MY_KEY"):
        ServerRouter(ServerRouterConfig(kind="server", url="http://x", model="m", key_variable="MY_KEY"))


@pytest.mark.parametrize("wrap", ["{}", "```json\n{}\n```", "```\n{}\n```", "<think>hm, {{}}</think>\n{}", "  {}\n"])
def test_fences_and_thoughts_around_the_reply_are_taken_off(wrap: str) -> None:
    text = wrap.replace("{{}}", "{x").replace("{}", json.dumps({"spans": [span("blue")]}))
    answer = completion(text)
    assert answer is not None
    assert [one.text for one in parse(answer[1]).spans] == ["blue"]


BAD_REPLIES = [
    "no JSON at all",
    "",
    '{"spans": [',
    "[]",
    '{"spans": "blue"}',
    {"spans": ["blue"]},
    {"spans": [{**span("blue"), "occurrence": 0}]},
    {"spans": [{**span("blue"), "occurrence": "1"}]},
    {"spans": [{**span("blue"), "occurrence": 10**30}]},
    {"spans": [{**span("blue"), "direct_vef": "yes"}]},
    {"spans": [{**span("blue"), "evidence_status": "true"}]},
    {"spans": [{**span("blue"), "score": 1}]},
    {"spans": [{**span("")}]},
    {"spans": [{"text": "blue"}]},
    {"spans": [span("blue")] * 600},
    {"spans": [], "answer": "42"},
]


@pytest.mark.parametrize("reply", BAD_REPLIES, ids=lambda reply: json.dumps(reply)[:40])
def test_a_malformed_reply_is_asked_for_once_more(question: Question, reply: Any) -> None:
    with serving(lambda number, request: completion(reply if number == 0 else {"spans": [span("red")]})) as server:
        assert ask(server.url, question) == [Quote("red")]
        assert len(server.requests) == 2
    with serving(lambda number, request: completion(reply)) as server:
        with pytest.raises(RouterError, match="malformed"):
            ask(server.url, question)
        assert len(server.requests) == 2


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b'{"choices": []}', b'{"choices": [{"message": {"content": 5}}]}', b"\xff\xfe"])
def test_what_is_no_chat_completion_is_malformed(question: Question, body: bytes) -> None:
    with serving(lambda number, request: (200, body)) as server, pytest.raises(RouterError, match="malformed"):
        ask(server.url, question)


FAULTS: list[tuple[Answer, str, int]] = [
    ((503, b""), "unreachable", 2),
    ((429, b""), "unreachable", 2),
    ((400, b"no response_format"), "refused: status 400: no response_format", 1),
    ((401, b""), "refused", 1),
    (None, "unreachable", 2),
]


@pytest.mark.parametrize(("answer", "reason", "requests"), FAULTS, ids=lambda value: str(value)[:20])
def test_a_server_in_trouble_is_asked_again_and_one_that_refuses_is_not(question, answer, reason, requests) -> None:
    with serving(lambda number, request: answer) as server:
        with pytest.raises(RouterError, match=reason):
            ask(server.url, question)
        assert len(server.requests) == requests


def test_a_server_that_hangs_or_is_gone(question: Question) -> None:
    with serving(slowly(1.5, completion({"spans": []}))) as server:
        with pytest.raises(RouterError, match=r"timeout: no reply within 0.3 s"):
            ask(server.url, question, timeout=0.3)
        assert len(server.requests) == 1
    with pytest.raises(RouterError, match="unreachable"):
        ask(server.url, question)


def test_a_missing_picture_is_a_reason_too(question: Question) -> None:
    Path(question.media[0].path).rename(Path(question.media[0].path).with_name("other.png"))
    gone = Question("q", (), "", (Media("image", "/nowhere/a.png"),))
    with pytest.raises(RouterError, match=r"media: /nowhere/a.png: No such file"):
        ask("http://127.0.0.1:9/v1", gone)


def rules(*patterns: str) -> list[Quote]:
    return asyncio.run(RulesRouter(RulesRouterConfig(patterns=patterns)).route(Question("q", (), ""), RESPONSE))


def test_patterns_mark_their_groups_or_all_they_match() -> None:
    assert rules(r"\b(?:blue|red)\b") == [Quote("blue"), Quote("red")]
    assert rules(r"<think> (\w+) (\w+) ;") == [Quote("blue"), Quote("circle")]
    assert rules(r"\b9\b") == [Quote("9"), Quote("9", 2)]
    assert rules("green", r"(x)?blue") == []
    assert rules("b", "blue", "b") == [Quote("b"), Quote("blue")]


@pytest.mark.parametrize("text", ["aaaa", "aa a aa", "a a a"])
def test_a_quote_is_found_where_its_pattern_matched(text: str) -> None:
    router = RulesRouter(RulesRouterConfig(patterns=("a+", "aa?")))
    for quote in asyncio.run(router.route(Question("q", (), ""), text)):
        place = find(text, quote)
        assert place is not None
        assert text[slice(*place)] == quote.text
