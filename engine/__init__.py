"""Headrace: reinforcement learning with verifiable rewards on language and vision-language models."""

from headrace import torchvision_ops
from headrace.config import Config, load_config

torchvision_ops.install()  # before anything imports transformers, in every process of ours

__all__ = ["Config", "load_config"]
__version__ = "0.1.0"
