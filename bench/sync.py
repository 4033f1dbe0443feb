"""Weight sync: pushes to a vLLM server against a plain copy of the same bytes, in one process.

    python -m headrace.bench sync [--sizes 0.6,10,135] [--dtype bfloat16] [--pushes 5] [--bucket-mib 512]

A learner with float32 weights pushes changed weights to a server of its own through the configured transport. Prints per model size: how
long the server stood still, the whole push with the canary, GB/s of the standstill, and the ratio to copying as many bytes in memory.
"""

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from headrace.config import DirectoryModel, ModelConfig, ScratchTextModel, VLLMEngineConfig
from headrace.encoding import Encoder
from headrace.policy.model import Policy
from headrace.policy.parallel import Parallel
from headrace.policy.score import score_sequence
from headrace.policy.scratch import build_text
from headrace.sampling.vllm.channel import write_settings
from headrace.sampling.vllm.control import Control
from headrace.sampling.vllm.server import Server
from headrace.sync.push import SyncReport, WeightSync

SHAPES = {  # millions of parameters: width, layers, heads, words
    "0.6": (128, 3, 4, 500),
    "10": (320, 8, 10, 6_000),
    "135": (768, 16, 24, 49_000),
}


def sync(
    sizes: Annotated[str, typer.Option(help=f"Millions of parameters, of {', '.join(SHAPES)}")] = "0.6,10",
    dtype: Annotated[str, typer.Option(help="The server's weights: float32 or bfloat16")] = "bfloat16",
    pushes: Annotated[int, typer.Option(min=1)] = 5,
    bucket_mib: Annotated[int, typer.Option(min=1, help="engine.bucket_mib")] = 512,
) -> None:
    """Pushes of weights to a vLLM server against a plain copy of the same bytes."""
    unknown = set(sizes.split(",")) - set(SHAPES)
    if unknown:
        raise ValueError(f"sizes: there is no {', '.join(sorted(unknown))} among {', '.join(SHAPES)}")
    config = VLLMEngineConfig.model_validate(
        {"kind": "vllm", "dtype": dtype, "bucket_mib": bucket_mib, "memory": 0.0625, "max_num_seqs": 8}
    )
    print(f"{dtype}, buckets of {bucket_mib} MiB, {torch.get_num_threads()} threads; medians of {pushes} pushes of changed weights")
    for size in sizes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            print(measured(size, config, pushes, Path(folder)), flush=True)


def measured(size: str, config: VLLMEngineConfig, pushes: int, folder: Path) -> str:
    """One line about one model."""
    hidden, layers, heads, words = SHAPES[size]
    source = ScratchTextModel(kind="scratch_text", hidden=hidden, layers=layers, heads=heads)
    build_text(folder / "model", source, [f"w{number}" for number in range(words)], seed=0)
    policy = Policy.load(folder / "model", ModelConfig(source=DirectoryModel(path=folder / "model")), "cpu")
    encoder = Encoder.load(folder / "model", think_prefill=True, system_prompt=None, max_prompt_tokens=512)
    write_settings(encoder, folder / "processor.json")
    assert config.dtype is not None
    settings = folder / "processor.json"
    server = Server(folder / "model", config, dtype=config.dtype, max_model_len=256, settings=settings, folder=folder)
    server.start()
    try:
        control = Control(server.url)
        score = partial(score_sequence, policy, device=torch.device("cpu"))
        weights = WeightSync(policy, lambda: [control], config, Parallel(), score)
        weights.push(0)
        reports: list[SyncReport] = []
        copies: list[float] = []
        for version in range(1, pushes + 1):
            change(policy)
            copies.append(copy_seconds(reports[-1].bytes if reports else 1 << 20))
            reports.append(weights.push(version))
        copies.append(copy_seconds(reports[-1].bytes))
        weights.close()
        control.close()
    finally:
        server.stop()
    return line(sum(parameter.numel() for parameter in policy.parameters()), reports, statistics.median(copies[1:]))


def line(parameters: int, reports: list[SyncReport], copy: float) -> str:
    """What was measured, for a reader."""
    paused = statistics.median(report.paused for report in reports)
    whole = statistics.median(report.seconds for report in reports)
    size = reports[-1].bytes
    return (
        f"{parameters / 1e6:6.1f} M parameters, {size / 1e6:7.1f} MB: standstill {paused:.3f} s = {size / paused / 1e9:.2f} GB/s "
        f"= {paused / copy:.1f} x a copy ({copy * 1e3:.2f} ms); with canary {whole:.3f} s, gap {reports[-1].canary_gap:.1e} nat"
    )


@torch.no_grad()
def change(policy: Policy) -> None:
    """An optimizer step, as the weights see it."""
    for parameter in policy.parameters():
        parameter.mul_(1.01)


def copy_seconds(size: int) -> float:
    """Least seconds to copy so many bytes in memory that is there already."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return min(times)
