"""Headrace: reinforcement learning with verifiable rewards on language and vision-language models."""

import logging
import os
from typing import TYPE_CHECKING, Any

from headrace import torchvision_ops
from headrace.config import Config, load_config

# Both are read when torch loads, later. Threads that spin while they wait cost a shared machine several times the run's own work;
# large tensors on huge pages spare a fused head's fresh weight gradient thousands of page faults, up to a tenth of its time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# transformers imports torchao where it is installed, which then warns about its kernels for other devices.
for _noisy in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)
torchvision_ops.install()  # before anything imports transformers, in every process of ours

if TYPE_CHECKING:
    from headrace.trainer import Trainer, TrainResult

__all__ = ["Config", "TrainResult", "Trainer", "load_config"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """``Trainer`` and ``TrainResult`` on first use: torch and transformers stay out of processes that only need a record."""
    if name in ("Trainer", "TrainResult"):
        from headrace import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
