"""How a policy is laid out over the ranks: FSDP2 units, host offload, recomputed activations, compiled layers."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from headrace.config import ConfigError, ModelConfig
from headrace.policy.model import Policy
from headrace.policy.parallel import Parallel

T = TypeVar("T")


def prepare(policy: Policy, config: ModelConfig, parallel: Parallel, *, compile: bool = False) -> None:
    """Compiled layers, activation checkpointing and, with several ranks, FSDP2; in place. Copies for a reference are taken before.

    A layer is compiled around its attention, whose kernel is no compiler's business; with gradients and without makes two versions.

    Every decoder layer is a unit; the root unit holds the rest: norm, embeddings and head (one tensor where tied) and
    the vision tower, so that a micro-batch without pictures needs no collective of its own. Master weights and gradient
    sums are fp32, layers compute in ``config.dtype``, what is frozen stays in it. Gradients are summed over ranks and not
    averaged, since the loss weights are already global; they are reduced after every micro-batch, so that no rank ever holds
    a full gradient.

    Raises:
        ConfigError: ``model.shard`` does not divide the ranks, or host offload with a single one.
    """
    layers = policy.model.get_decoder().layers
    for layer in layers:
        if compile:
            layer.forward = _compiled(layer.forward)
        if config.activation_checkpointing:
            layer.forward = _recomputed(layer.forward)
    mesh = _mesh(config, parallel)
    if mesh is None:
        return
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=getattr(torch, config.dtype), reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=parallel.device.type == "cuda") if config.offload else OffloadPolicy(),
    }
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(policy, **options)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _mesh(config: ModelConfig, parallel: Parallel) -> DeviceMesh | None:
    """The ranks as one line of shards, or as replicas × shards (HSDP); None where there is nothing to shard.

    Neighbouring ranks share a copy, so that with ``model.shard`` = GPUs of a node only gradient sums cross nodes.
    """
    ranks, shard = parallel.world_size, config.shard
    if shard is not None and (shard > ranks or ranks % shard):
        raise ConfigError(f"model.shard = {shard} does not divide the {ranks} learner ranks; expected a divisor, or null for all of them")
    if ranks == 1:
        if config.offload:
            raise ConfigError("model.offload keeps shards on the host and needs several learner ranks (torchrun); there is one")
        return None
    if shard is None or shard == ranks:
        return init_device_mesh(parallel.device.type, (ranks,))
    return init_device_mesh(parallel.device.type, (ranks // shard, shard), mesh_dim_names=("replicate", "shard"))


def _compiled(forward: Callable[..., T]) -> Callable[..., T]:
    """``forward`` compiled for packed rows of any length; a local engine's own calls, with their growing caches, run as they are."""
    fast = torch.compile(forward, dynamic=True)

    def run(*args: Any, **kwargs: Any) -> T:
        packed = kwargs.get("cu_seqlens") is not None and kwargs.get("past_key_values") is None
        return fast(*args, **kwargs) if packed else forward(*args, **kwargs)

    return run


def _recomputed(forward: Callable[..., T]) -> Callable[..., T]:
    """``forward`` that keeps only its inputs and runs again in the backward pass.

    Wrapping the method and not the module keeps parameter names, and keeps FSDP's hooks outside the recomputed region.
    """

    def run(*args: Any, **kwargs: Any) -> T:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run
