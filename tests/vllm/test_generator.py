"""The question generator's client against a stock vLLM server."""

import asyncio

import httpx
import pytest

from headrace.questions.hopchain.chat import Chat
from headrace.questions.hopchain.roles import Refused, Reply, ServerDown
from headrace.questions.hopchain.settings import ServerConfig
from tests.vllm.conftest import CONTEXT, Served

pytestmark = pytest.mark.vllm


def ask(served: Served, content: str, **fields: object) -> Reply:
    (model,) = httpx.get(f"{served.server.url}/v1/models", timeout=30).json()["data"]
    config = ServerConfig.model_validate(
        {"url": f"{served.server.url}/v1", "model": model["id"], "max_tokens": 12, "patience": 5, **fields}
    )

    async def once() -> Reply:
        chat = Chat(config)
        try:
            return await chat.complete([{"role": "user", "content": content}], temperature=0.7, seed=3)
        finally:
            await chat.close()

    return asyncio.run(once())


def test_a_reply_and_its_tokens_come_back_and_repeat(served: Served) -> None:
    first = ask(served, "a b c , d")
    assert first.cost.calls == 1
    assert first.cost.prompt_tokens > 5
    assert 0 < first.cost.completion_tokens <= 12
    assert ask(served, "a b c , d") == first


def test_a_prompt_that_is_too_long_is_refused_for_itself(served: Served) -> None:
    with pytest.raises(Refused, match="HTTP 400"):
        ask(served, "a " * (CONTEXT + 1))
    assert ask(served, "a").cost.calls == 1


def test_a_model_that_is_not_served_is_one_line(served: Served) -> None:
    with pytest.raises(ServerDown, match="HTTP 404 for model 'another'"):
        ask(served, "a", model="another")
