"""Peak memory beyond inputs and results of one call.

On a GPU from torch's allocator. On a CPU from Linux's high-water mark of a process of its own for each call, in which freed memory goes
back to the system at once: ``python -m headrace.bench.memory`` starts those, it is not a command for people. A fresh process also counts
the scratch memory that our kernels keep from one call to the next.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from headrace.bench.cases import Size
from headrace.bench.works import built, needs_compiling

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def measure(tasks: Iterable[tuple[str, str, Size]], device: torch.device, threads: int) -> Iterator[tuple[str, str, Size, int | str]]:
    """Extra bytes, or why there are none, of (operation, name, size) tasks."""
    if device.type == "cuda":
        for operation, name, size in tasks:
            yield operation, name, size, attempt(operation, name, size, device)
        return
    if not CLEAR.exists():
        yield from ((*task, "needs Linux") for task in tasks)
        return
    listed = [(operation, name, str(size)) for operation, name, size in tasks]
    command = [sys.executable, "-m", "headrace.bench.memory", str(threads), json.dumps(listed)]
    child = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True)
    lines = [line for line in child.stdout.splitlines() if line.startswith("[")]
    for number, (operation, name, size) in enumerate(listed):
        extra = json.loads(lines[number])[0] if number < len(lines) else f"the measuring process ended with status {child.returncode}"
        yield operation, name, Size.parse(size), extra


WARM_UP = Size(128, 8, 512)


def attempt(operation: str, name: str, size: Size, device: torch.device) -> int | str:
    """Extra bytes of the first call of its size, after a small one with which libraries set themselves up."""
    try:
        built(operation, name, WARM_UP, device)()
        work = built(operation, name, size, device)
        if needs_compiling(operation, name):
            work()
        return extra_bytes(work, device)
    except Exception as error:  # a peer may fail in any way; the others go on
        return " ".join(f"{type(error).__name__}: {error}".split())[:120]


def extra_bytes(work: Callable[[], Mapping[str, Tensor]], device: torch.device) -> int:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        results = work()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
    else:
        CLEAR.write_text("5", encoding="ascii")
        before = _resident("VmRSS")
        results = work()
        peak = _resident("VmHWM")
    return max(0, peak - before - sum(result.nbytes for result in results.values()))


def _resident(field: str) -> int:
    """A line of /proc/self/status in bytes."""
    line = next(line for line in STATUS.read_text(encoding="ascii").splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    for operation, name, size in json.loads(sys.argv[2]):
        child = os.fork()  # nothing has run in this process yet, so there are no threads to lose
        if child == 0:
            print(json.dumps([attempt(operation, name, Size.parse(size), torch.device("cpu"))]), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps([f"ended with status {status}, probably out of memory"]), flush=True)


if __name__ == "__main__":
    main()
