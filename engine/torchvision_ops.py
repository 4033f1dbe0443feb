"""Lets PyPI's torchvision import beside a CPU build of torch.

PyPI's wheel is linked against CUDA; where that is absent its C++ operators silently fail to load, and the import then dies on
``operator torchvision::nms does not exist`` while registering shape functions for them. transformers' image and video processors need only
torchvision's Python transforms. So, just before those registrations run, the two operators are declared without an implementation:
transforms work, and calling an operator says that its kernel is missing. Nothing happens with a CUDA build of torch, or where the
operators did load.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

OPERATORS = ("nms", "qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_library: Any = None  # a torch library's declarations live as long as the object


def declare() -> None:
    """Declare the operators that are missing; needs ``torchvision.extension`` to have tried to load them."""
    global _library
    import torch

    if torch.version.cuda is not None or _library is not None or hasattr(torch.ops.torchvision, "nms"):
        return
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in OPERATORS:
        _library.define(operator + SCHEMA)


class _BeforeRegistrations(importlib.abc.MetaPathFinder):
    """Finds nothing itself; being asked for the registrations is the moment to declare."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.startswith("torchvision._") and fullname.endswith("_registrations"):
            declare()
        return None


def install() -> None:
    """Be asked before torchvision's registrations are imported. Costs nothing until then; imports neither torch nor torchvision."""
    if not any(isinstance(finder, _BeforeRegistrations) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeRegistrations())
