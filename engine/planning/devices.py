"""Accelerators by their data sheets, and how much of a data sheet real work reaches."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU and its links. Peaks are the vendor's; the efficiencies below turn them into rates."""

    name: str
    memory: float
    """Bytes."""
    flops: float
    """Dense bf16 FLOP/s."""
    bandwidth: float
    """Bytes/s of device memory."""
    node_link: float
    """Bytes/s to a GPU of the same node, one direction (NVLink)."""
    network: float
    """Bytes/s to another node, one direction, per GPU (one 400 Gb/s port each)."""


DEVICES = {
    "h100": Device("H100 SXM 80 GB", memory=80e9, flops=989e12, bandwidth=3.35e12, node_link=450e9, network=50e9),
    "h200": Device("H200 SXM 141 GB", memory=141e9, flops=989e12, bandwidth=4.8e12, node_link=450e9, network=50e9),
}

TRAIN_EFFICIENCY = 0.40
"""Share of peak FLOP/s in forward and backward, recomputation counted as work. Open trainers report 14-35 % of peak by model FLOPs
at 16k-64k tokens a row; with 8/6 for recomputation that is 19-47 %."""
PREFILL_EFFICIENCY = 0.50
"""Share of peak FLOP/s while prompts are read."""
BANDWIDTH_EFFICIENCY = 0.70
"""Share of memory bandwidth while weights and key-value cache are read for one token a row."""
LINK_EFFICIENCY = 0.70
"""Share of a link that collectives and weight pushes reach."""
STEP_OVERHEAD = 3e-3
"""Seconds of a decoding step that no roofline sees: scheduler, sampler, processor, launches under CUDA graphs."""
ALL_REDUCE = 15e-6
"""Seconds of one small all-reduce between the GPUs of a tensor-parallel server; a layer needs two."""
PUSH_OVERHEAD = 0.5
"""Seconds of a weight push besides the bytes: pause, metadata, version, canary."""
HOP = 10e-6
"""Seconds in which a bucket of a broadcast passes one more GPU of its ring."""
