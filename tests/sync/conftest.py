"""One vLLM engine for all tests of this folder."""

import importlib.util

import pytest

from tests.sync.in_process import InProcess


@pytest.fixture(scope="session")
def engine(tmp_path_factory):
    """An engine in a child process; a test loads its model into it."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    engine = InProcess(tmp_path_factory.mktemp("engine"))
    yield engine
    engine.close()
