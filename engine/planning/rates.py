"""How fast the two sides work: measured values from a file, or a roofline of a known device."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from headrace.config import Config, Model, VLLMEngineConfig, load_model
from headrace.planning.devices import (
    ALL_REDUCE,
    BANDWIDTH_EFFICIENCY,
    HOP,
    LINK_EFFICIENCY,
    PREFILL_EFFICIENCY,
    PUSH_OVERHEAD,
    STEP_OVERHEAD,
    TRAIN_EFFICIENCY,
    Device,
)
from headrace.planning.shape import PATCHES_PER_TOKEN, Shape, trained_parameters
from headrace.planning.workload import Workload
from headrace.sampling.waves import first_wave_size


@dataclass(frozen=True, slots=True)
class Split:
    """How the GPUs are dealt out."""

    ranks: int
    """Learner GPUs, one rank each."""
    servers: int
    rollout_gpus: int
    gpus_per_node: int
    nodes: int

    @property
    def one_node(self) -> bool:
        """Both sides share a node, so weights are pushed over its links."""
        return self.nodes == 1

    @property
    def shared(self) -> bool:
        """The embedded engine: the learner's GPUs draw too."""
        return self.ranks + self.rollout_gpus > self.nodes * self.gpus_per_node


class Rates(Model):
    """Seconds of the parts of a step. A server draws one token for each of its R running rows in ``decode_step + R x decode_row``."""

    decode_step: float = Field(ge=0)
    """Seconds of a decoding step of one server, whatever runs."""
    decode_row: float = Field(ge=0)
    """Seconds that each running row adds to it."""
    prefill_token: float = Field(0.0, ge=0)
    """Seconds of one prompt token on one server."""
    train_token: float = Field(ge=0)
    """Seconds of forward and backward per token, prompt included, on one learner rank."""
    gather: float = Field(0.0, ge=0)
    """Seconds in which one micro-batch's weights are gathered and its gradients reduced; only what compute does not hide costs time."""
    update: float = Field(0.0, ge=0)
    """Seconds of one optimizer step besides."""
    sync: float = Field(0.0, ge=0)
    """Seconds of one push of the weights."""

    @classmethod
    def read(cls, path: Path) -> "Rates":
        """Raises ConfigError: no such file, not YAML, or fields that do not fit."""
        return load_model(cls, path)


def roofline(config: Config, shape: Shape, workload: Workload, device: Device, split: Split) -> Rates:
    """Rates of a known device by its data sheet and the efficiencies of ``devices``."""
    tensor_parallel = config.engine.tensor_parallel if isinstance(config.engine, VLLMEngineConfig) else 1
    response = workload.mean_response(first_wave(config), config.sampling.group_size)
    context = workload.prompt_tokens + response
    read = device.bandwidth * BANDWIDTH_EFFICIENCY * tensor_parallel
    compute = device.flops * PREFILL_EFFICIENCY * tensor_parallel
    reduces = 2 * shape.layers * ALL_REDUCE if tensor_parallel > 1 else 0.0
    drawing = workload.prompt_tokens + response / 2  # mean context while a response grows
    trained = trained_parameters(config.model, shape)
    return Rates(
        decode_step=2 * (shape.parameters - shape.vision) / read + reduces + STEP_OVERHEAD,
        decode_row=shape.kv_bytes * drawing / read + 2 * shape.language_work / compute,
        prefill_token=_flops_per_token(shape, workload.prompt_tokens, workload.visual_tokens, 2, 2) / compute,
        train_token=_train_flops(config, shape, workload, context) / (device.flops * TRAIN_EFFICIENCY),
        gather=_gather_seconds(config, shape, device, split, trained),
        # fp32 masters, gradients and two moments read, three of them written, by every rank its share
        update=7 * 4 * trained / min(config.model.shard or split.ranks, split.ranks) / (device.bandwidth * BANDWIDTH_EFFICIENCY),
        sync=_push_seconds(shape, device, split, config),
    )


def _gather_seconds(config: Config, shape: Shape, device: Device, split: Split, trained: int) -> float:
    """Weights gathered for forward and backward, fp32 gradients reduced, between the shards of a copy; gradient sums between copies."""
    shards = min(config.model.shard or split.ranks, split.ranks)
    link = LINK_EFFICIENCY * (device.network if shards > split.gpus_per_node else device.node_link)
    between = LINK_EFFICIENCY * (device.network if split.ranks > split.gpus_per_node else device.node_link)
    width = 2 if config.model.dtype == "bfloat16" else 4
    within = (shards - 1) / shards * (2 * width * shape.parameters + 4 * trained) / link
    copies = split.ranks // shards
    return within + (copies - 1) / copies * 2 * 4 * trained / shards / between


def _push_seconds(shape: Shape, device: Device, split: Split, config: Config) -> float:
    """bf16 weights through rank 0's link; gathering a bucket runs beside sending the one before, each bucket passes every GPU in turn."""
    if not isinstance(config.engine, VLLMEngineConfig):
        return 0.0
    link = LINK_EFFICIENCY * (device.node_link if split.one_node else device.network)
    buckets = 2 * shape.parameters / (config.engine.bucket_mib * 2**20)
    return 2 * shape.parameters / link + buckets * split.rollout_gpus * HOP + PUSH_OVERHEAD


def learner_seconds(rates: Rates, tokens: float, *, updates: int, ranks: int, micro_batch_tokens: int) -> float:
    """Seconds in which ``ranks`` train on a batch of ``tokens`` in ``updates`` optimizer steps, rows packed evenly."""
    per_rank = tokens / updates / ranks
    micro_batches = max(1, -(-int(per_rank) // micro_batch_tokens))
    return updates * (max(per_rank * rates.train_token, micro_batches * rates.gather) + rates.update)


def first_wave(config: Config) -> int:
    """Rollouts of a group that are drawn first; all of them where there is one wave."""
    cge, group = config.sampling.cge, config.sampling.group_size
    return group if cge is None else first_wave_size(group, cge.first_wave_fraction)


def _train_flops(config: Config, shape: Shape, workload: Workload, context: float) -> float:
    """FLOPs of forward, backward and recomputation per token; a frozen tower runs forward once per group."""
    passes = 4 + (2 if config.model.activation_checkpointing else 0) + (0 if config.model.lora else 2)
    language = _flops_per_token(shape, context, 0.0, passes, 0)
    if not workload.visual_tokens:
        return language
    tower = passes if config.model.train_vision else 2 / config.sampling.group_size
    return language + tower * shape.vision * PATCHES_PER_TOKEN * workload.visual_tokens / context


def _flops_per_token(shape: Shape, context: float, visual_tokens: float, passes: float, tower_passes: float) -> float:
    """``passes`` FLOPs per parameter and token, causal attention over ``context`` tokens, and the tower's part per prompt token."""
    attention = passes * shape.layers * shape.heads * shape.head_dim * context
    tower = tower_passes * shape.vision * PATCHES_PER_TOKEN * visual_tokens / context if visual_tokens else 0.0
    return passes * shape.language_work + attention + tower
