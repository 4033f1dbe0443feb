"""Two learner ranks through torchrun and gloo: the same numbers as one process. One torchrun serves all tests."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from headrace import checkpoint
from headrace.config import Config
from headrace.policy import parallel as ranks
from headrace.policy.packing import rows_with_gradient, schedule
from headrace.records import StepBatch
from headrace.wire import pack, unpack
from tests import runs
from tests.policy.learner_cases import (
    BANNED,
    make_config,
    make_learner,
    picture_batch,
    random_batch,
    tiny_model,
    tiny_vision_model,
    with_claims,
)

RATE = {"learning_rate": 5e-4}  # Adam turns rounding noise in a gradient near zero into a share of the rate
PLAIN = {"loss": {"kl_coef": 0.05, "entropy_coef": 0.01}, "optimizer": RATE}
STEPS = 4


def train(folder, name, config):
    """The run of one process on the batches that the ranks get."""
    learner = make_learner(config)
    paths = sorted(folder.glob(f"{name}-*.batch"))
    return learner, [learner.update(unpack(path.read_bytes(), StepBatch)) for path in paths]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Cases for both, and what the two ranks made of them."""
    folder = tmp_path_factory.mktemp("ranks")
    model = tiny_model(folder / "model")
    configs = {
        "plain": make_config(model, **PLAIN),
        "recomputed": make_config(model, model={"activation_checkpointing": True}, learner={"updates_per_batch": 2}, optimizer=RATE),
        "split": make_config(model),
        "bf16": make_config(model, model={"dtype": "bfloat16"}, optimizer=RATE),
    }
    visual = tiny_vision_model(folder / "visual")
    for name, trained in (("vision_trained", True), ("vision_frozen", False)):
        configs[name] = make_config(visual, model={"train_vision": trained}, optimizer=RATE, learner={"micro_batch_tokens": 30})
    credit = {"vppo": {}, "pacg": {"router": {"kind": "rules", "patterns": ["x"]}}}
    stepping = {"micro_batch_tokens": 30, "updates_per_batch": 2}
    configs["vision_credited"] = make_config(visual, credit=credit, loss={"tis_cap": 2.0}, optimizer=RATE, learner=stepping)
    (folder / "banned.json").write_text(json.dumps(BANNED))
    for name, config in configs.items():
        (folder / f"{name}.json").write_text(config.model_dump_json())
        for number in range(2 if "vision" in name else STEPS):
            pictures = "vision" in name
            batch = (
                random_batch(100 + number, config.loss, zero_groups=number % 2, size=3)
                if not pictures
                else with_claims(picture_batch(visual, number, config.loss))
            )
            (folder / f"{name}-{number}.batch").write_bytes(pack(batch))
    single, _ = train(folder, "plain", configs["plain"])
    checkpoint.save(folder / "single", STEPS, single, {"ledger": [1, 2]})
    runs.on_two_ranks(Path(__file__).with_name("two_ranks.py"), folder)
    return folder


@pytest.mark.parametrize("name", ["plain", "recomputed", "vision_trained", "vision_frozen", "vision_credited"])
def test_two_ranks_train_like_one_process(folder, name):
    """Weights and metrics agree to 1e-5 after four batches; the second case recomputes activations and steps twice a batch.

    With pictures in half of the groups, a rank meets micro-batches that do not use the vision tower its peer trains.
    """
    learner, alone = train(folder, name, ranks_config(folder, name))
    together = load_file(folder / f"{name}.safetensors")
    for key, parameter in learner.policy.named_parameters():
        torch.testing.assert_close(together[key], parameter.detach(), rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(alone, json.loads((folder / f"{name}.metrics").read_text()), strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine:
            if not key.startswith("time/") and key != "learner/micro_batches":
                assert theirs[key] == pytest.approx(mine[key], rel=1e-4, abs=1e-5), key


def ranks_config(folder, name):
    return Config.model_validate_json((folder / f"{name}.json").read_text())


def test_loss_and_gradient_do_not_depend_on_the_world_size(folder):
    """Any budget, one rank or two: the same. A rank that divides by its own tokens is found out."""
    learner = make_learner(ranks_config(folder, "split"))
    together = load_file(folder / "split.safetensors")
    for number in range(STEPS):
        batch = unpack((folder / f"split-{number}.batch").read_bytes(), StepBatch)
        plan = schedule(batch, rows_with_gradient(batch, False), 1, 10**6)[0]
        values, norm = learner._reduce([learner._run(batch, micro) for micro in plan], True)
        flat = [master.grad.flatten() for master in learner.optimizer.masters.values()]
        expected = torch.cat([values, torch.tensor([norm]), *flat])
        learner.optimizer.zero_grad()
        for budget in (7, 40, 10**6):
            torch.testing.assert_close(together[f"{number}.{budget}"], expected, rtol=1e-4, atol=1e-5)
        wrong = together[f"{number}.40.wrong"]
        assert (wrong - expected)[len(values) :].norm() > 1e-3 * expected[len(values) :].norm()


def test_a_checkpoint_of_two_ranks_loads_into_one_process(folder):
    learner = make_learner(ranks_config(folder, "plain"))
    restored = checkpoint.restore(folder / "checkpoints", learner)
    assert (restored.step, restored.extra, learner.updates) == (4, {"from": "two ranks"}, STEPS)
    assert checkpoint.read_state(checkpoint.latest(folder / "checkpoints"))["world_size"] == 2
    together = load_file(folder / "plain.safetensors")
    assert all(torch.equal(together[name], parameter) for name, parameter in learner.policy.named_parameters())


def test_a_checkpoint_of_one_process_loads_into_two_ranks(folder):
    learner = make_learner(ranks_config(folder, "plain"))
    restored = checkpoint.restore(folder / "single", learner)
    assert json.loads((folder / "resumed.json").read_text()) == [restored.step, restored.extra, learner.updates]
    resumed = load_file(folder / "resumed.safetensors")
    for name, parameter in learner.policy.named_parameters():
        assert torch.equal(resumed[name], parameter)
        assert torch.equal(resumed[f"{name}.exp_avg_sq"], learner.optimizer.state_dict()[name]["exp_avg_sq"])


def test_a_sharded_vision_language_policy_exports_under_the_names_it_came_with(folder):
    before, after = load_file(folder / "visual" / "model.safetensors"), load_file(folder / "exported_visual" / "model.safetensors")
    assert before.keys() == after.keys()
    assert {name for name in before if not torch.equal(before[name], after[name])} >= {name for name in before if "visual.merger" in name}
    AutoModelForImageTextToText.from_pretrained(folder / "exported_visual")


def test_a_sharded_policy_exports_whole(folder):
    exported = AutoModelForCausalLM.from_pretrained(folder / "exported").state_dict()
    together = load_file(folder / "plain.safetensors")
    for name, tensor in together.items():
        assert torch.equal(exported[name.removeprefix("model.")], tensor)


def test_bf16_layers_with_fp32_shards_learn_alike(folder):
    """Layers round to bf16 in other places than an unsharded bf16 model; masters are fp32 in both, and exports are bf16 again."""
    learner, alone = train(folder, "bf16", ranks_config(folder, "bf16"))
    for mine, theirs in zip(alone, json.loads((folder / "bf16.metrics").read_text()), strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], abs=0.02)
        assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], rel=0.05)
    exported = load_file(folder / "exported_bf16" / "model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    mine, theirs = (learner.policy.model.state_dict(), exported)
    shift = torch.cat([(mine[name].float() - theirs[name].float()).flatten() for name in theirs])
    assert shift.norm() < 0.02 * torch.cat([tensor.float().flatten() for tensor in theirs.values()]).norm()


def test_a_failure_of_rank_0_is_raised_on_every_rank(folder):
    assert [(folder / f"failure{rank}").read_text() for rank in (0, 1)] == ["no such luck", "rank 0 failed: no such luck"]


def test_one_process_needs_no_group(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    parallel = ranks.start()
    assert (parallel.rank, parallel.world_size, parallel.is_main) == (0, 1, True)
    assert not torch.distributed.is_initialized()
    assert parallel.broadcast_json({"a": [1, None]}) == {"a": [1, None]}
    vector = torch.arange(3.0)
    assert parallel.gather_rows(vector).tolist() == [[0, 1, 2]]
    assert np.array_equal(parallel.broadcast_batch(random_batch(0, make_config("x").loss)).prompts, np.repeat([0, 1, 2], 4))
