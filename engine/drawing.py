"""An engine that draws with the weights of a model directory and nothing else: for evaluation and for filters, not for training."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from headrace.config import Config, VLLMEngineConfig
from headrace.encoding import Encoder
from headrace.records import Engine


@asynccontextmanager
async def drawing(config: Config, directory: Path, encoder: Encoder) -> AsyncIterator[Engine]:
    """The engine of ``config.engine``; servers of its own are started, and stopped at the end.

    Raises:
        EngineDown: a server does not start.
        ValueError: the directory is no model.
    """
    if isinstance(config.engine, VLLMEngineConfig):
        from headrace.rollout.servers import start_servers
        from headrace.sampling.vllm.client import VLLMEngine

        servers = await asyncio.to_thread(start_servers, config, config.engine, directory, encoder, None)
        engine = VLLMEngine(servers.urls, encoder, config.engine)
        try:
            yield engine
        finally:
            await engine.close()
            await asyncio.to_thread(servers.close)
        return
    import torch

    from headrace.policy.model import Policy
    from headrace.sampling.local import LocalEngine

    policy = Policy.load(directory, config.model, "cuda" if torch.cuda.is_available() else "cpu")
    yield LocalEngine(policy, encoder, batch_rows=config.sampling.batch_rows)
