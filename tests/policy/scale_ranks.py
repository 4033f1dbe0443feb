"""What a learner rank does in test_scale.py: run by torchrun, trains every case of a folder, leaves results there."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from headrace import checkpoint
from headrace.config import ConfigError
from headrace.policy import parallel as ranks
from headrace.policy.adapters import named_weights
from headrace.policy.update import Learner
from tests.policy.two_ranks import batches, export, make

REPEATED = ("replicas", "lora", "tis")
"""Cases that are trained once more from the start."""


def whole(learner: Learner) -> dict[str, torch.Tensor]:
    """All weights of the learner on every rank, adapters beside their bases."""
    return {name: ranks.full_tensor(parameter).cpu().clone() for name, parameter in learner.policy.named_parameters()}


def train(folder: Path, name: str, parallel: ranks.Parallel) -> tuple[Learner, list[dict[str, float]]]:
    learner = make(folder, name, parallel)
    return learner, [learner.update(batch) for batch in batches(folder, name, parallel)]


def resume(folder: Path, name: str, parallel: ranks.Parallel, learner: Learner) -> bool:
    """Whether a checkpoint, loaded into a fresh learner, goes on with the same bits as the learner it was made of."""
    checkpoint.save(folder / f"{name}.checkpoints", learner.updates, learner, {})
    second = make(folder, name, parallel)
    checkpoint.restore(folder / f"{name}.checkpoints", second)
    batch = next(iter(batches(folder, name, parallel)))
    for one in (learner, second):
        one.update(batch)
    return all(torch.equal(a, b) for a, b in zip(whole(learner).values(), whole(second).values(), strict=True))


def fail_alone(folder: Path, parallel: ranks.Parallel) -> None:
    """Rank 1 fails, both hear of it, and the group goes on."""

    def act() -> None:
        if parallel.rank == 1:
            raise OSError("its disk is full")

    try:
        parallel.run_everywhere(act)
    except (OSError, ValueError) as error:
        (folder / f"failure{parallel.rank}").write_text(str(error))
    gathered = parallel.run_everywhere(lambda: [f"rank {parallel.rank}"] * (1 + parallel.rank))
    (folder / "gathered").write_text(json.dumps(gathered))


def main(folder: Path) -> None:
    parallel = ranks.start(deadline=120)
    for path in sorted(folder.glob("*.json")):
        name = path.stem
        if name in ("banned", "bad"):
            continue
        learner, metrics = train(folder, name, parallel)
        weights = whole(learner)
        others = whole(train(folder, name, parallel)[0]) if name in REPEATED else weights
        merged = {key: ranks.full_tensor(tensor).clone() for key, tensor in named_weights(learner.policy.model)}
        found = {
            "metrics": metrics,
            "repeats": all(torch.equal(weights[key], others[key]) for key in weights),
            "local": sum(ranks.local(parameter).numel() for parameter in learner.policy.parameters()),
        }
        if name.startswith("lora"):
            export(learner, folder / f"{name}.exported")
        found["resumes"] = resume(folder, name, parallel, learner)
        if parallel.is_main:
            save_file(weights, folder / f"{name}.safetensors")
            save_file({key: tensor for key, tensor in merged.items() if key != "lm_head.weight"}, folder / f"{name}.merged.safetensors")
            (folder / f"{name}.found").write_text(json.dumps(found))
    try:
        make(folder, "bad", parallel)
    except ConfigError as error:
        (folder / f"refused{parallel.rank}").write_text(str(error))
    fail_alone(folder, parallel)
    ranks.stop()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
