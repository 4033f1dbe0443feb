"""What a learner rank does in test_push.py: run by torchrun as ``push_ranks.py FOLDER MODEL URL``; changes its weights, pushes, exports."""

import json
import sys
from functools import partial
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from headrace.config import DirectoryModel, ModelConfig, VLLMEngineConfig
from headrace.policy import parallel as ranks
from headrace.policy.adapters import named_weights
from headrace.policy.model import Policy
from headrace.policy.score import score_sequence
from headrace.policy.sharding import prepare
from headrace.sampling.vllm.control import Control
from headrace.sync.push import WeightSync


def main(folder: Path, model: Path, url: str) -> None:
    parallel = ranks.start(deadline=120)
    config = ModelConfig(source=DirectoryModel(path=model))
    policy = Policy.load(model, config, parallel.device)
    prepare(policy, config, parallel)
    with torch.no_grad():
        for parameter in policy.parameters():
            assert isinstance(parameter, DTensor), "a sharded learner"
            parameter.mul_(0.9)  # the same on any number of ranks
    servers = [Control(url)] if parallel.is_main else None
    sync = WeightSync(
        policy,
        (lambda: servers) if servers else None,
        VLLMEngineConfig(kind="vllm", bucket_mib=1),
        parallel,
        partial(score_sequence, policy, device=parallel.device),
        partial(named_weights, policy.model),
    )
    report = sync.push(7)
    (folder / f"rank-{parallel.rank}.json").write_text(json.dumps(report.metrics()))
    sync.close()
    ranks.meet()
    ranks.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
