"""Stands in for vLLM where only the supervision is tested: ``fake_server.py NAME PORT FOLDER``.

It answers the routes that the supervisor asks; files in FOLDER change how: ``broken`` ends it at once, ``failing`` answers
``/is_paused`` with an error, ``closed`` lets it close its port and hang, ``sharing`` lets it
hold shared memory, whose name it writes to FOLDER/shared.
It has a child that has left its process group and ignores SIGTERM, as a stuck worker would; pids are written to FOLDER/pids.
"""

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

name, port, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
paused = False


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/is_paused" and (folder / "closed").exists():
            (folder / "closed").unlink()
            http.socket.close()
        if self.path == "/is_paused" and (folder / "failing").exists():
            (folder / "failing").unlink()
            return self.answer({"error": "no engine"}, 500)
        self.answer({"data": [{"id": name, "max_model_len": 64}], "is_paused": paused})

    def do_POST(self) -> None:
        global paused
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.startswith("/pause"):
            paused = True
        if self.path.startswith("/inference"):
            return self.answer({"error": {"message": "something broke"}}, 500)
        self.answer({})

    def answer(self, content: Any, code: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


if (folder / "broken").exists():
    print("ValueError: the model cannot be served", flush=True)
    sys.exit(3)
if (folder / "sharing").exists():
    shared = SharedMemory(create=True, size=64)
    (folder / "shared").write_text(shared.name)
stuck = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", stuck], start_new_session=True)
with (folder / "pids").open("a") as file:
    file.write(f"{os.getpid()} {child.pid}\n")
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
try:
    http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
except OSError as error:
    print(f"OSError: {error}", flush=True)
    sys.exit(1)
try:
    http.serve_forever()
except (OSError, ValueError):  # its socket was closed
    time.sleep(600)
