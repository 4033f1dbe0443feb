"""The control routes of one vLLM server: pausing, new weights, scoring a sequence, and what it was started with."""

from collections.abc import Callable, Sequence
from typing import Any

import httpx

from headrace.records import EngineDown
from headrace.sampling.vllm.exchange import ROUTE

TIMEOUT = 300.0
"""Seconds for one call; receiving a bucket of weights is one."""


class Control:
    """Blocking client of one server's routes. Each call raises `EngineDown` when the server fails, refuses, or does not answer in time.

    Calls may come from several threads.
    """

    def __init__(self, url: str, *, generation: Callable[[], int] = lambda: 0, timeout: float = TIMEOUT) -> None:
        """Args:
        url: ``http://host:port``.
        generation: counts its starts (``Supervisor.generation``).
        timeout: seconds for one call.
        """
        self.name = url.rstrip("/")
        self._generation = generation
        # A connection for each call: the server drops the one that it answered with an internal error, and a call on it would fail too.
        once = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(base_url=self.name, timeout=httpx.Timeout(timeout, connect=10.0), limits=once, trust_env=False)

    @property
    def generation(self) -> int:
        """Counts its starts: the weights of a new generation are the disk's."""
        return self._generation()

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def pause(self, mode: str = "keep") -> None:
        """Schedule nothing more and empty the prefix, multimodal and encoder caches.

        ``keep`` freezes running requests until `resume`, ``abort`` ends them with what they have.
        """
        self._call("POST", "/pause", params={"mode": mode, "clear_cache": "true"})

    def resume(self) -> None:
        """Schedule again; frozen requests go on, recomputed under the weights of now."""
        self._call("POST", "/resume")

    def paused(self) -> bool:
        """Whether it is paused."""
        return bool(self._call("GET", "/is_paused")["is_paused"])

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect its workers to the learner."""
        self._call("POST", "/init_weight_transfer_engine", json={"init_info": init_info})

    def start_weight_update(self) -> None:
        """Make its workers ready for new weights."""
        self._call("POST", "/start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let its workers receive weights."""
        self._call("POST", "/update_weights", json={"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Make the received weights those of the model, and ``weight_version`` the label of the tokens from here on."""
        self._call("POST", "/finish_weight_update", json={"weight_version": weight_version})

    def set_version(self, version: int) -> None:
        """Label the tokens from here on."""
        self._call("POST", "/update_weight_version", json={"new_version": str(version)})

    def call_workers(self, method: str) -> list[dict[str, Any]]:
        """What a method of the worker extension returns in each worker process."""
        results: list[dict[str, Any]] = self._call("POST", "/collective_rpc", json={"method": method})["results"]
        return results

    def world_size(self) -> int:
        """Number of its worker processes."""
        return int(self._call("GET", "/get_world_size")["world_size"])

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs [L - 1] in nats of the tokens after the first, at temperature 1 and with nothing masked or banned.

        Goes before every other request that waits.
        """
        ids = [int(token) for token in token_ids]
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        answer = self._call("POST", ROUTE, json={"token_ids": ids, "sampling_params": sampling, "priority": -1})
        return [found[str(token)]["logprob"] for token, found in zip(ids[1:], answer["prompt_logprobs"][1:], strict=True)]

    def version(self) -> str:
        """vLLM's version."""
        return str(self._call("GET", "/version")["version"])

    def generate(self, body: dict[str, Any]) -> bytes:
        """The answer to one drawing request (`exchange`)."""
        content: bytes = self._send("POST", ROUTE, json=body).content
        return content

    def info(self) -> dict[str, Any]:
        """What it was started with, as vLLM's own configuration. Takes seconds: it also collects the machine's description."""
        found: dict[str, Any] = self._call("GET", "/server_info", params={"config_format": "json"})["vllm_config"]
        return found

    def _call(self, method: str, path: str, **arguments: Any) -> Any:
        response = self._send(method, path, **arguments)
        return response.json() if response.content else None

    def _send(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        try:
            response = self._client.request(method, path, **arguments)
        except httpx.TimeoutException:
            raise EngineDown(f"{self.name}: no answer to {path} in time") from None
        except httpx.TransportError as error:
            raise EngineDown(f"{self.name}: {path} failed ({type(error).__name__}: {error})") from None
        if response.status_code >= 400:
            raise EngineDown(f"{self.name}: {path} failed with HTTP {response.status_code} ({error_text(response)})")
        return response


def error_text(response: httpx.Response) -> str:
    """The one line that an error response carries."""
    try:
        content = response.json()
    except ValueError:
        content = response.text
    if isinstance(content, dict):
        content = content.get("error", content.get("detail", content))
    if isinstance(content, dict):
        content = content.get("message", content)
    return " ".join(str(content).split())[:500]
