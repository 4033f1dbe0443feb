"""The machine: GPUs, driver, cores, memory, shared memory, disk, ports, open files."""

import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from headrace.config import Config, VLLMEngineConfig
from headrace.doctor.check import Check
from headrace.sampling.vllm.launch import transport

SHARED_MEMORY = Path("/dev/shm")
TORCHRUN_PORT = 29500
_GIB = 2**30
_DEADLINE = 20.0  # seconds that nvidia-smi or a named server may take


def machine(config: Config | None) -> Iterator[Check]:
    """Every check of the machine; some ask for more where a configuration says what the run needs."""
    yield gpus()
    if torch.cuda.is_available():
        yield driver()
        yield nccl()
    yield cores()
    yield memory()
    yield shared_memory(config)
    yield disk(Path.cwd() if config is None else config.run.folder)
    yield from ports(config)
    yield open_files(config)


def gpus() -> Check:
    """Devices that torch can use; a machine without any is fine, one whose GPUs torch cannot use is not."""
    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") is None:
            return Check("GPU", "ok", "none; everything runs on the CPU")
        reason = "torch is a CPU build" if torch.version.cuda is None else f"torch for CUDA {torch.version.cuda} cannot use the driver"
        return Check("GPU", "fail", f"nvidia-smi is there, but {reason}", "install a torch that fits the driver: constraints/gpu.txt")
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    kinds = {(device.name, device.total_memory // _GIB, (device.major, device.minor)) for device in devices}
    found = f"{len(devices)} x " + ", ".join(f"{name} ({size} GiB, sm_{major}{minor})" for name, size, (major, minor) in sorted(kinds))
    old = any(capability < (8, 0) for _, _, capability in kinds)
    if old:
        return Check("GPU", "fail", found, "bfloat16 needs compute capability 8.0; use model.dtype = float32 or a newer GPU")
    return Check.of(
        "GPU", len(kinds) == 1, found, "GPUs of different kinds wait for the slowest; choose with CUDA_VISIBLE_DEVICES", bad="warn"
    )


def driver() -> Check:
    """The NVIDIA driver's version."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_DEADLINE,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Check("driver", "warn", f"nvidia-smi gives no answer ({error})", "a hung driver hangs every run; restart it")
    return Check("driver", "ok", f"{answer.stdout.split()[0]}, torch built for CUDA {torch.version.cuda}")


def nccl() -> Check:
    """NCCL is built into torch and carries collectives and weights."""
    if not dist.is_nccl_available():
        return Check("NCCL", "fail", "torch was built without it", "install torch from PyPI: constraints/gpu.txt")
    return Check("NCCL", "ok", ".".join(map(str, torch.cuda.nccl.version())))


def cores() -> Check:
    """Cores this process may use, against the threads torch would start."""
    allowed = min(len(os.sched_getaffinity(0)), _quota() or os.cpu_count() or 1)
    threads = torch.get_num_threads()
    found = f"{allowed:g} of {os.cpu_count()} may be used, torch computes with {threads} threads"
    return Check.of("CPU", threads <= max(1, allowed), found, f"export OMP_NUM_THREADS={max(1, int(allowed))}", bad="warn")


def _quota() -> float | None:
    """Cores that the container's quota allows; None without one."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def memory() -> Check:
    """Memory that is available, within the container's limit."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit = _limit()
    if limit is not None and limit < total:
        total, available = limit, min(available, limit)
    found = f"{available / _GIB:.1f} of {total / _GIB:.1f} GiB available"
    return Check.of("memory", available > 2 * _GIB, found, "a learner beside a vLLM server takes 3 GiB at the least", bad="warn")


def _limit() -> int | None:
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)


def shared_memory(config: Config | None) -> Check:
    """/dev/shm: weights to servers on a CPU, queues of vLLM and NCCL's own; containers often get 64 MiB."""
    if not SHARED_MEMORY.is_dir():
        return Check("shared memory", "fail", f"{SHARED_MEMORY} is not there", "mount a tmpfs there")
    free = shutil.disk_usage(SHARED_MEMORY).free
    needed = 1 * _GIB
    engine = None if config is None else config.engine
    if isinstance(engine, VLLMEngineConfig) and transport(engine) == "shm":
        needed = max(needed, 3 * engine.bucket_mib * 2**20)  # at most three buckets exist at a time
    found = f"{free / _GIB:.1f} GiB free in {SHARED_MEMORY}"
    advice = f"{needed / _GIB:.1f} GiB are wanted: --shm-size or --ipc=host for a container, or a smaller engine.bucket_mib"
    return Check.of("shared memory", free >= needed, found, advice, bad="fail" if free < needed / 4 else "warn")


def disk(folder: Path) -> Check:
    """Free space where runs are written."""
    existing = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK):
        return Check("disk", "fail", f"{existing} cannot be written", "choose another run.folder")
    return Check.of(
        "disk", free > 5 * _GIB, f"{free / _GIB:.0f} GiB free in {existing}", "free some, or choose another run.folder", bad="warn"
    )


def ports(config: Config | None) -> Iterator[Check]:
    """Loopback works, torchrun's usual port is free, servers that the configuration names answer."""
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        yield Check(
            "ports", "fail", f"127.0.0.1 cannot be bound ({error.strerror})", "servers are started on loopback; bring the interface up"
        )
        return
    port = int(os.environ.get("MASTER_PORT", TORCHRUN_PORT))
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken = probe.connect_ex(("127.0.0.1", port)) == 0
    found = f"loopback can be bound; port {port} of torchrun is {'taken' if taken else 'free'}"
    yield Check.of("ports", not taken, found, "another run has it; give torchrun another --master-port", bad="warn")
    for url in config.engine.urls if config is not None and isinstance(config.engine, VLLMEngineConfig) else ():
        yield _answers(url)


def _answers(url: str) -> Check:
    parts = urlsplit(url)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=_DEADLINE):
            return Check("engine.urls", "ok", f"{url} answers")
    except (OSError, ValueError) as error:
        return Check("engine.urls", "fail", f"{url} does not answer ({error})", "start the server, or leave engine.urls empty")


def open_files(config: Config | None) -> Check:
    """Every response in flight is a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1024
    if config is not None and isinstance(config.engine, VLLMEngineConfig):
        servers = config.engine.rollout_ranks // config.engine.tensor_parallel or len(config.engine.urls) or config.engine.servers
        wanted += servers * config.engine.max_num_seqs
    few = soft != resource.RLIM_INFINITY and soft < wanted
    advice = f"responses in flight want {wanted:,}: ulimit -n {wanted}"
    return Check.of("open files", not few, f"{soft:,} (at most {hard:,})", advice, bad="warn")
