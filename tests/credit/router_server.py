"""An OpenAI-compatible server of the tests' own, on a real socket, that can also misbehave."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, bytes] | None
"""Status and body, or None to close the connection without a word."""


def completion(content: Any, status: int = 200) -> Answer:
    text = content if isinstance(content, str) else json.dumps(content)
    return status, json.dumps({"id": "1", "choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}).encode()


def span(text: str, occurrence: int = 1, direct: bool = True, status: str = "supported") -> dict[str, Any]:
    return {"text": text, "occurrence": occurrence, "type": "colour", "direct_vef": direct, "evidence_status": status}


class RouterServer:
    """Answers the n-th request (from 0) with ``behave(n, request)``."""

    def __init__(self, behave: Callable[[int, dict[str, Any]], Answer]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = 0
        self._now = 0
        self._connections: list[socket.socket] = []
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                outer._connections.append(self.connection)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    number = len(outer.requests)
                    outer.requests.append({"path": self.path, **body})
                    outer.headers.append(dict(self.headers))
                    outer._now += 1
                    outer.most_at_once = max(outer.most_at_once, outer._now)
                try:
                    answer = behave(number, body)
                finally:
                    with outer._lock:
                        outer._now -= 1
                if answer is None:
                    self.close_connection = True
                    return
                with suppress(OSError):  # the client may have given up
                    self.send_response(answer[0])
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(answer[1])))
                    self.end_headers()
                    self.wfile.write(answer[1])

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def die(self) -> None:
        """Stop listening and break every connection."""
        self._server.shutdown()
        self._server.socket.close()
        self._thread.join()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def serving(behave: Callable[[int, dict[str, Any]], Answer]) -> Iterator[RouterServer]:
    server = RouterServer(behave)
    try:
        yield server
    finally:
        if server._thread.is_alive():
            server.die()


def slowly(seconds: float, answer: Answer) -> Callable[[int, dict[str, Any]], Answer]:
    def behave(number: int, request: dict[str, Any]) -> Answer:
        time.sleep(seconds)
        return answer

    return behave
