"""A made-up run folder with every table, for tests of the report and for looking at it. Nothing here was trained.

python tests/journal/synthetic_run.py FOLDER [--plain]
"""

import sys
from pathlib import Path

import numpy as np
from journal_builders import config

from headrace.config import Config
from headrace.journal.journal import Journal
from headrace.journal.store import Table
from headrace.records import Arm, Completion, Group, MaskTrace, Prompt, Question, Reward, Rollout

WORDS = [
    *"ABCDE",
    " yes",
    " no",
    " the",
    " and",
    " sum",
    " q1",
    " q2",
    " q3",
    " ;",
    "**",
    ",",
    " 2",
    " 5",
    " 7",
    " 9",
    " 14",
    " answer",
    " boxed",
    "\n",
]
THINK, END = "<think>", "</think> <answer> 14 </answer><|im_end|>"


def decode(tokens) -> str:
    return "".join(WORDS[token] for token in tokens)


def synthetic_config(folder: Path, name: str, steps: int, *, cge: bool = True) -> Config:
    return config(
        folder,
        run={"folder": str(folder), "name": name, "steps": steps, "questions_per_step": 16},
        sampling={"max_tokens": 96, "group_size": 8, "cge": {"token_filter": "none", "control_share": 0.25} if cge else None},
        questions={"train": {"kind": "multi_hop"}, "held_out": {"kind": "multi_hop", "count": 128}},
        warm_start={"steps": 380, "noisy_steps": 240},
    )


def _completion(rng: np.random.Generator, masked: bool) -> Completion:
    length = int(rng.integers(30, 70))
    tokens = rng.integers(0, len(WORDS), length).astype(np.int32)
    flags = (rng.random(length) < 0.04) & masked
    where = np.flatnonzero(flags).astype(np.int32)
    top = rng.uniform(0.95, 1, len(where)).astype(np.float32)
    trace = MaskTrace(
        positions=where,
        removed_ids=((tokens[where] + rng.integers(1, len(WORDS), len(where))) % len(WORDS)).astype(np.int32),
        removed_probs=top,
        runner_up_probs=((1 - top) * rng.uniform(0.2, 0.9, len(where))).astype(np.float32),
        drawn_ids=tokens[where],
        drawn_ranks=rng.choice([2, 3, 4, 9], len(where), p=[0.5, 0.2, 0.2, 0.1]).astype(np.int32),
        entropies=rng.uniform(0.01, 0.3, len(where)).astype(np.float32),
    )
    zeros = np.zeros(length, dtype=np.int32)
    finish = "length" if rng.random() < 0.01 else "stop"
    confident = int(flags.sum() + rng.integers(0, 2)) if masked else 0
    return Completion(
        tokens, zeros.astype(np.float32), flags, zeros, finish, length if masked else 0, confident, False, trace if len(where) else None
    )


def _group(rng: np.random.Generator, ability: float, cge: bool, name: str) -> Group:
    chance = float(np.clip(rng.beta(0.6, 0.6) * 0.7 + ability * 0.4, 0, 1))
    first = (rng.random(4) < chance).astype(float)
    intervened = cge and first.min() == first.max()
    arm: Arm = ("control" if rng.random() < 0.25 else "masked") if intervened else "free"
    second = (rng.random(4) < np.clip(chance + (0.08 if arm == "masked" and chance < 0.5 else 0), 0, 1)).astype(float)
    rollouts = []
    for index, accuracy in enumerate([*first, *second]):
        wave = 2 if cge and index >= 4 else 1
        form = float(rng.random() < 0.9 + ability / 10)
        reward = Reward(0.8 * accuracy + 0.2 * form, accuracy, form)
        own: Arm = arm if wave == 2 else "free"
        rollouts.append(Rollout(index, wave, own, _completion(rng, own == "masked"), "", reward))  # type: ignore[arg-type]
    rewards = np.array([rollout.reward.total for rollout in rollouts if rollout.reward is not None])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    text = "<image>blue 4 ; ball 2 ; cone 8 | q1 blue > ball ? 2 : 5 ; q2 <script>alert('no')</script> ="
    question = Question(name, ({"role": "user", "content": text},), "14", extra={"hops": 2})
    return Group(Prompt(question, np.arange(5)), tuple(rollouts), intervened=intervened, arm=arm, advantages=advantages.astype(np.float32))


def evaluation(rng: np.random.Generator, name: str, ability: float, questions: int = 128) -> dict:
    """A result in the journal's evaluation format."""
    items = []
    for number in range(questions):
        hops = 2 + number % 3
        samples = (rng.random(8) < np.clip(ability + 0.25 - 0.15 * (hops - 2), 0, 1)).astype(int)
        items.append(
            {
                "id": f"h{number}",
                "hops": hops,
                "greedy": int(samples.mean() > 0.4),
                "samples": samples.tolist(),
                "maj": int(samples.sum() > 4),
            }
        )
    by_hops = {str(hops): {"mean_accuracy": float(np.mean([i["samples"] for i in items if i["hops"] == hops]))} for hops in (2, 3, 4)}
    return {
        "name": name,
        "questions": questions,
        "mean_accuracy": float(np.mean([item["samples"] for item in items])),
        "greedy_accuracy": float(np.mean([item["greedy"] for item in items])),
        "maj_accuracy": float(np.mean([item["maj"] for item in items])),
        "format_rate": 0.97,
        "length_mean": 45.2,
        "by_hops": by_hops,
        "per_question": items,
    }


def synthesise(folder: Path, name: str = "demo", steps: int = 90, *, cge: bool = True, seed: int = 0, questions: int = 16) -> Path:
    """Write a run folder and return it."""
    rng = np.random.default_rng(seed)
    made = synthetic_config(folder, name, steps, cge=cge)
    journal = Journal(made, steps, quiet=True)
    journal.start()
    journal.log_evaluation(0, evaluation(rng, "before", 0.3))
    for step in range(1, steps + 1):
        ability = 0.6 * (1 - np.exp(-step / 40))
        groups = [_group(rng, ability, cge, f"multi_hop-{step}-{number}") for number in range(questions)]
        learner = {
            "policy/entropy": 0.45 * np.exp(-step / 80) + rng.normal(0, 0.01) + (0.05 if cge else 0),
            "ppo/clip_share": abs(rng.normal(0.01, 0.004)),
            "grad_norm": abs(rng.normal(0.8, 0.2)),
        }
        journal.log(step, learner, groups, decode)
        if step in (steps // 3, 2 * steps // 3):
            journal.log_evaluation(step, evaluation(rng, "held_out", 0.3 + ability / 2))
    journal.log_evaluation(steps, evaluation(rng, "after", 0.62))
    journal.finish("finished")
    _plausible_timings(journal.metrics, rng)
    return made.run_folder


def _plausible_timings(table: Table, rng: np.random.Generator) -> None:
    rows = list(table.rows())
    table.path.unlink()
    for row in rows:
        sampling, update = rng.normal(0.62, 0.03), rng.normal(0.57, 0.03)
        parts = {"time/sampling": sampling, "time/update": update, "time/scoring": 0.04, "time/advantage": 0.002}
        step = sum(parts.values())
        rate = row["len/tokens_n"] / step
        table.append({**row, **parts, "time/step": step, "time/wall": step + 0.1, "time/tokens_per_s": rate})


if __name__ == "__main__":
    print(synthesise(Path(sys.argv[1]), "plain" if "--plain" in sys.argv else "demo", cge="--plain" not in sys.argv))
