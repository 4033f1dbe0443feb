"""What a push needs from running vLLM servers, and how it talks to all of them at once."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class SyncError(RuntimeError):
    """Weights did not arrive whole and right. The servers stay paused; a complete new push mends them."""


class Server(Protocol):
    """The control routes of one vLLM server; every call blocks until it is done."""

    @property
    def name(self) -> str:
        """Its address, ``http://host:port``."""

    @property
    def generation(self) -> int:
        """Counts its starts: the weights of a new generation are the disk's."""

    def pause(self, mode: str) -> None:
        """Schedule nothing more and empty every cache; ``keep`` freezes running requests, ``abort`` ends them."""

    def resume(self) -> None:
        """Schedule again; frozen requests go on, under the weights of now."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect its workers to the learner."""

    def start_weight_update(self) -> None:
        """Make its workers ready for new weights."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let its workers receive weights."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Make the received weights those of the model, and ``weight_version`` the label of the tokens from here on."""

    def call_workers(self, method: str) -> list[dict[str, Any]]:
        """What a method of ``worker.Extension`` returns in each of its worker processes."""

    def world_size(self) -> int:
        """Number of its worker processes."""

    def score(self, token_ids: Sequence[int]) -> Sequence[float]:
        """Log-probs [L - 1] in nats of the tokens after the first, at temperature 1 and with nothing masked or banned."""


def on_each(servers: Sequence[Server], what: str, call: Callable[[Server], T], deadline: float) -> list[T]:
    """``call`` on every server at once; the results in the order of the servers.

    Raises:
        SyncError: a call failed or took longer than ``deadline`` seconds; the message names the server and ``what``.
    """
    return begin_on_each(servers, what, call, deadline)()


def begin_on_each(servers: Sequence[Server], what: str, call: Callable[[Server], T], deadline: float) -> Callable[[], list[T]]:
    """Begin ``on_each`` and return a function that waits for its end. A call that nobody waits for any more is left behind."""
    outcomes: queue.Queue[tuple[int, T | None, Exception | None]] = queue.Queue()

    def run(index: int) -> None:
        try:
            outcomes.put((index, call(servers[index]), None))
        except Exception as error:
            outcomes.put((index, None, error))

    for index in range(len(servers)):
        threading.Thread(target=run, args=(index,), name=f"sync-{index}", daemon=True).start()
    end = time.monotonic() + deadline

    def wait() -> list[T]:
        results: dict[int, Any] = {}
        while len(results) < len(servers):
            try:
                index, result, failure = outcomes.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                late = ", ".join(server.name for index, server in enumerate(servers) if index not in results)
                raise SyncError(f"{late}: {what} took longer than {deadline:g} s") from None
            if failure is not None:
                raise SyncError(f"{servers[index].name}: {what} failed ({' '.join(str(failure).split())[:500]})") from failure
            results[index] = result
        return [results[index] for index in range(len(servers))]

    return wait
