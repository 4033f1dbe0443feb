"""One tiny policy for all tests of the room."""

import pytest

from tests.sampling.tiny_policy import Tiny, build


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return build(tmp_path_factory.mktemp("tiny"))
