"""Lets vLLM's GPU runner work on a CPU: Triton gets a driver named ``cpu`` and interprets its kernels. For tests in their own process.

Import before anything imports vLLM.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton.backends
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class CpuDriver:
    """What vLLM and Triton ask of a driver before they launch an interpreted kernel."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_current_device(self) -> int:
        return 0

    def get_device_interface(self) -> object:
        return torch.cpu

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class CpuBackend:
    compiler = None
    driver = CpuDriver


triton.backends.backends["cpu"] = CpuBackend
driver.set_active(CpuDriver())
