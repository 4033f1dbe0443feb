"""The client of OpenAI-compatible servers, against a real one of the tests' own."""

import asyncio
from typing import Any

import pytest

from headrace.questions.hopchain.chat import Chat
from headrace.questions.hopchain.records import Cost
from headrace.questions.hopchain.roles import Refused, Reply, ServerDown
from headrace.questions.hopchain.settings import ServerConfig
from tests.questions.hopchain.chat_server import serving

HELLO = [{"role": "user", "content": "Hello"}]


def ask(url: str, count: int = 1, **fields: Any) -> list[Reply]:
    async def all_of_them() -> list[Reply]:
        chat = Chat(ServerConfig(**{"url": url, "model": "m", "patience": 5, **fields}))
        try:
            return await asyncio.gather(*(chat.complete(HELLO, temperature=0.7, seed=number, json_mode=True) for number in range(count)))
        finally:
            await chat.close()

    return asyncio.run(all_of_them())


def test_a_reply_and_what_it_cost() -> None:
    with serving(spoil=lambda number, role: "Good day.") as server:
        (reply,) = ask(server.url, max_tokens=9)
        assert reply == Reply("Good day.", Cost(calls=1, prompt_tokens=100, completion_tokens=7))
        (request,) = server.requests
    assert request["path"] == "/v1/chat/completions"
    sent = {name: request[name] for name in ("model", "messages", "max_tokens", "temperature", "seed")}
    assert sent == {"model": "m", "messages": HELLO, "max_tokens": 9, "temperature": 0.7, "seed": 0}
    assert "response_format" not in request


def test_json_mode_and_key_are_sent_where_they_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    with serving(spoil=lambda number, role: "{}") as server:
        ask(server.url, json_mode=True, key_variable="SOME_KEY")
    assert server.requests[0]["response_format"] == {"type": "json_object"}
    assert server.requests[0]["key"] == "Bearer secret"
    monkeypatch.delenv("SOME_KEY")
    with pytest.raises(ValueError, match="the environment variable SOME_KEY"):
        ask("http://127.0.0.1:1/v1", key_variable="SOME_KEY")


def test_what_fails_in_passing_is_sent_again_and_counted() -> None:
    statuses = {0: 503, 1: 429}
    with serving(spoil=lambda number, role: statuses.get(number, "at last")) as server:
        (reply,) = ask(server.url)
    assert (reply.text, reply.cost.calls) == ("at last", 3)


def test_a_server_that_stays_away_is_one_line() -> None:
    with serving() as server:
        url = server.url
    with pytest.raises(ServerDown, match=r"http://127\.0\.0\.1:\d+/v1: the server of m does not answer \(.+, \d tries in \d s\)") as error:
        ask(url, patience=1)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("status", "expected"), [(400, Refused), (413, Refused), (401, ServerDown), (404, ServerDown)])
def test_what_no_repetition_mends_is_raised_at_once(status: int, expected: type[Exception]) -> None:
    with serving(spoil=lambda number, role: status) as server, pytest.raises(expected, match=f"HTTP {status}"):
        ask(server.url)
    assert len(server.requests) == 1


def test_no_more_requests_are_on_their_way_than_allowed() -> None:
    import threading
    import time

    lock, inside, most = threading.Lock(), 0, 0

    def slow(number: int, role: str) -> str:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.05)
        with lock:
            inside -= 1
        return "ok"

    with serving(spoil=slow) as server:
        assert len(ask(server.url, 9, concurrency=3)) == 9
    assert most == 3


def test_a_url_without_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a URL"):
        ServerConfig(url="localhost:8000", model="m")
