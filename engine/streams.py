"""Named random streams: each stochastic choice draws from its own generator.

Switching one method on never moves another's numbers, and a re-queued question draws the same ones again.
"""

import hashlib

import numpy as np


def stream_seed(run_seed: int, purpose: str, epoch: int = 0, query_id: str = "", index: int = 0) -> int:
    """63-bit seed of the stream ``run_seed:purpose:epoch:query_id:index``."""
    key = f"{run_seed}:{purpose}:{epoch}:{query_id}:{index}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") >> 1


def stream(run_seed: int, purpose: str, epoch: int = 0, query_id: str = "", index: int = 0) -> np.random.Generator:
    """Numpy generator of that stream."""
    return np.random.default_rng(stream_seed(run_seed, purpose, epoch, query_id, index))
