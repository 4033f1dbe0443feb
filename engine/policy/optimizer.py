"""AdamW over fp32 master weights, and a learning rate that is a pure function of the step.

Masters: parameters that are fp32 (also FSDP2 shards, whose bf16 copies exist only while a layer runs) are their own
master. A bf16 parameter of an unsharded model gets an fp32 master and an fp32 gradient: each backward pass adds its
bf16 gradient to the fp32 sum and frees it, the step moves the master and rounds it into the parameter once. Small
steps are therefore never lost to bf16, and gradient accumulation is as exact as in the sharded case.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headrace.config import ConfigError, OptimizerConfig


def learning_rate(update: int, config: OptimizerConfig, updates: int) -> float:
    """Rate of optimizer step ``update`` (0-based) out of ``updates``: linear warm-up, then constant or cosine to a tenth."""
    if update < config.warmup_steps:
        return config.learning_rate * (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    done = min(1.0, (update - config.warmup_steps) / max(1, updates - config.warmup_steps))
    return config.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


class Optimizer:
    """AdamW with decoupled decay on matrices only (not on norms and biases).

    A bf16 parameter belongs to one optimizer for good, since its gradients go to that one's masters.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], config: OptimizerConfig) -> None:
        self.config = config
        self._parameters = dict(parameters)
        self.masters: dict[str, Tensor] = {name: _master(parameter) for name, parameter in self._parameters.items()}
        decayed = [master for master in self.masters.values() if master.ndim > 1]
        others = [master for master in self.masters.values() if master.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        options: dict[str, Any] = {"lr": config.learning_rate, "betas": config.betas, "eps": 1e-8}
        self._adam: Any = _eight_bit(groups, options) if config.moments == "8bit" else torch.optim.AdamW(groups, fused=True, **options)
        for master in self.masters.values():  # made now rather than at the first step, so that a checkpoint always has the same entries
            self._adam.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device="cpu" if config.moments == "8bit" else master.device),
                "exp_avg": self._zeros(master, signed=True),
                "exp_avg_sq": self._zeros(master, signed=False),
            }

    def _zeros(self, master: Tensor, signed: bool) -> Tensor:
        """An empty moment; in 8 bits where torchao packs a tensor of that size."""
        return self._adam._new_buffer(master, signed) if self.config.moments == "8bit" else torch.zeros_like(master)

    def gradient_norm(self) -> Tensor:
        """Global norm of the gradients over all parameters and ranks; a scalar on the device, collective under FSDP2."""
        norm = torch.nn.utils.get_total_norm([master.grad for master in self.masters.values() if master.grad is not None], foreach=True)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def step(self, rate: float, scale: float = 1.0) -> None:
        """Move the weights by the gradients times ``scale`` at learning rate ``rate``, then drop the gradients."""
        gradients = [master.grad for master in self.masters.values() if master.grad is not None]
        if scale != 1.0:
            torch._foreach_mul_(gradients, scale)
        for group in self._adam.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._adam.step()
        self.publish()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for master in self.masters.values():
            master.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into parameters that have one."""
        for name, master in self.masters.items():
            if master is not self._parameters[name]:
                self._parameters[name].copy_(master)

    def pairs(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Every trained parameter with its master, which may be itself."""
        return [(self._parameters[name], master) for name, master in self.masters.items()]

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Moments and step counts by parameter name; the tensors themselves, so that a checkpoint loads in place."""
        return {name: dict(self._adam.state[master]) for name, master in self.masters.items()}


def _eight_bit(groups: Sequence[dict[str, Any]], options: dict[str, Any]) -> torch.optim.Optimizer:
    """torchao's AdamW with moments in blocks of 256 bytes that share a scale (Dettmers et al. 2022); small tensors stay fp32.

    Its step is compiled on a GPU; on a CPU it runs as it is written, which needs no C++ compiler.

    Raises:
        ConfigError: torchao is not installed.
    """
    try:
        from torchao.optim import AdamW8bit
    except ImportError:
        raise ConfigError("optimizer.moments = 8bit needs the package torchao: pip install 'headrace[scale]'") from None
    adam = AdamW8bit(groups, **options)
    if groups[0]["params"][0].device.type == "cpu":
        adam.step = torch.compiler.set_stance("force_eager")(adam.step)
    return adam


def _master(parameter: nn.Parameter) -> Tensor:
    """The fp32 tensor that is optimised for ``parameter``, with its gradient kept in fp32 as well."""
    if parameter.dtype == torch.float32:
        return parameter
    master = parameter.detach().to(torch.float32)

    def move_gradient(owner: Tensor) -> None:
        gradient = owner.grad
        assert gradient is not None
        if master.grad is None:
            master.grad = gradient.to(torch.float32)
        else:
            master.grad.add_(gradient)
        owner.grad = None

    parameter.register_post_accumulate_grad_hook(move_gradient)
    return master
