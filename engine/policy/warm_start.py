"""Supervised steps on generated traces, so that a policy knows the format before rewards can teach it anything."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.config import OptimizerConfig, WarmStartConfig
from headrace.encoding import Encoder
from headrace.kernels import linear_logprob
from headrace.policy.model import PackedRows, Policy
from headrace.policy.optimizer import Optimizer, learning_rate
from headrace.records import Array, Prompt

Examples = Callable[[int, float], list[tuple[Prompt, str]]]
"""``examples(step, noise)``: a batch of prompts with gold responses, opening think tag included, end token excluded."""
Progress = Callable[[int, int, str], object]
"""``progress(done, total, note)``."""

CLIP_NORM = 1.0
WARM_UP_SHARE = 0.05


def warm_start(
    policy: Policy,
    encoder: Encoder,
    config: WarmStartConfig,
    examples: Examples,
    seed: int,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Train ``policy`` in place: token-mean cross-entropy on response tokens, clean steps first and then noisy ones.

    The vision tower learns too if the policy was loaded with it trainable. The same inputs give the same bits.

    Args:
        seed: names the run in the error message only; all randomness lies in ``examples``.

    Returns:
        ``loss`` (mean of the last tenth of the steps, nats per token), ``steps``, ``tokens`` and ``seconds``.

    Raises:
        ValueError: the loss or a gradient is not finite, or a trace does not begin with the tag that the prompt already opened.
    """
    total = config.steps + config.noisy_steps
    rates = OptimizerConfig(learning_rate=config.learning_rate, warmup_steps=max(1, round(WARM_UP_SHARE * total)), schedule="cosine")
    optimizer = Optimizer(policy.trainable_parameters(), rates)
    losses, tokens, began = [], 0, time.perf_counter()
    for step in range(total):
        batch = examples(step, config.noise if step >= config.steps else 0.0)
        rows, targets = pack_examples(batch, encoder)
        loss = policy(rows, _mean_loss(targets, encoder.banned_ids))
        loss.backward()
        norm = optimizer.gradient_norm()
        value = loss.item()
        if not (np.isfinite(value) and torch.isfinite(norm)):
            raise ValueError(f"warm_start: loss {value} with gradient norm {norm.item()} at step {step + 1} of {total} (seed {seed})")
        optimizer.step(learning_rate(step, rates, total), min(1.0, CLIP_NORM / (norm.item() + 1e-6)))
        losses.append(value)
        tokens += len(targets)
        if progress is not None:
            progress(step + 1, total, f"loss {value:.3f}")
    return {
        "loss": float(np.mean(losses[-max(1, total // 10) :])),
        "steps": float(total),
        "tokens": float(tokens),
        "seconds": time.perf_counter() - began,
    }


def pack_examples(batch: Sequence[tuple[Prompt, str]], encoder: Encoder) -> tuple[PackedRows, Tensor]:
    """Rows of prompt, response and end token, end to end; and per position the response token to predict next, else -100.

    Returns:
        The rows (N tokens) and targets [N] int64.
    """
    rows, targets = [], []
    for prompt, text in batch:
        response = response_ids(prompt, text, encoder)
        rows.append(np.concatenate([prompt.token_ids, response]))
        target = np.full(len(rows[-1]), -100, dtype=np.int64)
        target[len(prompt.token_ids) - 1 : -1] = response
        targets.append(target)
    lengths = [len(row) for row in rows]
    packed = PackedRows(
        token_ids=torch.from_numpy(np.concatenate(rows)),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)),
        max_length=max(lengths),
        media=tuple(prompt.question.media for prompt, _ in batch),
    )
    return packed, torch.from_numpy(np.concatenate(targets))


def response_ids(prompt: Prompt, text: str, encoder: Encoder) -> Array:
    """Tokens of a gold response as the policy would draw them: without a pre-filled think tag, with the end token; int64 [L].

    Raises:
        ValueError: the prompt opens a think tag that the text does not begin with.
    """
    ids = encoder.tokenizer.encode(text, add_special_tokens=False)
    if prompt.prefilled:
        if not ids or ids[0] != encoder.think_open:
            raise ValueError(
                f"question {prompt.question.id}: its prompt opens a think tag, so a trace must begin with it; got {text[:40]!r}"
            )
        ids = ids[1:]
    return np.asarray([*ids, encoder.eos_ids[0]], dtype=np.int64)


def _mean_loss(targets: Tensor, banned: Sequence[int]) -> Callable[[Tensor, Tensor], Tensor]:
    """Head that turns hidden states [N, D] into the mean of -log p over the targets; other positions never reach the kernel."""
    where = (targets != -100).nonzero().squeeze(1)

    def head(hidden: Tensor, weight: Tensor) -> Tensor:
        device = hidden.device
        chosen = hidden.index_select(0, where.to(device))
        logprobs, _ = linear_logprob(chosen, weight, targets[where].to(device), banned=banned)
        return -logprobs.mean()

    return head
