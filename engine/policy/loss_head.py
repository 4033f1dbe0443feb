"""The loss as the head that the policy runs on its hidden states, so that no logits matrix ever exists."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from headrace.kernels import Metric, PolicySpec, linear_policy_loss
from headrace.policy.model import PackedRows
from headrace.policy.score import IGNORED, predicted, predicted_targets, teacher_forced
from headrace.ranges import span
from headrace.records import StepBatch

if TYPE_CHECKING:
    from headrace.policy.update import Learner


class LossHead:
    """The loss of one micro-batch."""

    def __init__(self, learner: "Learner", part: StepBatch, rows: PackedRows) -> None:
        self.learner, self.part, self.rows = learner, part, rows
        device = learner.parallel.device
        self.targets = torch.from_numpy(predicted_targets(part, part.response_mask)).to(device, non_blocking=True)
        streams = np.stack([part.old_logprobs, part.advantages, part.loss_weight, part.gates])
        self.old, self.advantages, self.weights, self.gates = torch.from_numpy(predicted(streams)).to(device, non_blocking=True)
        self.mask = torch.from_numpy(predicted(part.loss_mask)).to(device, non_blocking=True)
        self.proximal = None
        if part.proximal_logprobs is not None:
            self.proximal = torch.from_numpy(predicted(part.proximal_logprobs)).to(device, non_blocking=True)
        self.logprobs = torch.empty(0)
        """[N] at the predicting positions, once the head has run."""
        self.reference = None
        if learner.reference is not None:
            with span("reference"):
                self.reference, _ = teacher_forced(learner.reference, rows, self.targets, part.temperature, learner.banned_ids)

    @span("head")
    def __call__(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and metrics [len(Metric) + 2] from hidden [N, D] and head weight [V, D]."""
        result = self._loss(hidden, weight, self.learner.spec, self.targets, self.advantages, self.mask)
        loss, metrics = result.loss, result.metrics
        self.logprobs = result.logprobs
        if self.learner.spec.has_regulariser and bool((self.part.response_mask & ~self.part.loss_mask).any()):
            # KL and entropy terms see every response token. Those outside the numerator get them from a call of their own, which keeps
            # their behaviour log-probs, under another distribution, out of the ratio metrics.
            targets = torch.where(self.mask, IGNORED, self.targets)
            rest = self._loss(hidden, weight, self.regulariser, targets, torch.zeros_like(self.advantages), None)
            loss, metrics = loss + rest.loss, metrics.clone()
            metrics[Metric.REFERENCE_KL] += rest.metrics[Metric.REFERENCE_KL]
        vector = torch.cat([metrics, torch.stack([loss.detach().float(), result.entropies.sum()])])
        return loss + self._anchor(), vector

    @property
    def regulariser(self) -> PolicySpec:
        """The specification without its surrogate's demands; meant for advantage 0."""
        return replace(self.learner.spec, kind="ppo", dual_clip=None, tis_cap=None)

    def _loss(self, hidden: Tensor, weight: Tensor, spec: PolicySpec, targets: Tensor, advantages: Tensor, mask: Tensor | None):
        return linear_policy_loss(
            hidden,
            weight,
            targets,
            self.old,
            advantages,
            self.weights,
            spec,
            gates=self.gates,
            mask=mask,
            ref_logprobs=self.reference,
            proximal_logprobs=self.proximal,
            cu_seqlens=self.rows.cu_seqlens,
            temperature=self.part.temperature,
            ignore_index=IGNORED,
            banned=self.learner.banned_ids,
        )

    def _anchor(self) -> Tensor | float:
        """Zero that depends on the vision tower, for a micro-batch without pictures beside ranks that have some.

        FSDP reduces the gradients that exist; without it ranks would reduce different sets and hang.
        """
        learner = self.learner
        if learner.parallel.world_size == 1 or not learner.config.model.train_vision or any(self.part.media):
            return 0.0
        tower = [parameter for name, parameter in learner.policy.named_parameters() if "visual" in name and parameter.requires_grad]
        return sum((parameter.flatten()[0].float() * 0.0 for parameter in tower), start=torch.zeros((), device=learner.parallel.device))
