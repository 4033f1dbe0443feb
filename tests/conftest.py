"""Shared by every test: one thread, no network, no GPU tests without a GPU."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

import headrace  # noqa: F401  before any test imports transformers: lets torchvision import beside CPU torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Soak tests run only when asked for; GPU tests skip with the reason."""
    asked = config.getoption("-m")
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    soak = pytest.mark.skip(reason="long fault test: `make soak`")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if "soak" in item.keywords and "soak" not in asked:
            item.add_marker(soak)
