"""One optimizer batch: forward, backward, step. Knows per-token streams and a loss specification, no algorithm.

The loss weights in a batch are already global, so micro-batches and ranks simply add up: nothing here divides.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.config import Config, LossConfig
from headrace.kernels import Metric, PolicySpec
from headrace.policy.counterfactual import all_logprobs, refined, score_counterfactual, scores_of_rows, wanted_media
from headrace.policy.gap import corrected, gap_metrics, needs_proximal, update_masses
from headrace.policy.loss_head import LossHead
from headrace.policy.model import Policy
from headrace.policy.optimizer import Optimizer, learning_rate
from headrace.policy.packing import MicroBatch, rows_with_gradient, schedule, split_batch, split_rows, take_rows
from headrace.policy.parallel import Parallel
from headrace.policy.reference import reference_of
from headrace.policy.score import packed_rows, place
from headrace.policy.sharding import prepare
from headrace.policy.step_metrics import named, neutral, pooled, total
from headrace.ranges import span
from headrace.records import Array, CounterfactualScores, CreditRule, StepBatch


class NonFiniteError(ValueError):
    """The loss or the gradient is not finite; no step was taken."""

    on_every_rank = True


def policy_spec(loss: LossConfig) -> PolicySpec:
    """The kernel's specification of a configured loss."""
    return PolicySpec(
        kind=loss.kind,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip,
        kl_coef=loss.kl_coef,
        kl_kind=loss.kl_kind,
        entropy_coef=loss.entropy_coef,
        surprisal_coef=loss.surprisal_coef,
        tis_cap=loss.tis_cap,
    )


class Learner:
    """The policy with its optimizer. Its whole state: weights, moments, ``updates``.

    Built from the starting policy, before any checkpoint is restored: with a KL term the reference is the policy at that
    moment. ``banned_ids`` leave every softmax, as they do in the sampler. ``rules`` refine every mini-batch, in order.
    """

    def __init__(
        self,
        policy: Policy,
        config: Config,
        banned_ids: Sequence[int] = (),
        parallel: Parallel | None = None,
        rules: Sequence[CreditRule] = (),
    ) -> None:
        self.policy = policy
        self.config = config
        self.banned_ids = tuple(banned_ids)
        self.parallel = parallel or Parallel(device=next(policy.parameters()).device)
        self.spec = policy_spec(config.loss)
        self.rules = tuple(rules)
        self.reference = reference_of(policy, config.model, self.parallel) if config.loss.kl_coef > 0 else None
        prepare(policy, config.model, self.parallel, compile=config.learner.compile)
        self.optimizer = Optimizer(policy.trainable_parameters(), config.optimizer)
        self.updates = 0
        """Optimizer steps attempted so far; with the configuration it fixes the learning rate."""

    def update(self, batch: StepBatch) -> dict[str, float]:
        """Train on one batch, in ``learner.updates_per_batch`` optimizer steps, and say what happened.

        Every rank passes the same batch. Metrics are those of all ranks.

        Raises:
            NonFiniteError: with ``learner.on_non_finite: stop``; weights and moments are as before the failed step.
            ValueError: a response token is outside the vocabulary or banned.
        """
        started = time.perf_counter()
        self._check_labels(batch)
        scores, scoring = self._score(batch)
        batch, gaps = self._correct(batch, scores)
        minis = self._credited(batch, scores)
        steps = [self._step(mini, measure_gap=not gaps and mini is minis[0]) for mini in minis]
        metrics = pooled(steps) | gaps | scoring
        metrics["learner/tokens"] = float(len(batch.token_ids))
        metrics["learner/rows"] = float(len(batch.prompts))
        metrics |= {f"learner/left_out_{reason}": float(count) for reason, count in batch.left_out.items()}
        return metrics | {"time/learner_tokens_per_s": len(batch.token_ids) / (time.perf_counter() - started)}

    def state_dict(self) -> dict[str, Any]:
        """Weights (fp32 masters where there are any) and moments by name: the live tensors, loaded in place.

        Tied weights appear once; with LoRA the adapters alone. ``load_counters`` completes a load.
        """
        masters = {id(parameter): master for parameter, master in self.optimizer.pairs()}
        if self.config.model.lora is not None:
            trained = {name: masters[id(parameter)] for name, parameter in self.policy.trainable_parameters()}
            return {"model": trained, "optimizer": self.optimizer.state_dict()}
        weights = {name: masters.get(id(parameter), parameter.detach()) for name, parameter in self.policy.named_parameters()}
        parameters = {name for name, _ in self.policy.named_parameters(remove_duplicate=False)}
        buffers = {name: tensor for name, tensor in self.policy.state_dict().items() if name not in parameters}
        return {"model": weights | buffers, "optimizer": self.optimizer.state_dict()}

    def counters(self) -> dict[str, int]:
        """What a checkpoint keeps besides tensors."""
        return {"updates": self.updates}

    def load_counters(self, counters: Mapping[str, int]) -> None:
        """Finish a load: counters, and masters rounded into the parameters."""
        self.updates = counters["updates"]
        self.optimizer.publish()

    def _check_labels(self, batch: StepBatch) -> None:
        """Refuse tokens that no policy could have drawn: on all ranks alike, before any of them waits for another."""
        rows = self.policy.head_weight.shape[0]
        tokens = batch.token_ids
        bad = batch.response_mask & ((tokens < 0) | (tokens >= rows) | np.isin(tokens, self.banned_ids))
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            row = int(np.searchsorted(batch.cu_seqlens, at, side="right")) - 1
            raise ValueError(f"batch: row {row} has response token {tokens[at]}, which is banned or not among the model's {rows} tokens")

    def _score(self, batch: StepBatch) -> tuple[CounterfactualScores | None, dict[str, float]]:
        """Scores that the credit rules want, under the policy as it is; None without rules. And what it took."""
        if not self.rules:
            return None, {}
        started = time.perf_counter()
        with span("counterfactual"):
            media = wanted_media(self.rules, batch)
            budget = self.config.learner.micro_batch_tokens
            scores = score_counterfactual(self.policy, batch, media, self.banned_ids, budget, self.parallel)
        return scores, {"learner/scored_rows": float(sum(map(bool, media))), "time/counterfactual": time.perf_counter() - started}

    def _credited(self, batch: StepBatch, scores: CounterfactualScores | None) -> list[StepBatch]:
        """The mini-batches of a batch, each after the credit rules."""
        parts = self.config.learner.updates_per_batch
        minis = split_batch(batch, parts, self.config.loss, self.config.sampling)
        if scores is None:
            return minis
        shares = [scores_of_rows(scores, batch, rows, mini) for rows, mini in zip(split_rows(batch, parts), minis, strict=True)]
        return [refined(self.rules, mini, share) for mini, share in zip(minis, shares, strict=True)]

    def _correct(self, batch: StepBatch, scores: CounterfactualScores | None) -> tuple[StepBatch, dict[str, float]]:
        """The batch corrected for the gap between engine and learner, where that is configured; with what it took."""
        if not needs_proximal(self.config.loss):
            return batch, {}
        started = time.perf_counter()
        with span("proximal"):
            budget = self.config.learner.micro_batch_tokens
            logprobs = all_logprobs(self.policy, batch, scores, self.banned_ids, budget, self.parallel)
        batch, metrics = corrected(batch, logprobs, self.config.loss)
        return batch, metrics | {"time/proximal": time.perf_counter() - started}

    def _step(self, batch: StepBatch, measure_gap: bool = False) -> dict[str, float]:
        """One optimizer step; with ``measure_gap`` the log-probs it forms anyway are compared with the engine's."""
        rate = learning_rate(self.updates, self.config.optimizer, self.config.run.steps * self.config.learner.updates_per_batch)
        self.updates += 1
        gradient = rows_with_gradient(batch, self.spec.has_regulariser)
        plans = schedule(batch, gradient, self.parallel.world_size, self.config.learner.micro_batch_tokens)
        plan = plans[self.parallel.rank]
        started = time.perf_counter()
        logprobs: list[Tensor] = []
        measured = [self._run(batch, micro, logprobs) for micro in plan]
        counted = [vector for vector, micro in zip(measured, plan, strict=True) if not micro.filler]
        values, norm = self._reduce(counted, bool(gradient.any()))
        ran = time.perf_counter()
        response_tokens = int(batch.response_mask.sum())
        metrics = named(values, response_tokens)
        if self.reference is not None and response_tokens:
            metrics["policy/reference_kl"] = float(values[Metric.REFERENCE_KL]) / response_tokens
        if measure_gap or batch.watched:
            new = self._logprobs(batch, plan, logprobs)
            metrics |= gap_metrics(batch, new) if measure_gap else {}
            metrics |= update_masses(batch, new, self.spec.clip_high)
        metrics |= batch.measured
        taken = self._take(metrics["loss"], norm, rate)
        return metrics | {
            "grad_norm": norm,
            "lr": rate,
            "learner/response_tokens": float(response_tokens),
            "learner/micro_batches": float(sum(not micro.filler for plan in plans for micro in plan)),
            "learner/rows_without_gradient": float((~gradient).sum()),
            "learner/masked_tokens": float((batch.response_mask & ~batch.loss_mask).sum()),
            "learner/skipped_steps": float(not taken),
            "time/forward_backward": ran - started,
            "time/optimizer": time.perf_counter() - ran,
        }

    def _run(self, batch: StepBatch, micro: MicroBatch, logprobs: list[Tensor] | None = None) -> Tensor:
        """Forward and, where asked, backward of one micro-batch; its metrics, loss and entropy sum [len(Metric) + 2].

        Its log-probs are added to ``logprobs``.
        """
        part = take_rows(batch, micro.rows)
        if micro.filler:
            part = replace(part, loss_mask=np.zeros_like(part.loss_mask), loss_weight=np.zeros_like(part.loss_weight))
        with span("inputs"):
            head = LossHead(self, part, packed_rows(part, self.parallel.device))
        with span("forward"), torch.set_grad_enabled(micro.gradient):
            loss, vector = self.policy(head.rows, head)
        if micro.gradient:
            with span("backward"):
                loss.backward()
        if logprobs is not None:
            logprobs.append(head.logprobs)
        return vector

    def _logprobs(self, batch: StepBatch, plan: Sequence[MicroBatch], logprobs: Sequence[Tensor]) -> Array:
        """The log-probs [N] of this step's forward passes, from all ranks."""
        new = np.zeros(len(batch.token_ids), dtype=np.float32)
        for micro, values in zip(plan, logprobs, strict=True):
            if not micro.filler:
                place(new, batch, micro.rows, values)
        return self.parallel.add_up(new)

    @span("reduce")
    def _reduce(self, vectors: list[Tensor], has_gradient: bool) -> tuple[Tensor, float]:
        """Totals over micro-batches and ranks with one collective and one host sync: vector on the host, global gradient norm (or 0)."""
        device = self.parallel.device
        mine = total([neutral(device), *vectors])
        everywhere = total(list(self.parallel.gather_rows(mine)))
        norm = self.optimizer.gradient_norm().to(device) if has_gradient else torch.zeros((), device=device)
        values = torch.cat([everywhere, norm.reshape(1)]).cpu()
        return values[:-1], float(values[-1])

    @span("optimizer")
    def _take(self, loss: float, norm: float, rate: float) -> bool:
        """Clip and step, unless something is not finite or there is no gradient at all; every rank decides alike.

        Without a gradient the moments would still carry the weights on, so such a step is left out.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            bound = self.config.optimizer.clip_norm
            if norm > 0:
                self.optimizer.step(rate, scale=bound / (norm + 1e-6) if norm > bound else 1.0)
            self.optimizer.zero_grad()
            return norm > 0
        self.optimizer.zero_grad()
        if self.config.learner.on_non_finite == "stop":
            raise NonFiniteError(
                f"optimizer step {self.updates}: the loss is {loss:g} and the gradient norm {norm:g}; the step was not taken. "
                "Check the rewards, lower optimizer.learning_rate, or set learner.on_non_finite: skip"
            )
        return False
