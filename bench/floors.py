"""What no implementation can beat without cheating: the vendor's matrix products of the same shape, one read of the logits."""

from collections.abc import Callable

import torch

from headrace.bench.cases import Inputs, Rows

Work = Callable[[], object]


def one_gemm(inputs: Inputs) -> Work:
    """Hidden times weight into the whole logits matrix, in memory that is there already."""
    logits = torch.empty(inputs.size.tokens, inputs.size.vocabulary, dtype=inputs.dtype, device=inputs.device)
    return lambda: torch.mm(inputs.hidden, inputs.weight.t(), out=logits)


def two_gemms(inputs: Inputs) -> Work:
    """The same for both hidden streams."""
    logits = torch.empty(inputs.size.tokens, inputs.size.vocabulary, dtype=inputs.dtype, device=inputs.device)

    def run() -> None:
        torch.mm(inputs.hidden, inputs.weight.t(), out=logits)
        torch.mm(inputs.hidden_cf, inputs.weight.t(), out=logits)

    return run


def three_gemms(inputs: Inputs) -> Work:
    """Logits, gradient of the hidden states, gradient of the weight."""
    logits = torch.empty(inputs.size.tokens, inputs.size.vocabulary, dtype=inputs.dtype, device=inputs.device)
    grad_hidden, grad_weight = torch.empty_like(inputs.hidden), torch.empty_like(inputs.weight)

    def run() -> None:
        torch.mm(inputs.hidden, inputs.weight.t(), out=logits)
        torch.mm(logits, inputs.weight, out=grad_hidden)
        torch.mm(logits.t(), inputs.hidden, out=grad_weight)

    return run


def one_read(rows: Rows) -> Work:
    """One read of the logits. On a CPU by the fastest reader torch has; on a GPU by a copy of half of them, which moves as many bytes."""
    if rows.device.type == "cuda":
        half = rows.logits[: max(1, len(rows.logits) // 2)]
        target = torch.empty_like(half)
        return lambda: target.copy_(half)
    return lambda: torch.linalg.vector_norm(rows.logits)
