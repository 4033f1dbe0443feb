"""An OpenAI-compatible server whose model is a few rules: it captions pictures, writes and judges as the small world does."""

import base64
import hashlib
import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from PIL import Image

from headrace.questions.hopchain.prompt_texts import prompt
from headrace.questions.hopchain.world import judge, writer
from headrace.questions.hopchain.world.script import ACTIONS, COLOURS, PLACES, SHAPES, SIDES, sentence


class RuleServer(ThreadingHTTPServer):
    """``spoil(number, role)`` may answer in place of the model: a status, text, or None to let it answer."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int = 0, spoil: Callable[[int, str], int | str | None] = lambda number, role: None) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.spoil = spoil
        self.guard = threading.Lock()
        self.requests: list[dict[str, Any]] = []
        self.roles: list[str] = []
        self.shown: dict[str, int] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def answer(self, role: str, content: Any) -> str:
        if role == "caption":
            return self._caption(content)
        request = json.loads(content)
        if role == "judge":
            return judge.judge(request)
        seed = int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big")
        return f"<think>Let me see.</think>\n```json\n{writer.write(request, np.random.default_rng(seed))}\n```"

    def _caption(self, content: list[dict[str, Any]]) -> str:
        """A sentence of its own for every picture shown for the first time."""
        pictures = [part["image_url"]["url"].removeprefix("data:image/jpeg;base64,") for part in content if part["type"] == "image_url"]
        for picture in pictures:
            Image.open(io.BytesIO(base64.b64decode(picture))).verify()
        with self.guard:
            number = self.shown.setdefault(hashlib.sha256(pictures[0].encode()).hexdigest(), len(self.shown))
        places, shapes = list(PLACES), list(SHAPES)
        words = (list(options)[(7 * number + shift) % len(options)] for shift, options in enumerate((COLOURS, SIDES, ACTIONS)))
        colour, side, action = words
        return sentence(places[number % len(places)], colour, shapes[number // len(places) % len(shapes)], side, action)


class _Handler(BaseHTTPRequestHandler):
    server: RuleServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        messages = body["messages"]
        role = {prompt("write"): "write", prompt("judge"): "judge"}.get(messages[0]["content"] if len(messages) > 1 else "", "caption")
        with self.server.guard:
            number = len(self.server.requests)
            self.server.requests.append({"path": self.path, "key": self.headers.get("Authorization"), **body})
            self.server.roles.append(role)
        spoiled = self.server.spoil(number, role)
        if isinstance(spoiled, int):
            self._reply(spoiled, {"error": {"message": f"told to answer {spoiled}"}})
            return
        text = spoiled if spoiled is not None else self.server.answer(role, messages[-1]["content"])
        usage = {"prompt_tokens": 100, "completion_tokens": 7}
        self._reply(200, {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage})

    def _reply(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        pass


@contextmanager
def serving(port: int = 0, spoil: Callable[[int, str], int | str | None] = lambda number, role: None) -> Iterator[RuleServer]:
    """A server in a thread of its own."""
    server = RuleServer(port, spoil)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)
