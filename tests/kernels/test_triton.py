"""The Triton kernels on a CPU. The interpreter is chosen when Triton is imported, so these tests need a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent


@pytest.mark.parametrize("tests", ["interpreted_triton.py", "interpreted_top_token.py"])
def test_in_the_interpreter(tests) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-W", "ignore", str(HERE / tests)]
    done = subprocess.run(command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
