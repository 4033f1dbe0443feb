"""Hand-made records and run folders for the journal's tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config import Config
from headrace.records import Arm, Completion, Group, MaskTrace, Prompt, Question, Reward, Rollout

MINIMAL: dict[str, Any] = {
    "model": {"source": {"kind": "scratch_text"}},
    "questions": {"train": {"kind": "multi_hop"}},
    "sampling": {"max_tokens": 64, "group_size": 8},
}


def config(folder: Path, **sections: Any) -> Config:
    """A configuration whose run folder is ``folder/run``; TensorBoard is off unless asked for."""
    tree = {**MINIMAL, "run": {"folder": str(folder), "name": "run"}, "journal": {"tensorboard": False}, **sections}
    return Config.model_validate(tree)


def completion(length: int = 10, masked: Sequence[int] = (), *, examined: int = 0, confident: int = 0) -> Completion:
    """Token ids count up from 0; a masked position drew its own id where the mask removed id 100 + position."""
    tokens = np.arange(length, dtype=np.int32)
    flags = np.zeros(length, dtype=bool)
    flags[list(masked)] = True
    return Completion(
        token_ids=tokens,
        logprobs=np.full(length, -0.1, dtype=np.float32),
        masked=flags,
        versions=np.zeros(length, dtype=np.int32),
        finish_reason="stop",
        examined=examined,
        confident=confident,
        trace=trace(masked) if len(masked) else None,
    )


def trace(positions: Sequence[int], top: float = 0.97, ranks: int = 2) -> MaskTrace:
    where = np.array(positions, dtype=np.int32)
    count = len(where)
    return MaskTrace(
        positions=where,
        removed_ids=where + 100,
        removed_probs=np.full(count, top, dtype=np.float32),
        runner_up_probs=np.full(count, 0.014, dtype=np.float32),
        drawn_ids=where,
        drawn_ranks=np.full(count, ranks, dtype=np.int32),
        entropies=np.full(count, 0.171853, dtype=np.float32),
    )


def rollout(index: int, wave: int, arm: Arm, accuracy: float | None, made: Completion | None = None) -> Rollout:
    reward = None if accuracy is None else Reward(0.8 * accuracy + 0.2, accuracy, 1.0)
    return Rollout(index, wave, arm, made or completion(), "text", reward, "" if reward else "timeout")  # type: ignore[arg-type]


def group(wave1: Sequence[float | None], wave2: Sequence[float | None], arm: Arm = "masked", *, name: str = "q", hops: int = 2) -> Group:
    """A group that intervenes exactly when the first wave has no variance; ``arm`` is then the arm of its second wave."""
    valid = [accuracy for accuracy in wave1 if accuracy is not None]
    intervened = bool(wave2) and len(valid) >= 2 and min(valid) == max(valid)
    second: Arm = arm if intervened else "free"
    rollouts = [rollout(index, 1, "free", accuracy) for index, accuracy in enumerate(wave1)]
    for index, accuracy in enumerate(wave2, start=len(wave1)):
        made = completion(10, (2, 5), examined=8, confident=2) if second == "masked" else completion()
        rollouts.append(rollout(index, 2, second, accuracy, made))
    question = Question(name, ({"role": "user", "content": f"question {name}"},), "14", extra={"hops": hops})
    return Group(Prompt(question, np.arange(5)), tuple(rollouts), intervened=intervened, arm=second)
