"""Lets torchvision import beside a CPU build of torch in every process of a server.

vLLM imports transformers' vision processors, and with them torchvision, before it imports anything of ours, and it does so in
processes that it starts itself. Python runs a ``sitecustomize`` before all of that. The environment's own one runs after this.

It also makes garbage collection rarer: importing vLLM allocates objects that stay, and looking through them again and again is a tenth
of the ten seconds that each process takes.
"""

import gc
import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).resolve().parent


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec, path
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gc.set_threshold(100_000, 50, 50)
_load("headrace_torchvision_ops", _HERE.parents[2] / "torchvision_ops.py").install()
_other = PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if Path(entry).resolve() != _HERE])
if _other is not None and _other.origin is not None:
    _load("sitecustomize", Path(_other.origin))
