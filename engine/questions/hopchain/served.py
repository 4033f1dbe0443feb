"""Captioner, writer and judge behind OpenAI-compatible servers."""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from headrace.questions.hopchain.chat import Chat
from headrace.questions.hopchain.judging import Fault
from headrace.questions.hopchain.prompt_texts import prompt
from headrace.questions.hopchain.records import Candidate, Caption, Shot, Specification, Video
from headrace.questions.hopchain.render import render
from headrace.questions.hopchain.roles import Reply
from headrace.questions.hopchain.settings import ModelsConfig
from headrace.streams import stream_seed


class ServedModels:
    """The roles of ``roles.Models``, each a prompt and a JSON document; nothing is sampled at first, rewrites are."""

    def __init__(self, config: ModelsConfig, rewrite_temperature: float, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.captioner = Chat(config.captioner, transport=transport)
        self.writer = Chat(config.writer, transport=transport)
        self.judge_chat = self.writer if config.judge is None else Chat(config.judge, transport=transport)
        self.rewrite_temperature = rewrite_temperature

    async def close(self) -> None:
        for chat in {self.captioner, self.writer, self.judge_chat}:
            await chat.close()

    async def caption(self, video: Video, shot: Shot, frames: Sequence[bytes]) -> Reply:
        pictures = [
            {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64," + base64.b64encode(frame).decode()}} for frame in frames
        ]
        content = [*pictures, {"type": "text", "text": prompt("caption")}]
        return await self.captioner.complete([{"role": "user", "content": content}])

    async def write(self, captions: Sequence[Caption], specifications: Sequence[Specification]) -> Reply:
        return await self.writer.complete(_messages("write", write_request(captions, specifications)), json_mode=True)

    async def judge(self, captions: Sequence[Caption], candidate: Candidate, attempt: int) -> Reply:
        return await self.judge_chat.complete(_messages("judge", judge_request(captions, candidate)), json_mode=True)

    async def rewrite(self, captions: Sequence[Caption], specification: Specification, attempt: int, faults: Sequence[Fault]) -> Reply:
        request = write_request(captions, [specification])
        if faults:
            request["faults"] = [fault.model_dump() for fault in faults]
        seed = stream_seed(0, "hopchain/rewrite", 0, specification.question_id, attempt) % 2**31  # servers take 32 bits
        return await self.writer.complete(_messages("write", request), temperature=self.rewrite_temperature, seed=seed, json_mode=True)


def write_request(captions: Sequence[Caption], specifications: Sequence[Specification]) -> dict[str, Any]:
    """What the writer reads."""
    return {"timeline": timeline(captions), "specifications": [_specification(specification) for specification in specifications]}


def judge_request(captions: Sequence[Caption], candidate: Candidate) -> dict[str, Any]:
    """What the judge reads: the rendered question and every hop of it."""
    specification, hops = candidate.specification, candidate.hops
    rows = [
        {
            "hop": number + 1,
            **hop.model_dump(include={"type", "scenes", "fact", "yes", "no", "value", "quote"}),
            **_routes(specification, number),
        }
        for number, hop in enumerate(hops)
    ]
    return {"timeline": timeline(captions), "question": {"text": render(specification, hops), "hops": rows}}


def timeline(captions: Sequence[Caption]) -> list[dict[str, Any]]:
    """Captions as writer and judge read them."""
    return [{"segment": c.shot, "start": c.start, "end": c.end, "digest": c.digest, "text": c.text} for c in captions]


def _specification(specification: Specification) -> dict[str, Any]:
    hops = [
        {"hop": number + 1, "type": kind, "yes": yes, "no": no, **_routes(specification, number)}
        for number, (kind, (yes, no)) in enumerate(zip(specification.types, specification.numbers, strict=True))
    ]
    return {"index": specification.index, "link": specification.link, "hops": hops}


def _routes(specification: Specification, number: int) -> dict[str, Any]:
    router = specification.router_of(number)
    routed = next((target for source, target in specification.routes if source == number), None)
    return {"routed_by": None if router is None else router + 1, "routes": None if routed is None else routed + 1}


def _messages(name: Any, request: Mapping[str, Any]) -> list[dict[str, str]]:
    return [{"role": "system", "content": prompt(name)}, {"role": "user", "content": json.dumps(request, ensure_ascii=False)}]
