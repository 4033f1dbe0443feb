"""The policy that a run started from, frozen, for the divergence term of the loss."""

import copy
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from headrace.config import ModelConfig
from headrace.policy.adapters import without_adapters
from headrace.policy.model import PackedRows, Policy
from headrace.policy.parallel import Parallel
from headrace.policy.score import PackedPolicy
from headrace.policy.sharding import prepare

T = TypeVar("T")


def reference_of(policy: Policy, config: ModelConfig, parallel: Parallel) -> PackedPolicy:
    """The policy as it is now, for good: a copy, sharded like it; with LoRA its own weights without the adapters.

    Taken before the policy itself is sharded.
    """
    if config.lora is not None:
        return _WithoutAdapters(policy)
    reference = copy.deepcopy(policy)
    reference.requires_grad_(False)
    prepare(reference, config.model_copy(update={"activation_checkpointing": False}), parallel)
    return reference


class _WithoutAdapters:
    """A LoRA policy's base, out of the policy's own weights."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def __call__(self, rows: PackedRows, head: Callable[[Tensor, Tensor], T]) -> T:
        with without_adapters(self._policy):
            return self._policy(rows, head)
