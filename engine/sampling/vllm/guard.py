"""Runs one server and takes all of its processes down when the process it serves is gone, also after kill -9.

    python guard.py PARENT_PID PID_FD COMMAND …

Run by path: of this package it needs nothing, so it starts in milliseconds and stays at ten megabytes. vLLM's server has children
and grandchildren, which outlive it when it is killed; the guard is what they are handed to then (a subreaper), so it finds them
all. It ends with the server's exit code, after the last of them.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_SECONDS = 5.0
"""From SIGTERM to SIGKILL. A server that is to go has no request left worth waiting for."""
_SUBREAPER, _PARENT_DEATH_SIGNAL = 36, 1  # of prctl(2)
REAP_SECONDS = 20.0
TRACKER_SECONDS = 5.0
"""Time that resource trackers have for their work."""


def main() -> int:
    """Start the command in a process group of its own and stay until it or the parent ends, or SIGTERM asks for its end."""
    parent, descriptor, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_SUBREAPER, 1, 0, 0, 0)
    waking, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # only wakes
    try:
        watched = os.pidfd_open(parent)
    except ProcessLookupError:
        return 1
    if os.getppid() != parent:
        return 1
    server = subprocess.Popen(command, process_group=0, preexec_fn=lambda: prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0))
    os.write(descriptor, f"{server.pid}\n".encode())
    os.close(descriptor)
    running = os.pidfd_open(server.pid)
    ready, _, _ = select.select([watched, running, waking], [], [])
    if running not in ready:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        select.select([running], [], [], 0 if watched in ready else GRACE_SECONDS)
    server.kill()
    code = server.wait()
    _reap()
    return code if code >= 0 else 128 - code


def _reap() -> None:
    """Kill whatever is left below this process, and wait until it is gone, so that its memory is free again.

    Python's resource trackers end by themselves once all others are gone, and remove what those left in shared memory: they may.
    """
    end = time.monotonic() + REAP_SECONDS
    while time.monotonic() < end:
        children = _children()
        others = [child for child in children if not _is_tracker(child)]
        for child in others or (children if time.monotonic() > end - REAP_SECONDS + TRACKER_SECONDS else ()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.02)


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _children() -> list[int]:
    return [int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]


if __name__ == "__main__":
    sys.exit(main())
