"""LoRA: small trained matrices beside the decoder's frozen linear layers (Hu et al. 2021), through peft.

The layers are changed in place, so the model stays the one that transformers made. Without its adapters it is the policy that the
run started from, which serves as the reference of a KL term. What leaves the engine is merged: W + scale · B A under W's own name.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from headrace.config import ConfigError, LoRAConfig

_NAME = "default"  # peft's name of an adapter that has none
_BASE = ".base_layer"


def add_adapters(model: PreTrainedModel, config: LoRAConfig) -> None:
    """Freeze the model and give the linear layers of its decoder adapters, which change nothing yet; in place.

    The first weights come from ``config.seed`` alone, so that every rank and every copy has the same.

    Raises:
        ConfigError: peft is not installed, or no layer has one of the names in ``config.layers``.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ConfigError("model.lora needs the package peft: pip install 'headrace[lora]'") from None
    decoder = model.get_decoder()
    linear = [name for name, module in decoder.layers.named_modules() if isinstance(module, nn.Linear)]
    chosen = [name for name in linear if not config.layers or name.rpartition(".")[2] in config.layers]
    missing = set(config.layers) - {name.rpartition(".")[2] for name in chosen}
    if missing or not chosen:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        raise ConfigError(f"model.lora.layers: the decoder has no linear layer {', '.join(sorted(missing))}; it has {known}")
    model.requires_grad_(False)
    settings = LoraConfig(r=config.rank, lora_alpha=config.alpha, lora_dropout=0.0, bias="none", target_modules=chosen)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        inject_adapter_in_model(settings, decoder.layers)
    decoder.layers.eval()


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers that have an adapter, with their names."""
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "lora_A"))


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The starting policy, for as long as the context lasts."""
    layers = [layer for _, layer in adapted_layers(model)]
    for layer in layers:
        layer._disable_adapters = True  # peft's own switch calls requires_grad_, which would reach into sharded parameters
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


# ------------------------------------------------------------------------------------------------------ merging


def named_weights(model: nn.Module, *, merge: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Parameters and saved buffers under the names they have without adapters, tied ones under each of theirs; the live tensors.

    A layer with an adapter comes as W + scale · B A in W's dtype, formed in fp32. Sharded tensors stay sharded, and the adapter's
    small A is gathered to merge a shard, so that every rank must take every item. ``merge`` False gives W itself, for names and shapes
    without collectives.
    """
    adapted = {f"{name}{_BASE}.weight": layer for name, layer in adapted_layers(model)}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if ".lora_" in name:
            continue
        layer = adapted.get(name)
        yield name.replace(_BASE, ""), tensor if layer is None or not merge else _merged(layer)


@torch.no_grad()
def _merged(layer: Any) -> Tensor:
    """W + scale · B A of a layer, sharded as W is."""
    weight, first, second = (part.weight.detach() for part in (layer.base_layer, layer.lora_A[_NAME], layer.lora_B[_NAME]))
    scale = layer.scaling[_NAME]
    if not isinstance(weight, DTensor):
        return (weight.float() + scale * (second.float() @ first.float())).to(weight.dtype)
    local = weight.to_local().float() + scale * (second.to_local().float() @ first.full_tensor().float())
    return DTensor.from_local(
        local.to(weight.dtype), weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
