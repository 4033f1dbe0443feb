"""Bytes on each GPU of the learner and of a server."""

from dataclasses import dataclass

from headrace.config import Config, VLLMEngineConfig
from headrace.kernels.head import GPU_CHUNK_ROWS
from headrace.planning.devices import Device
from headrace.planning.shape import Shape, trained_parameters

_CONTEXT = 2e9  # CUDA context, NCCL buffers, libraries' workspaces
_SERVER_ACTIVATIONS = 3e9  # a server's activations, sampler logits and CUDA graphs while 8,192 tokens are read at once


@dataclass(frozen=True, slots=True)
class Memory:
    """Parts of one GPU's memory in bytes, and what the GPU has."""

    parts: dict[str, float]
    available: float

    @property
    def needed(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.needed <= self.available


def learner_memory(config: Config, shape: Shape, device: Device, ranks: int) -> Memory:
    """One learner rank: fp32 masters, gradients and moments sharded, layers gathered one ahead, a micro-batch of activations."""
    model, width = config.model, 2 if config.model.dtype == "bfloat16" else 4
    shards = min(model.shard or ranks, ranks)
    trained = trained_parameters(model, shape)
    frozen = shape.parameters if model.lora else shape.parameters - trained
    root = shape.parameters - shape.layers * shape.layer
    parts = {
        "weights (fp32 masters)": 4 * trained / shards,
        "frozen weights": width * frozen / shards,
        "gradients (fp32)": 4 * trained / shards,
        "moments": (8 if config.optimizer.moments == "float32" else 2) * trained / shards,
    }
    if model.offload:
        parts = {}
    if shards > 1:
        parts["gathered layers and their gradients"] = width * (root + 2 * shape.layer) + (
            6 * max(root, shape.layer) if not model.lora else 0
        )
    elif width == 2:
        parts["weights (bf16)"] = 2 * trained
    parts["activations of a micro-batch"] = width * config.learner.micro_batch_tokens * _kept_values(config, shape)
    chunk = min(config.learner.micro_batch_tokens, GPU_CHUNK_ROWS[1 if device.memory > 100e9 else 0])
    parts["head: one chunk of logits, gradient of its weight"] = 6 * chunk * shape.vocabulary + 4 * shape.head
    parts["context and libraries"] = _CONTEXT
    return Memory({name: size for name, size in parts.items() if size}, device.memory)


def _kept_values(config: Config, shape: Shape) -> int:
    """Values per token that wait for the backward pass: layer inputs and one layer's inside, or everything."""
    inside = 8 * shape.hidden + 4 * shape.intermediate + 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    return shape.layers * shape.hidden + inside if config.model.activation_checkpointing else shape.layers * inside


def server_memory(config: Config, shape: Shape, device: Device) -> tuple[Memory, int]:
    """One GPU of a server, and the tokens of key-value cache that a whole server holds (0: none fit)."""
    assert isinstance(config.engine, VLLMEngineConfig)
    engine = config.engine
    budget = engine.memory * device.memory
    weights = 2 * shape.parameters / engine.tensor_parallel
    kv_per_token = shape.kv_bytes / min(engine.tensor_parallel, shape.kv_heads)
    cache = max(0.0, budget - weights - _SERVER_ACTIVATIONS)
    parts = {
        "weights (bf16)": weights,
        "activations, logits, graphs": _SERVER_ACTIVATIONS,
        "key-value cache": cache,
        "context and libraries": _CONTEXT,
    }
    return Memory(parts, device.memory), int(cache / kv_per_token)


def rows_at_once(config: Config, cache_tokens: int, prompt_tokens: float, response_tokens: float, first_wave: int) -> int:
    """Responses one server draws at once: ``max_num_seqs``, or as many as its cache holds; rows of a wave share their prompt's."""
    assert isinstance(config.engine, VLLMEngineConfig)
    return min(config.engine.max_num_seqs, int(cache_tokens / (prompt_tokens / first_wave + response_tokens)))
