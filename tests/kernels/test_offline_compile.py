"""Every Triton kernel as a GPU would get it, compiled without one: no spills, no stack, shared memory within limits.

The launches are those of the real wrappers, on tensors without storage: a driver that only names its architecture stands in
for the GPU's, and each launch stops after compilation.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

library = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from headrace.kernels import PolicySpec, triton  # noqa: E402
from headrace.kernels.policy_spec import KL_KINDS, TokenStreams  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does not compile")

SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes of shared memory that one program may have, by architecture."""

REGISTER_LIMIT = 128
"""At 8 warps, two programs a multiprocessor."""

ROWS, VOCABULARY = 4096, 151936


class Stub:
    """A driver that knows its target and nothing else."""

    def __init__(self, architecture: int):
        self.target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture(params=SHARED_LIMIT, ids=lambda architecture: f"sm_{architecture}")
def compiled(request, tmp_path, monkeypatch) -> Iterator[tuple[int, list]]:
    """The architecture, and a list that grows by each kernel launched."""
    kernels: list = []
    run = JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **options):
        kernels.append(run(self, *arguments, grid=grid, warmup=True, **options))
        assert all(size <= 65535 for size in grid[1:]), f"{self.__name__}: grid {grid} is too large in y or z"

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(JITFunction, "run", compile_only)
    before = dict(vars(driver))
    driver.set_active(Stub(request.param))
    yield request.param, kernels
    vars(driver).update(before)


def blank(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def launch_everything() -> None:
    """Each kernel in the forms that a training step and a sampler use."""
    logits, targets, vector = blank(ROWS, VOCABULARY), blank(ROWS, dtype=torch.int64), blank(ROWS)
    flags = blank(ROWS, dtype=torch.bool)
    state = triton.statistics(logits, targets, vector)
    triton.statistics(logits, targets, vector, state, 7)
    triton.gradient(logits, targets, vector, state, vector, vector, dtype=torch.bfloat16)
    triton.gradient(logits, targets, vector, state, vector, vector, rows=targets)
    streams = TokenStreams(vector, vector, vector, vector, flags, vector, vector)
    for kind in KL_KINDS:
        spec = PolicySpec(dual_clip=3.0, tis_cap=2.0, kl_coef=0.1, kl_kind=kind)
        triton.token_loss(vector, vector, streams, spec)
    plain = TokenStreams(vector, vector, vector)
    triton.token_loss(vector, vector, plain, PolicySpec("gspo"), vector)
    triton.token_loss(vector, vector, plain, PolicySpec("cispo"))
    for dtype in (torch.bfloat16, torch.float32):
        triton.loss_gradient(logits, targets, vector, streams, spec, dtype=dtype)
    triton.loss_gradient(logits, targets, vector, plain, PolicySpec("cispo"), dtype=torch.bfloat16)
    pair = triton.pair_statistics(logits, logits, targets, vector)
    triton.pair_statistics(logits, logits, targets, vector, pair, 7)
    triton.pair_divergences(logits, logits, vector, pair)
    banned, spared = blank(9, dtype=torch.int64), blank(VOCABULARY, dtype=torch.bool)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows = blank(ROWS, VOCABULARY, dtype=dtype)
        triton.top_token(rows, flags, vector, banned, spared)
        triton.top_token_sample(rows, flags, vector, targets, targets, vector, banned, spared)


def test_kernels_fit_the_machine(compiled, tmp_path, record_property) -> None:
    architecture, kernels = compiled
    launch_everything()
    tool = Path(library.__file__).parent / "backends/nvidia/bin/cuobjdump"
    distinct = {kernel.hash: kernel for kernel in kernels}
    assert {kernel.name for kernel in kernels} == kernel_names()
    for kernel in distinct.values():
        usage = resources(kernel, tool, tmp_path)
        name = f"sm_{architecture} {kernel.name}"
        record_property(name, usage)
        print(name, usage)
        assert usage["STACK"] == 0, f"{name} uses a stack: {usage}"
        assert usage["LOCAL"] == 0, f"{name} spills: {usage}"
        assert usage["SHARED"] <= SHARED_LIMIT[architecture], f"{name}: {usage}"
        assert usage["REG"] <= REGISTER_LIMIT, f"{name}: {usage}"


def resources(kernel, tool: Path, folder: Path) -> dict[str, int]:
    """What `cuobjdump -res-usage` says of a compiled kernel."""
    path = folder / f"{kernel.hash}.cubin"
    path.write_bytes(kernel.asm["cubin"])
    report = subprocess.run([str(tool), "-res-usage", str(path)], capture_output=True, text=True, check=True).stdout
    return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", report)}


def kernel_names() -> set[str]:
    """All functions of the package that are launched."""
    modules = [module for name, module in sys.modules.items() if name.startswith("headrace.kernels.triton.")]
    return {name for module in modules for name in vars(module) if name.endswith("_kernel")}


@pytest.mark.parametrize("compiled", [90], indirect=True)
def test_lengths_cause_no_recompilation(compiled) -> None:
    """Batch sizes, offsets and strides are arguments; only the vocabulary's divisibility by 16 makes another kernel."""
    _, kernels = compiled
    for rows, columns in ((1, 1024), (2, 2048), (17, 4096), (64, 151936), (4097, 32000)):
        logits, targets, vector = blank(rows, columns), blank(rows, dtype=torch.int64), blank(rows)
        state = triton.statistics(logits, targets, vector, None, rows * columns)
        triton.gradient(logits, targets, vector, state, vector, vector, offset=rows)
        triton.token_loss(vector, vector, TokenStreams(vector, vector, vector), PolicySpec(clip_low=1 / (rows + 1)))
        triton.top_token(logits, blank(rows, dtype=torch.bool), vector)
    names = [kernel.name for kernel in {kernel.hash: kernel for kernel in kernels}.values()]
    assert sorted(names) == sorted(set(names))
