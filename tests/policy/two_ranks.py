"""What a learner rank does in the tests of parallel.py: run by torchrun, reads its cases from a folder, leaves results there."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from headrace import checkpoint
from headrace.config import Config
from headrace.credit.rules import credit_rules
from headrace.encoding import Encoder
from headrace.policy import parallel as ranks
from headrace.policy.model import Policy
from headrace.policy.packing import loss_weights, rows_with_gradient, schedule
from headrace.policy.update import Learner
from headrace.records import StepBatch
from headrace.wire import unpack


def make(folder: Path, name: str, parallel: ranks.Parallel) -> Learner:
    config = Config.model_validate_json((folder / f"{name}.json").read_text())
    policy = Policy.load(Path(config.model.source.path), config.model, parallel.device)
    return Learner(policy, config, json.loads((folder / "banned.json").read_text()), parallel, credit_rules(config.credit))


def batches(folder: Path, name: str, parallel: ranks.Parallel):
    """The stored batches in order, read on rank 0 alone."""
    for path in sorted(folder.glob(f"{name}-*.batch")):
        yield parallel.broadcast_batch(unpack(path.read_bytes(), StepBatch) if parallel.is_main else None)


def weights(learner: Learner, parallel: ranks.Parallel) -> dict[str, torch.Tensor]:
    """Full weights through the copy that an embedded sampler would draw with."""
    replica = Policy.load(Path(learner.config.model.source.path), learner.config.model, parallel.device) if parallel.is_main else None
    ranks.gather_full_weights(learner.policy, replica)
    return {name: parameter.detach().clone() for name, parameter in replica.named_parameters()} if replica else {}


def train(folder: Path, name: str, parallel: ranks.Parallel) -> Learner:
    learner = make(folder, name, parallel)
    metrics = [learner.update(batch) for batch in batches(folder, name, parallel)]
    full = weights(learner, parallel)
    if parallel.is_main:
        save_file(full, folder / f"{name}.safetensors")
        (folder / f"{name}.metrics").write_text(json.dumps(metrics))
    return learner


def split(folder: Path, name: str, parallel: ranks.Parallel) -> None:
    """Gradients of every batch under several budgets, and of a rank that divides by its own tokens."""
    learner = make(folder, name, parallel)
    found = {}
    for number, batch in enumerate(batches(folder, name, parallel)):
        for budget in (7, 40, 10**6):
            for wrong in (False, True) if budget == 40 else (False,):
                gradient = rows_with_gradient(batch, learner.spec.has_regulariser)
                plan = schedule(batch, gradient, parallel.world_size, budget)[parallel.rank]
                mine = np.isin(np.repeat(np.arange(len(batch.prompts)), np.diff(batch.cu_seqlens)), [r for m in plan for r in m.rows])
                local = loss_weights(batch.response_mask & mine, batch.cu_seqlens, "token_mean", 1) / parallel.world_size
                case = replace(batch, loss_weight=local) if wrong else batch
                vectors = [learner._run(case, micro) for micro in plan]
                counted = [vector for vector, micro in zip(vectors, plan, strict=True) if not micro.filler]
                values, norm = learner._reduce(counted, bool(gradient.any()))
                full = [ranks.full_tensor(m.grad).flatten() for m in learner.optimizer.masters.values() if m.grad is not None]
                key = f"{number}.{budget}" + (".wrong" if wrong else "")
                found[key] = torch.cat([values, torch.tensor([norm]), *full])
                learner.optimizer.zero_grad()
    if parallel.is_main:
        save_file(found, folder / f"{name}.safetensors")


def export(learner: Learner, directory: Path) -> None:
    encoder = Encoder.load(learner.config.model.source.path, think_prefill=True, system_prompt=None, max_prompt_tokens=99)
    checkpoint.export(learner.policy, encoder, directory)


def main(folder: Path) -> None:
    parallel = ranks.start(deadline=120)
    train(folder, "recomputed", parallel)
    export(train(folder, "bf16", parallel), folder / "exported_bf16")
    train(folder, "vision_frozen", parallel)
    train(folder, "vision_credited", parallel)
    export(train(folder, "vision_trained", parallel), folder / "exported_visual")
    split(folder, "split", parallel)
    learner = train(folder, "plain", parallel)
    checkpoint.save(folder / "checkpoints", 4, learner, {"from": "two ranks"})
    export(learner, folder / "exported")
    resumed = make(folder, "plain", parallel)
    restored = checkpoint.restore(folder / "single", resumed)
    full = weights(resumed, parallel)
    moments = {name: ranks.full_tensor(entry["exp_avg_sq"]) for name, entry in resumed.optimizer.state_dict().items()}
    if parallel.is_main:
        save_file(full | {f"{name}.exp_avg_sq": moment for name, moment in moments.items()}, folder / "resumed.safetensors")
        (folder / "resumed.json").write_text(json.dumps([restored.step, restored.extra, resumed.updates]))

    def fail() -> None:
        raise OSError("no such luck")

    try:
        parallel.run_on_main(fail)
    except (OSError, ValueError) as error:
        (folder / f"failure{parallel.rank}").write_text(str(error))
    ranks.stop()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
