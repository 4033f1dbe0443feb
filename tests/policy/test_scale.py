"""Every way to lay a learner out over two ranks gives the numbers of one process and the same bits again. One torchrun for all."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headrace import checkpoint
from headrace.policy.adapters import named_weights
from headrace.wire import pack
from tests import runs
from tests.policy.learner_cases import BANNED, make_config, make_learner, random_batch, tiny_model

RATE = {"learning_rate": 5e-4}  # Adam turns rounding noise in a gradient near zero into a share of the rate
CASES = {
    "replicas": {"model": {"shard": 1}},
    "offload": {"model": {"shard": 2, "offload": True, "activation_checkpointing": True}, "learner": {"updates_per_batch": 2}},
    "lora": {"model": {"lora": {"rank": 4}}, "loss": {"kl_coef": 0.05}},
    "lora_replicas": {"model": {"lora": {"rank": 4}, "shard": 1, "offload": True}, "loss": {"kl_coef": 0.05}},
    "tis": {"loss": {"tis_cap": 1.5, "max_gap": 1.0}, "learner": {"updates_per_batch": 2}},
    "eight_bit": {"optimizer": {"moments": "8bit"}},
}
STEPS = 2


def config_of(folder, name):
    wide = name == "eight_bit"  # half a matrix must have 4,096 values to be packed
    sections = {**CASES[name], "optimizer": {**RATE, **CASES[name].get("optimizer", {})}}
    return make_config(folder / ("wide" if wide else "model"), **sections)


def alone_of(folder, name):
    """The configuration for one process, which has nothing to shard."""
    config = config_of(folder, name)
    return config.model_copy(update={"model": config.model.model_copy(update={"shard": None, "offload": False})})


def batch_of(config, number):
    return random_batch(100 + number, config.loss, zero_groups=number % 2, size=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scale")
    tiny_model(folder / "model")
    tiny_model(folder / "wide", hidden=128)
    (folder / "banned.json").write_text(json.dumps(BANNED))
    for name in CASES:
        config = config_of(folder, name)
        (folder / f"{name}.json").write_text(config.model_dump_json())
        for number in range(STEPS):
            (folder / f"{name}-{number}.batch").write_bytes(pack(batch_of(config, number)))
    (folder / "bad.json").write_text(make_config(folder / "model", model={"shard": 3}).model_dump_json())
    runs.on_two_ranks(Path(__file__).with_name("scale_ranks.py"), folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_like_one_process(folder, name):
    config = alone_of(folder, name)
    learner = make_learner(config)
    alone = [learner.update(batch_of(config, number)) for number in range(STEPS)]
    found = json.loads((folder / f"{name}.found").read_text())
    for mine, theirs in zip(alone, found["metrics"], strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine:
            if not key.startswith("time/") and key != "learner/micro_batches":
                assert theirs[key] == pytest.approx(mine[key], rel=1e-3, abs=1e-5), key
    together = load_file(folder / f"{name}.safetensors")
    for key, parameter in learner.policy.named_parameters():
        tolerance = {"rtol": 1e-4, "atol": 1e-5} if name != "eight_bit" else {"rtol": 1e-3, "atol": 1e-4}
        torch.testing.assert_close(together[key], parameter.detach(), **tolerance)
    merged = load_file(folder / f"{name}.merged.safetensors")
    for key, tensor in named_weights(learner.policy.model):
        if key in merged:
            torch.testing.assert_close(merged[key], tensor.detach(), rtol=1e-3, atol=1e-4)
    assert len(merged) >= 24


@pytest.mark.parametrize("name", CASES)
def test_it_repeats_and_resumes_to_the_bit(folder, name):
    found = json.loads((folder / f"{name}.found").read_text())
    assert (found["repeats"], found["resumes"]) == (True, True)


def test_a_rank_holds_its_share(folder):
    """Half of the weights where two ranks share a copy, all of them in a replica."""
    whole = sum(parameter.numel() for parameter in make_learner(alone_of(folder, "replicas")).policy.parameters())
    held = {name: json.loads((folder / f"{name}.found").read_text())["local"] for name in CASES}
    assert held["replicas"] == whole
    assert held["offload"] == held["tis"] == whole / 2


@pytest.mark.parametrize("name", ["lora", "lora_replicas"])
def test_sharded_adapters_export_merged(folder, name):
    exported, merged = load_file(folder / f"{name}.exported" / "model.safetensors"), load_file(folder / f"{name}.merged.safetensors")
    assert exported.keys() == load_file(folder / "model" / "model.safetensors").keys() == merged.keys()
    assert all(torch.equal(exported[key], merged[key]) for key in merged)


@pytest.mark.parametrize("name", ["replicas", "offload", "lora_replicas", "eight_bit"])
def test_their_checkpoints_load_into_one_process(folder, name):
    learner = make_learner(alone_of(folder, name))
    restored = checkpoint.restore(folder / f"{name}.checkpoints", learner)
    together = load_file(folder / f"{name}.safetensors")
    assert restored.step == learner.updates >= STEPS
    assert all(torch.equal(together[key], parameter) for key, parameter in learner.policy.named_parameters())


def test_a_shard_that_does_not_divide_the_ranks_is_refused(folder):
    line = "model.shard = 3 does not divide the 2 learner ranks; expected a divisor, or null for all of them"
    assert [(folder / f"refused{rank}").read_text() for rank in (0, 1)] == [line, line]


def test_a_failure_of_one_rank_is_raised_on_every_rank(folder):
    """Otherwise the ranks that were well would wait for the other in the next collective."""
    assert [(folder / f"failure{rank}").read_text() for rank in (0, 1)] == ["rank 1 failed: its disk is full", "its disk is full"]
    assert json.loads((folder / "gathered").read_text()) == [["rank 0"], ["rank 1", "rank 1"]]


def test_one_process_has_no_shards_to_offload(folder):
    config = make_config(folder / "model", model={"offload": True})
    with pytest.raises(ValueError, match=r"^model\.offload keeps shards on the host and needs several learner ranks"):
        make_learner(config)
