"""A process that scores, and the engine's handle on it.

The process is a fresh interpreter (``python -m headrace.rewards.worker``), not a fork: the engine holds torch and its
threads, and a script without a main guard is not run a second time. It imports no torch. Jobs arrive pickled on a
socket, outcomes leave as JSON lines. It ends when the socket closes; in case it hangs just then, the kernel ends it
with its parent (Linux) or at its alarm.
"""

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from math import ceil
from typing import BinaryIO

from headrace.config import RewardConfig
from headrace.records import Question, Reward
from headrace.rewards.judge import Judge, Outcome, resolve
from headrace.rewards.scoring import answers_match

START_SECONDS = 120.0  # a loaded machine still starts an interpreter within this
_GRACE = 5  # seconds after the timeout at which a worker that nobody killed ends itself
_PR_SET_PDEATHSIG = 1  # Linux: signal the process when its parent ends


class WorkerProcess:
    """One worker; ``call`` starts it when needed and replaces it after a hang or a crash. For use by one thread at a time."""

    def __init__(self, config: RewardConfig, reward: str | None, verify: str | None) -> None:
        """``reward`` and ``verify`` are ``module:function`` names."""
        self._timeout = config.timeout
        self._settings = pickle.dumps((config, reward, verify))
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._stopped = False

    def start(self) -> None:
        """Start the process and wait until it has imported all it needs.

        Raises:
            ValueError: it cannot start, or a function cannot be imported; the message says why.
        """
        self._end()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", "-m", "headrace.rewards.worker", str(os.getpid())]
        self._socket, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment, start_new_session=True
            )
        except OSError as error:
            raise ValueError(f"reward worker: cannot be started ({error})") from error
        finally:
            theirs.close()
        if self._stopped:  # after the lines above: either `stop` saw the process, or this line sees the flag
            self._end()
            raise ValueError("reward worker: the pool is closed")
        hello = self._exchange(self._settings, START_SECONDS)
        if hello.failure:
            self._end()
            raise ValueError(f"reward worker: {hello.detail}")

    def call(self, question: Question, text: str) -> Outcome:
        """Score one response; a worker that takes longer than the configured timeout is killed."""
        try:
            job = pickle.dumps((question, text))
            if self._process is None or self._process.poll() is not None:
                self.start()
        except Exception as error:  # what cannot be pickled raises whatever it likes
            return Outcome(None, "error", f"{type(error).__name__}: {error}")
        return self._exchange(job, self._timeout)

    def stop(self) -> None:
        """End the process for good; the one method that another thread may call."""
        self._stopped = True
        if (process := self._process) is not None:
            _kill(process)

    def _end(self) -> None:
        """End the process and what it started; the next call starts a new one."""
        process, self._process = self._process, None
        if process is not None:
            _kill(process)
            process.wait()
        if self._socket is not None:
            self._socket.close()

    def _exchange(self, message: bytes, seconds: float) -> Outcome:
        """Send and receive within ``seconds``; a worker that is late or gone is ended."""
        assert self._socket is not None
        self._socket.settimeout(seconds)
        reply = bytearray()
        try:
            self._socket.sendall(message)
            while not reply.endswith(b"\n"):
                part = self._socket.recv(1 << 16)
                if not part:
                    raise ConnectionError("closed by the worker")
                reply += part
        except TimeoutError:
            self._end()
            return Outcome(None, "timeout", f"no verdict within {seconds:g} s, the worker was killed")
        except OSError:
            self._end()
            return Outcome(None, "error", "the worker died")
        fields = json.loads(reply)
        return Outcome(Reward(**fields["reward"]) if fields["reward"] else None, fields["failure"], fields["detail"])


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the worker leads a session of its own


# ------------------------------------------------------------------------------------------------- inside the process


def _end_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent ends, even while a verifier holds the interpreter."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the request
        os._exit(0)


def _warm_up(config: RewardConfig, names: Sequence[str]) -> None:
    """Do the slow first things before the clock of a first response runs: Math-Verify's imports, ``warm_up()`` of named modules."""
    if config.verifier == "math_verify":
        answers_match("x", "1/2", verifier="math_verify")
    for name in names:
        module = sys.modules[name.partition(":")[0]]
        if callable(warm_up := getattr(module, "warm_up", None)):
            warm_up()


def _reply(out: BinaryIO, outcome: Outcome) -> None:
    out.write(json.dumps(asdict(outcome)).encode() + b"\n")
    out.flush()


def main() -> None:
    """Serve until the socket closes."""
    _end_with_parent(int(sys.argv[1]))
    jobs, out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(0), "wb")  # one socket, both ways
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a verifier that reads finds nothing,
    os.dup2(2, 1)  # and what it prints goes where errors go
    try:
        config, reward, verify = pickle.load(jobs)
        judge = Judge(config, resolve(reward) if reward else None, resolve(verify) if verify else None)
        _warm_up(config, [name for name in (reward, verify) if name])
    except Exception as error:
        _reply(out, Outcome(None, "error", f"{type(error).__name__}: {error}"))
        return
    _reply(out, Outcome(None))
    while True:
        try:
            question, text = pickle.load(jobs)
        except (EOFError, pickle.UnpicklingError):  # the engine ended, perhaps in the middle of a write
            return
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(ceil(config.timeout) + _GRACE)
        outcome = judge(question, text)
        signal.alarm(0)
        _reply(out, outcome)


if __name__ == "__main__":
    main()
