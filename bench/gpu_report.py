"""Determinism and peak memory of the GPU kernels at a training step's size: the last part of `bench/gpu_check.sh`.

python -m headrace.bench.gpu_report [--repeats 20] [--tokens 21504] [--width 4096] [--vocabulary 151936]
"""

import argparse

import torch
from torch import Tensor

from headrace.kernels import PolicySpec, choose, linear_policy_loss
from headrace.kernels.dispatch import available
from headrace.kernels.policy_spec import TokenStreams

SPEC = PolicySpec(dual_clip=3.0, entropy_coef=0.01)
MEMORY_GOALS = {4096: 6.5, 8192: 10.5}
"""Peak extra memory in GB by chunk, at 21,504 tokens, width 4096 and a vocabulary of 151,936."""


def repeats(implementation: str, count: int) -> int:
    """How many of `count` runs of the row kernels give the first run's bits."""
    rows = choose(torch.device("cuda"), torch.float32, implementation)
    torch.manual_seed(0)
    logits = torch.randn(512, 151936, device="cuda") * 4
    targets = torch.randint(0, 151936, (512,), device="cuda")
    heat, flags = torch.rand(512, device="cuda") + 0.5, torch.ones(512, dtype=torch.bool, device="cuda")
    streams = TokenStreams(torch.full((512,), -12.0, device="cuda"), torch.randn(512, device="cuda"), heat)

    def run() -> list[Tensor]:
        state, gradient = rows.loss_gradient(logits.clone(), targets, heat, streams, SPEC, dtype=torch.bfloat16)
        sample = rows.top_token_sample(logits, flags, heat, targets, targets, heat)
        return [state, gradient, *sample, rows.pair_statistics(logits, logits, targets, heat)]

    first = [each.clone() for each in run()]
    return sum(all(torch.equal(a, b) for a, b in zip(first, run(), strict=True)) for _ in range(count))


def peak(implementation: str, chunk: int, tokens: int, width: int, vocabulary: int) -> float:
    """GB that forward and backward of the fused loss take beyond their inputs."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocabulary, width, device="cuda", dtype=torch.bfloat16) * 0.02).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), device="cuda")
    streams = torch.full((tokens,), -12.0, device="cuda"), torch.randn(tokens, device="cuda"), torch.ones(tokens, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_policy_loss(hidden, weight, targets, *streams, SPEC, chunk=chunk, implementation=implementation).loss.backward()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=21504)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151936)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu_report: no CUDA device")
    failed = False
    for implementation in ("triton", "cuda"):
        if not available(implementation):
            print(f"{implementation:8} not available here")
            continue
        same = repeats(implementation, options.repeats)
        failed |= same < options.repeats
        print(f"{implementation:8} bitwise equal repeats  {same}/{options.repeats}")
        for chunk, goal in MEMORY_GOALS.items():
            used = peak(implementation, chunk, options.tokens, options.width, options.vocabulary)
            failed |= used > goal
            print(f"{implementation:8} peak memory, chunk {chunk}  {used:.2f} GB (goal {goal})")
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
