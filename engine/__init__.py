"""Headrace: reinforcement learning with verifiable rewards on language and vision-language models."""

from headrace.config import Config, load_config

__all__ = ["Config", "load_config"]
__version__ = "0.1.0"
