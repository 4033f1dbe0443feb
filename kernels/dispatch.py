"""Which implementation of the row operations serves a tensor."""

import importlib
import os
from types import ModuleType

import torch

IMPLEMENTATIONS = ("reference", "native", "triton", "cuda")

PREFERRED = {"cpu": ("native",), "cuda": ("cuda", "triton")}
"""By device type, the first that imports here; anything else is served by the reference. `cuda` itself hands to Triton what
its kernels are not built for."""


def choose(device: torch.device, dtype: torch.dtype, implementation: str | None = None) -> ModuleType:
    """The module of row operations for tensors of this device and dtype.

    `implementation`, else the environment variable HEADRACE_KERNELS, names one of `IMPLEMENTATIONS` and must then be
    available; else the device decides. float64 is always served by the reference, the only one that computes in it.
    """
    name = implementation or os.environ.get("HEADRACE_KERNELS") or None
    if name is not None and name not in IMPLEMENTATIONS:
        raise ValueError(f"kernels: implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {name!r}")
    if dtype == torch.float64:
        return load("reference")
    if name is not None:
        if not serves(name, device):
            raise ValueError(f"kernels: implementation {name!r} cannot serve tensors on {device}; leave the choice to the device")
        return load(name)
    return load(next((each for each in PREFERRED.get(device.type, ()) if available(each)), "reference"))


def serves(name: str, device: torch.device) -> bool:
    """Whether an implementation can read memory of this device at all; Triton's interpreter reads that of the CPU."""
    if device.type == "cpu":
        return name in ("reference", "native") or (name == "triton" and os.environ.get("TRITON_INTERPRET") == "1")
    return name != "native"


def load(name: str) -> ModuleType:
    return importlib.import_module(f"headrace.kernels.{name}")


def available(name: str) -> bool:
    """Whether an implementation imports on this machine (its extension built, its compiler installed)."""
    if name not in _available:
        try:
            load(name)
            _available[name] = True
        except ImportError:
            _available[name] = False
    return _available[name]


_available: dict[str, bool] = {}
