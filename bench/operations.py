"""The operations that are measured: ours, their floor and their goal."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from headrace.bench import floors
from headrace.bench.cases import SPEC, THRESHOLD, Inputs, Rows
from headrace.kernels import counterfactual_score, linear_logprob, linear_policy_loss, top_token_mask, top_token_sample

Results = dict[str, Tensor]
"""What a piece of work returns, under the names that `accuracy` knows; empty where it computes something else."""


@dataclass(frozen=True)
class Operation:
    """One row operation with everything around it."""

    name: str
    floor: str
    floor_work: Callable[[Any], floors.Work]
    run: Callable[[Any, str], Results]
    """Inputs or rows, implementation → results."""
    goals: Mapping[str, float]
    """By device type, the greatest ratio to the floor that is meant to be reached."""
    makes: type = Inputs

    def traffic(self, size: Any) -> tuple[float, str]:
        """What the floor does, and the unit per second that its speed is told in."""
        if self.makes is Rows:
            return 4e-9 * size.logits, "GB/s"
        return int(self.floor[0]) * 1e-9 * size.gemm_flops, "GFLOP/s"


def run_logprob(inputs: Inputs, implementation: str) -> Results:
    logprobs, entropies = linear_logprob(inputs.hidden, inputs.weight, inputs.targets, implementation=implementation)
    return {"logprobs": logprobs, "entropies": entropies}


def run_policy_loss(inputs: Inputs, implementation: str) -> Results:
    hidden, weight = inputs.hidden.detach().requires_grad_(), inputs.weight.detach().requires_grad_()
    result = linear_policy_loss(
        hidden,
        weight,
        inputs.targets,
        inputs.old_logprobs,
        inputs.advantages,
        inputs.loss_weights,
        SPEC,
        gates=inputs.gates,
        implementation=implementation,
    )
    result.loss.backward()
    results = {"logprobs": result.logprobs, "entropies": result.entropies, "grad_hidden": hidden.grad, "grad_weight": weight.grad}
    return {name: tensor for name, tensor in results.items() if tensor is not None}


def run_counterfactual(inputs: Inputs, implementation: str) -> Results:
    return _score(inputs, ("kl", "reverse_kl"), implementation)


def run_counterfactual_all(inputs: Inputs, implementation: str) -> Results:
    return _score(inputs, ("kl", "reverse_kl", "js", "tv"), implementation)


def _score(inputs: Inputs, divergences: tuple[str, ...], implementation: str) -> Results:
    score = counterfactual_score(
        inputs.hidden, inputs.hidden_cf, inputs.weight, inputs.targets, divergences=divergences, implementation=implementation
    )
    return {name: values for name, values in score._asdict().items() if values is not None}


def run_mask(rows: Rows, implementation: str) -> Results:
    """In place; a second call finds the rows less certain, which costs the same."""
    mask = top_token_mask(rows.logits, rows.eligible, THRESHOLD, implementation=implementation)
    return {"fired": mask.fired, "top_prob": mask.top_prob, "raw_lse": mask.raw_lse, "masked_lse": mask.masked_lse}


def run_sample(rows: Rows, implementation: str) -> Results:
    sample = top_token_sample(rows.logits, rows.eligible, THRESHOLD, rows.seeds, rows.positions, implementation=implementation)
    return {"fired": sample.fired, "top_prob": sample.top_prob, "token": sample.token, "logprob": sample.logprob}


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("linear_logprob", "1 GEMM", floors.one_gemm, run_logprob, {"cpu": 1.08, "cuda": 1.20}),
        Operation("linear_policy_loss", "3 GEMMs", floors.three_gemms, run_policy_loss, {"cpu": 1.12, "cuda": 1.15}),
        Operation("counterfactual_score", "2 GEMMs", floors.two_gemms, run_counterfactual, {"cpu": 1.12, "cuda": 1.20}),
        Operation("counterfactual_score+js+tv", "2 GEMMs", floors.two_gemms, run_counterfactual_all, {"cpu": 1.25, "cuda": 1.35}),
        Operation("top_token_mask", "1 read", floors.one_read, run_mask, {"cpu": 1.30, "cuda": 1.25}, Rows),
        Operation("top_token_sample", "1 read", floors.one_read, run_sample, {}, Rows),
    )
}
